"""The one-line mutations of a file, by its syntax tree.

Not mutated: docstrings and other strings, annotations, ``__all__``, and code that only type checkers read. The
arguments of a ``raise`` or a warning are not mutated either: tests should not depend on every word of a message.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

#: Where mutations are made. The files that only NPUs and GPUs run have gates of their own.
AREAS = ("hyper_parallel/core", "hyper_parallel/platform/torch", "hyper_parallel/platform/mindspore")
LEFT_OUT = {
    f"hyper_parallel/platform/torch/{name}.py" for name in ("cuda", "npu", "fused_linear", "op_table/fused_npu")
}

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
#: Functions that fail at once with their arguments swapped, on every line that runs.
_ORDERED = {"getattr", "hasattr", "isinstance", "issubclass", "setattr", "zip"}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutation:
    """One change of one line.

    Attributes:
        path: the file, from the root of the project.
        line: its line, from 1.
        start: where the change begins in the line, in bytes of UTF-8.
        before: the text there.
        after: the text that replaces it.
        kind: the change, in words.
        text: the line as it is, without indentation: it finds the place again when lines above it change.
    """

    path: str
    line: int
    start: int
    before: str
    after: str
    kind: str
    text: str

    @property
    def key(self) -> str:
        """The same for the same mutation, as long as its line stays."""
        return f"{self.path} | {self.text} | {self.start} | {self.before} -> {self.after}"

    def apply(self, source: str) -> str:
        """The source with the mutation."""
        lines = source.split("\n")
        line = lines[self.line - 1].encode()
        end = self.start + len(self.before.encode())
        if line[self.start : end].decode() != self.before:
            raise ValueError(f"{self.path}:{self.line} has changed since the mutation was made: {line.decode()}")
        lines[self.line - 1] = (line[: self.start] + self.after.encode() + line[end:]).decode()
        return "\n".join(lines)

    def as_dict(self) -> dict:
        return asdict(self)


def mutations_of(path: str, source: str) -> list[Mutation]:
    """All mutations of a file, in the order of its lines. A few are no Python; `sample` does not take those."""
    lines = source.split("\n")
    found = []
    for node, after, kind in _changes(ast.parse(source)):
        if node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1].encode()
        before = line[node.col_offset : node.end_col_offset].decode()
        mutated = (line[: node.col_offset] + after.encode() + line[node.end_col_offset :]).decode()
        text = lines[node.lineno - 1].strip()
        mutation = Mutation(path, node.lineno, node.col_offset, before, after, kind, text)
        if mutated != lines[node.lineno - 1]:
            found.append(mutation)
    return sorted(found, key=lambda m: (m.line, m.start, m.kind, m.after))


def sample(root: Path, count: int, seed: int, areas: tuple[str, ...] = AREAS) -> list[Mutation]:
    """``count`` mutations of the project at ``root``, no two of one line, the same for the same sources and seed.

    Every line draws for itself, so that a change elsewhere leaves the rest of the sample as it is. A line first draws a
    kind of mutation, so that kinds with many ways do not crowd out the others.
    """
    drawn: list[tuple[float, Mutation]] = []
    sources: dict[str, str] = {}
    for area in areas:
        for file in sorted((root / area).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if path not in LEFT_OUT:
                sources[path] = file.read_text(encoding="utf-8")
                drawn += _drawn_of(path, sources[path], seed)
    drawn.sort(key=lambda one: (one[0], one[1].path, one[1].line))
    valid = (mutation for _, mutation in drawn if _is_valid(mutation.apply(sources[mutation.path])))
    return [*islice(valid, count)]


def _drawn_of(path: str, source: str, seed: int) -> Iterator[tuple[float, Mutation]]:
    """A mutation of each line of a file that has any, with the number that its line has drawn."""
    by_line: dict[int, list[Mutation]] = {}
    for mutation in mutations_of(path, source):
        by_line.setdefault(mutation.line, []).append(mutation)
    seen: Counter[str] = Counter()
    for mutations in by_line.values():
        text = mutations[0].text
        draw = random.Random(f"{seed} {path} {text} {seen[text]}")
        seen[text] += 1
        number = draw.random()
        kind = draw.choice(sorted({mutation.kind for mutation in mutations}))
        yield number, draw.choice([mutation for mutation in mutations if mutation.kind == kind])


def function_at(source: str, line: int) -> tuple[str, int, int] | None:
    """Name, first and last line of the innermost function around a line. None for a line at the level of the module or
    a class.

    A decorator or a default value belongs to the scope around the function: it runs when that is imported.
    """
    innermost = None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first, last = node.body[0].lineno, node.end_lineno or node.lineno
            if first <= line <= last and (innermost is None or first >= innermost[1]):
                innermost = (node.name, first, last)
    return innermost


def _is_valid(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """(node to replace, new text, name of the change) for each mutation."""
    for node in _mutable(tree):
        if isinstance(node, ast.expr):
            for after, kind in _of_expression(node):
                yield node, f"({ast.unparse(after)})" if _needs_parentheses(after) else ast.unparse(after), kind
        elif isinstance(node, ast.stmt):
            yield from _of_statement(node)


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """The node and its descendants, without the parts that the module's docstring leaves out."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield from _mutable(child)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.Raise):
        return True  # its statement is dropped by `_of_block`
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        return called in ("warnings.warn", "cast", "TypeVar")
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):
        return any(ast.unparse(target) == "__all__" for target in node.targets)
    return False


def _needs_parentheses(node: ast.expr) -> bool:
    return isinstance(node, (ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Lambda))


def _of_expression(node: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        flipped = _COMPARISONS[type(node.ops[0])]()
        yield ast.Compare(node.left, [flipped], node.comparators), "comparison"
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value), "constant"
        elif isinstance(node.value, (int, float)):
            yield ast.Constant(node.value + 1), "constant"
            yield ast.Constant(node.value - 1), "constant"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield ast.BoolOp(other, node.values), "and/or"
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest), "dropped condition"
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.Not):
            yield node.operand, "negation"
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            yield node.operand, "sign"
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right), "operator"
    elif isinstance(node, ast.IfExp):
        yield node.body, "condition"
        yield node.orelse, "condition"
    elif isinstance(node, ast.Call):
        if len(node.args) >= 2 and all(isinstance(a, (ast.Name, ast.Attribute, ast.Subscript)) for a in node.args[:2]):
            swapped = [node.args[1], node.args[0], *node.args[2:]]
            if ast.unparse(node.func) not in _ORDERED and ast.dump(node.args[0]) != ast.dump(node.args[1]):
                yield ast.Call(node.func, swapped, node.keywords), "swapped arguments"
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                rest = node.keywords[:i] + node.keywords[i + 1 :]
                yield ast.Call(node.func, node.args, rest), "dropped keyword"
    elif isinstance(node, ast.Slice) and node.lower is not None and node.upper is not None:
        yield ast.Slice(None, node.upper, node.step), "dropped bound"


def _of_statement(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    yield from _of_blocks(node)
    if isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
        yield node.test, f"not ({ast.unparse(node.test)})", "negation"
    elif isinstance(node, ast.Return) and node.value is not None:
        value = node.value
        if isinstance(value, ast.Call) and value.args and not isinstance(value.args[0], ast.Starred):
            yield value, ast.unparse(value.args[0]), "returned operand"
        elif isinstance(value, ast.BinOp):
            yield value, ast.unparse(value.left), "returned operand"
            yield value, ast.unparse(value.right), "returned operand"


def _of_blocks(node: ast.stmt) -> Iterator[tuple[ast.stmt, str, str]]:
    """The statements right below this one that can be dropped."""
    handlers = node.handlers if isinstance(node, ast.Try) else []
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    for statement in (s for block in [*blocks, *(handler.body for handler in handlers)] for s in block):
        dropped = (ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)
        if isinstance(statement, ast.Assign):
            # Without a plain name the next line that reads it fails, which shows at once.
            if any(isinstance(target, (ast.Name, ast.Tuple)) for target in statement.targets):
                continue
            dropped = (ast.Assign,)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, (ast.Call, ast.Yield, ast.Await)):
            yield statement, "pass", "dropped call"
        elif isinstance(statement, dropped):
            yield statement, "pass", "dropped statement"
