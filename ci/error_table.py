"""Table of all error texts in the library's source, for the end of the page on errors.

    python -m ci.error_table

An ellipsis stands for the variable parts of a text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hyper_parallel"
#: Folders whose errors users see -> the table's name for the folder. The tools for tests are left out.
AREAS = {
    "cli": "Command line",
    "planning": "Explain, dry run, search",
    "core/tensor_parallel": "Plans and styles",
    "core/data_parallel": "Data parallelism",
    "core": "Tensors, meshes and operations",
    "checkpoint": "Checkpoints",
    "integrations/torch": "Checkpoints under torch's names",
    "integrations": "Models of other libraries",
    "platform/torch": "torch backends",
    "platform/mindspore": "MindSpore backend",
    "platform": "Backends and the environment",
    "debug": "Looking at it",
    "": "The package",
}
#: Errors of Python's own protocols, and errors that only leave a loop or a parser.
_SILENT = {"AssertionError", "NotImplementedError"}


@dataclass(frozen=True)
class ErrorText:
    """An error text: the exception's name, the text with ellipses, and the file."""

    kind: str
    text: str
    path: str


@cache
def texts() -> list[ErrorText]:
    """Return every error that is created with a text, in the order of the files. The error may be raised there, or
    passed to a function that raises it."""
    found: dict[tuple[str, str], ErrorText] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith("testing/"):
            continue
        for kind, text in _errors(ast.parse(path.read_text(encoding="utf-8"))):
            if len(text.replace("…", "").split()) > 1:
                found.setdefault((kind, text), ErrorText(kind, text, name))
    return list(found.values())


def _errors(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (class name, text) of the calls that create errors. The text may be in a variable assigned before."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    seen: set[ast.Call] = set()
    # `ast.walk` yields outer functions before inner ones. In reverse, a call belongs to its innermost function.
    for function in (*reversed(functions), tree):
        nodes = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.Call))]
        named = {
            target.id: node.value
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in nodes:
            if not isinstance(node, ast.Call) or node in seen or not node.args:
                continue
            kind = last_word(node.func)
            if re.fullmatch(r"[A-Z]\w*Error", kind) and kind not in _SILENT:
                seen.add(node)
                text = node.args[0]
                yield kind, text_of(named.get(text.id, text) if isinstance(text, ast.Name) else text)


def last_word(node: ast.expr) -> str:
    """Return the last word of a name such as ``importlib.import_module``; "" for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def text_of(node: ast.expr) -> str:
    """Return the text of an expression, with an ellipsis for each part that is known only at run time."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


def area_of(path: str) -> str:
    """Return the first folder of `AREAS` that contains the file; inner folders come before outer ones."""
    return next(folder for folder in AREAS if not folder or path.startswith(f"{folder}/"))


def table() -> str:
    """Return the table in Markdown, with a section for each area."""
    sections: dict[str, list[ErrorText]] = {folder: [] for folder in AREAS}
    for error in texts():
        sections[area_of(error.path)].append(error)
    lines = []
    for folder, errors in sections.items():
        if errors:
            lines += [f"### {AREAS[folder]}", "", "| text | error | raised in |", "|---|---|---|"]
            lines += [f"| {_cell(e.text)} | `{e.kind}` | `{e.path}` |" for e in errors]
            lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    marks = {ord(sign): f"&#{ord(sign)};" for sign in "|*_`[]\\#~<>&"}
    return " ".join(text.split()).translate(marks)


if __name__ == "__main__":
    print(table())
