"""Files that may know a framework: the rules of the repository, checked on the parsed files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from ci.error_table import last_word

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hyper_parallel"

# Package of a framework -> the folder of hyper_parallel/platform/ that may import it.
FOLDER_OF = {"torch": "torch", "torch_npu": "torch", "mindspore": "mindspore"}
# No identifier or string in core may contain one of these. Docstrings and comments may: they cite the sources that core
# mirrors.
NAMES = ("torch", "mindspore")

pytestmark = pytest.mark.usefixtures("unmeasured")


def python_files(*folders: Path) -> list[Path]:
    """All Python files below some folders."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def imports_in(path: Path, packages: Collection[str]) -> list[tuple[int, str]]:
    """(line, package) of each import of one of ``packages`` in a file. Only files with such a word are parsed."""
    source = path.read_text(encoding="utf-8")
    if not any(package in source for package in packages):
        return []
    return [(line, package) for line, package in imported_packages(ast.parse(source)) if package in packages]


def imported_packages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of each import, those written as calls with a literal name included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]
        elif isinstance(node, ast.Call) and last_word(node.func) in ("import_module", "__import__"):
            yield from ((node.lineno, str(x.value).split(".")[0]) for x in node.args[:1] if isinstance(x, ast.Constant))


def words_of_code(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each identifier and each string that is no docstring, module paths of imports included."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None  # a docstring: not to be met again when the walk gets to the constant
            continue
        for name, value in ast.iter_fields(node):
            if isinstance(value, str) and name != "type_comment":
                yield line, value
            elif name == "names" and isinstance(node, (ast.Global, ast.Nonlocal)):
                yield from ((line, word) for word in value)


def may_import(path: Path, framework: str) -> bool:
    """Return whether a file belongs to a framework: its platform folder and its adapters of the suite."""
    known = path.parent == PACKAGE / "testing/adapters" and path.name.startswith(f"{framework}_")
    return known or PACKAGE / "platform" / framework in path.parents


def offending_imports(files: list[Path]) -> list[str]:
    """Imports of a framework outside of the files that may import it."""
    return [
        f"{path.relative_to(ROOT)}:{line}: imports {package}"
        for path in files
        for line, package in imports_in(path, FOLDER_OF)
        if not may_import(path, FOLDER_OF[package])
    ]


def offending_words(source: str) -> list[tuple[int, str]]:
    """Identifiers and strings of ``source`` that name a framework."""
    if not any(name in source.lower() for name in NAMES):
        return []
    return [
        (line, word) for line, word in words_of_code(ast.parse(source)) if any(name in word.lower() for name in NAMES)
    ]


def test_frameworks_are_imported_only_in_their_platform_folder() -> None:
    """Neither the rest of the package nor the unit tests and the gates know a framework."""
    files = python_files(PACKAGE, ROOT / "tests" / "unit", ROOT / "tests" / "support", ROOT / "ci")
    assert len(files) > 10
    assert offending_imports(files) == []


def test_core_names_no_framework() -> None:
    """Core has no word for a framework, not even in a string."""
    files = python_files(PACKAGE / "core")
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}"
        for path in files
        for line, word in offending_words(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_checks_of_plans_alone_know_models_by_name() -> None:
    """A style that guesses by the name of a layer would be right for some models only."""
    names = re.compile(r"c_attn|gate_?up|num_(kv|key_value)_heads|head_dim|\b[qk]_proj|(query|key)_norm\b")
    knowing = {
        path.relative_to(PACKAGE / "core").as_posix()
        for path in python_files(PACKAGE / "core")
        if names.search(source := path.read_text(encoding="utf-8"))
        and any(names.search(word) for _, word in words_of_code(ast.parse(source)))
    }
    assert knowing == {"tensor_parallel/checks/known_names.py"}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.nn",
        "from mindspore import nn",
        "from hyper_parallel.platform.torch import base",
        "kind = 'torch-cpu'",
        "message = f'no {kind} in MindSpore'",
        "def to_torch(x): pass",
        "def f(torch_dtype): pass",
        "x.is_torch",
        "f(torch=1)",
    ],
)
def test_the_rule_for_words_sees(source: str) -> None:
    """Each way to name a framework in code is seen."""
    assert offending_words(source)


def test_the_rule_for_words_leaves_prose_alone() -> None:
    """Docstrings and comments may say where something comes from."""
    assert not offending_words('"""Like torch."""\ndef f():\n    """As MindSpore does."""\n    return 1  # torch\n')


@pytest.mark.parametrize("source", ["import torch", "import_module('torch.nn')", "__import__('torch')"])
def test_the_rule_for_imports_sees(source: str) -> None:
    """Calls that import are imports."""
    assert [package for _, package in imported_packages(ast.parse(source))] == ["torch"]


def run_python(code: str) -> str:
    """Output of a fresh interpreter in the root of the repository."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_import_hyper_parallel_imports_no_framework() -> None:
    """The framework comes in with first use."""
    code = f"import sys, hyper_parallel; print([name for name in {sorted(FOLDER_OF)} if name in sys.modules])"
    assert run_python(code) == "[]\n"


def test_integrations_import_no_library_before_it_is_used() -> None:
    """Neither a framework nor the library that an integration is for; and no other part of the package knows one."""
    names = {"transformers"}
    code = "import sys, hyper_parallel.integrations.huggingface; print([n for n in {names!r} if n in sys.modules])"
    assert run_python(code.format(names=sorted({*FOLDER_OF, *names}))) == "[]\n"
    found = {path.relative_to(PACKAGE).parts[0] for path in python_files(PACKAGE) if imports_in(path, names)}
    assert found == {"integrations"}


def test_platform_stays_the_standard_library_module() -> None:
    """The folder platform/ in the root, which is on the path there, does not hide it."""
    assert (ROOT / "platform").is_dir()
    assert "True" in run_python("import platform; print(bool(platform.python_version()))")
