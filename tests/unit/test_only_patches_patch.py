"""No module of hyper_parallel assigns into a framework, but for the one that installs the listed `patches`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hyper_parallel"

pytestmark = pytest.mark.usefixtures("unmeasured")

FRAMEWORKS = ("torch", "torch_npu", "mindspore", "transformers")
#: Install patches: everything that they write is listed in a module patches.py.
INSTALL = (PACKAGE / "platform" / "patching.py", PACKAGE / "platform" / "patch_places.py")
#: State of a framework, which is data that it writes itself, and not a function: file -> the names written there.
STATE = {
    # MindSpore goes on saying that there are groups after it has destroyed them.
    "platform/mindspore/processes/launch.py": {"GlobalComm.INITED"},
    # A recording that an error has left behind: MindSpore could record nothing afterwards.
    "platform/mindspore/graphs.py": {"context.compiled", "context.phase", "context.args", "jit_trace._using_trace"},
    # The counters of random operations.
    "platform/mindspore/basics/seeds.py": {"COUNTERS[name, given]"},
}
#: Attributes that may be set on a function or an object of one's own.
HARMLESS = {"__class__", "__name__", "__qualname__", "__doc__", "__dict__", "__module__", "__kwdefaults__"}
CHANGES = {"append", "insert", "extend", "update", "setdefault", "pop", "popitem", "clear", "remove"}


def names_of(target: ast.AST) -> set[str]:
    """The plain names that an assignment to ``target`` binds."""
    found = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return {node.id for node in found if isinstance(node, ast.Name)}


def imports_of(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names in a file that are a framework's, and the classes and imports that are the package's own."""
    framework: set[str] = set()
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Import):
            framework |= {(a.asname or a.name).partition(".")[0] for a in node.names if _is_framework(a.name)}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            kind = framework if _is_framework(node.module) else own
            kind |= {alias.asname or alias.name for alias in node.names}
    return framework, own


class Names:
    """Names in a part of a file that stand for modules and classes of a framework, or for their attributes."""

    def __init__(self, nodes: list[ast.AST], known: set[str]) -> None:
        self.framework = set(known)
        before = -1
        while before != len(self.framework):  # names derived from derived names
            before = len(self.framework)
            for node in nodes:
                self._follow(node)

    def _follow(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for one, value in zip(target.elts, node.value.elts, strict=False):
                        self._bind(one, value)
                else:
                    self._bind(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            members = node.iter.elts if isinstance(node.iter, (ast.Tuple, ast.List)) else [node.iter]
            if any(self.belongs(member) for member in members):
                self.framework |= names_of(node.target)

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        if self.belongs(value):
            self.framework |= names_of(target)

    def belongs(self, node: ast.AST) -> bool:
        """Return whether an expression is a module or class of a framework, or something that it holds."""
        if isinstance(node, ast.Name):
            return node.id in self.framework
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            return self.belongs(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)) and node.args:
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            first = node.args[0]
            if name in ("import_module", "__import__"):
                return isinstance(first, ast.Constant) and _is_framework(str(first.value))
            return name in ("getattr", "vars") and self.belongs(first)
        return False


def _is_framework(module: str) -> bool:
    # Private parts that a backend takes from its framework stand in one module, and are still the framework's.
    return module.partition(".")[0] in FRAMEWORKS or module.endswith(".private")


def parts_of(tree: ast.AST) -> Iterator[list[ast.AST]]:
    """The nodes of a file: first those outside of functions, then those of each function, with everything inside of
    it."""
    outside, functions, waiting = [], [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            functions.append(node)
        else:
            outside.append(node)
            waiting += ast.iter_child_nodes(node)
    yield outside
    yield from (list(ast.walk(function)) for function in functions)


def assignments(source: str) -> Iterator[tuple[int, str]]:
    """(line, target) of each assignment into a framework, or into a class that may be a framework's."""
    tree = ast.parse(source)
    known, own = imports_of(tree)
    for i, nodes in enumerate(parts_of(tree)):
        names = Names(nodes, known)
        if not i:
            known = names.framework  # functions of a module know the names that it derives
        own_class = any(
            isinstance(node, ast.FunctionDef)
            and any(isinstance(d, ast.Name) and d.id == "classmethod" for d in node.decorator_list)
            for node in nodes
        )
        for node in nodes:
            for target in targets_of(node):
                holder = target.value
                is_own = isinstance(holder, ast.Name) and holder.id in own
                attribute = target.attr if isinstance(target, ast.Attribute) else ""
                is_method = attribute.startswith("__") and attribute.endswith("__") and attribute not in HARMLESS
                of_a_class = isinstance(holder, ast.Name) and holder.id == "cls" and attribute and not own_class
                if names.belongs(holder) or (not is_own and (is_method or of_a_class)):
                    yield node.lineno, ast.unparse(target)
            called = node.func if isinstance(node, ast.Call) else None
            sets = isinstance(called, ast.Name) and called.id in ("setattr", "delattr")
            if sets or (isinstance(called, ast.Attribute) and called.attr in CHANGES and names.belongs(called.value)):
                yield node.lineno, ast.unparse(node)


def targets_of(node: ast.AST) -> list[ast.Attribute | ast.Subscript]:
    """The attributes and entries that a statement writes or deletes."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = [t for one in node.targets for t in (one.elts if isinstance(one, ast.Tuple) else [one])]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    return [target for target in targets if isinstance(target, (ast.Attribute, ast.Subscript))]


def test_no_other_module_assigns_into_a_framework() -> None:
    """Replacements in a framework are listed in the patches.py of its backend, and nowhere else."""
    found, state = [], {}
    files = [p for p in sorted(PACKAGE.rglob("*.py")) if "testing" not in p.parts and p not in INSTALL]
    assert len(files) > 100
    for path in files:
        name = path.relative_to(PACKAGE).as_posix()
        for line, what in assignments(path.read_text(encoding="utf-8")):
            if what in STATE.get(name, ()):
                state.setdefault(name, set()).add(what)
            elif not (name.startswith("integrations/") and what.startswith("setattr(module, ")):  # a model of the user
                found.append(f"{name}:{line}: {what}")
    assert found == []
    assert state == STATE


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.Linear.forward = f",
        "import torch.nn.functional as F\nF.linear = f",
        "from torch import nn\nnn.utils.x, y = 1, 2",
        "import torch\nfunction: Any = torch.autograd.Function\nfunction.apply = classmethod(apply)",
        "from mindspore import Tensor\nTensor.__fallback__ = f()",
        "from mindspore import Tensor\nT = Tensor\nfor name in ('a',):\n    setattr(T, name, f)",
        "from torch.optim import optimizer\noptimizer._foreach_supported_types.append(cls)",
        "from mindspore import Parameter\nParameter._base_type['x'] = cls",
        "import torch\ncls = getattr(torch.optim, name)\ncls.step = f",
        "from torch import nn\nfor base in (nn.Linear, nn.Module):\n    base.f = g",
        "def wrap(primitive):\n    primitive.__call__ = call",
        "def wrap(cls):\n    cls.step = call",
        "def wrap(x, name):\n    setattr(x, name, call)",
        "m = importlib.import_module('mindspore.common.seed')\nm.table['x'] = 1",
        "import torch\ndel torch.nn.Linear.forward",
        "def f():\n    import torch_npu\n    torch_npu.npu.x = 1",
    ],
)
def test_the_rule_sees(source: str) -> None:
    """Each way to put something into a framework."""
    assert list(assignments(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ny = torch.ones(1)\ny.grad = None\ny._layout = layout",
        "x.__class__ = DTensor",
        "import torch\nclass A:\n    pass\nA.table = {}\nA.__call__ = f",
        "class A:\n    @classmethod\n    def set(cls, x):\n        cls.x = x",
        "from hyper_parallel.a import TABLE, Guard\nTABLE.update(x)\nGuard.__enter__ = f",
        "import torch\nself.x = torch.ones",
        "import torch\ndef f():\n    x = torch.nn\ndef g(x):\n    x.table = 1",
    ],
)
def test_the_rule_leaves_alone(source: str) -> None:
    """Tensors, objects and classes of one's own."""
    assert not list(assignments(source))
