"""Allowed imports between parts of the package, and that no imports go in a circle; on the parsed files."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from ci.error_table import last_word

ROOT = Path(__file__).resolve().parents[2]
NAME = "hyper_parallel"

pytestmark = pytest.mark.usefixtures("unmeasured")

#: layer -> its modules: a package with all below it, unless a longer name puts them into another layer.
LAYERS = {
    "contract": ["platform.contract"],
    "platforms": ["platform"],
    "torch": ["platform.torch"],
    "mindspore": ["platform.mindspore"],
    "tools": ["core"],
    "mesh": ["core.mesh"],
    "layouts": ["core.layouts"],
    "communication": ["core.communication"],
    "rules": ["core.rules"],
    "operations": ["core.operations"],
    "plain code": ["core.plain_code"],
    "dtensor": ["core.dtensor"],
    "programs": ["core.tensor_parallel.program"],
    "styles": ["core.tensor_parallel.styles"],
    "checks of plans": ["core.tensor_parallel.checks"],
    "tensor_parallel": ["core.tensor_parallel"],
    "data_parallel": ["core.data_parallel"],
    "integrations": ["integrations"],
    "twins of torch": ["integrations.torch"],
    "checkpoint": ["checkpoint"],
    "names of twins": ["checkpoint.distributed", "checkpoint.state_dict"],
    "texts": ["debug.text", "cli.output"],
    "debug": ["debug"],
    "planning": ["planning"],
    "command line": ["cli", "__main__"],
    "testing": ["testing"],
    "adapters": ["testing.adapters"],
    "table of names": ["public_names"],
    "names": [""],
    "names of experimental": ["experimental"],
    "names of mindspore": ["mindspore"],
    "names of torch": ["torch"],
}
#: The floors of core, the lowest first: each may import those below it, for type checkers too.
FLOORS = (
    "tools",
    "mesh",
    "layouts",
    "communication",
    "rules",
    "operations",
    "plain code",
    "dtensor",
    "programs",
    "styles",
    "checks of plans",
    "tensor_parallel",
    "data_parallel",
)
_GROUND = {"contract", "platforms", "table of names"}
#: The folders of a backend, the lowest first: each may import those below it, for type checkers too. The files next to
#: the folders are the backend's classes and patches, and may import all of them.
FOLDERS = {
    "torch": ["basics", "gradients", "native", "processes", "op_table", "compiled", "handlers", "modules", "compiler"],
    "mindspore": ["basics", "processes", "op_table", "tensors", "gradients", "handlers", "compiled"],
}


def below(floor: str) -> set[str]:
    """The parts that a floor of core may import."""
    return {*_GROUND, *FLOORS[: FLOORS.index(floor)]}


#: The arrows: layer -> the layers that its modules may import. Their own they may import always.
MAY_IMPORT = {
    "contract": set(),
    "table of names": set(),
    "platforms": {"contract"},
    "torch": {"platforms", "contract"},
    "mindspore": {"platforms", "contract"},
    **{floor: below(floor) for floor in FLOORS},
    "integrations": {*below("data_parallel"), "data_parallel", "checkpoint", "twins of torch"},
    "twins of torch": {*below("programs"), "checkpoint"},
    "names of twins": {"twins of torch"},
    "texts": {"platforms"},
    "checkpoint": {*below("programs"), "data_parallel", "texts"},
    "debug": {*below("programs"), "texts"},
    "planning": {*below("data_parallel"), "data_parallel", "integrations", "texts", "debug", "names"},
    "command line": {
        *below("programs"),
        *("checkpoint", "texts", "debug", "planning", "testing", "adapters", "names"),
    },
    "testing": {
        *below("data_parallel"),
        *("data_parallel", "checkpoint", "integrations", "texts", "debug", "planning"),
        *("adapters", "names", "names of experimental", "names of twins"),
    },
    "adapters": {"names", "names of mindspore", "torch", "mindspore"},
    "names": {"platforms", "contract", "table of names"},  # those of the package are resolved when they are first used
    "names of experimental": below("programs"),
    "names of mindspore": {"mindspore", "platforms"},
    "names of torch": {"torch", "platforms"},
}


@cache
def sources() -> dict[str, str]:
    """Module -> source, of the whole package."""
    found = {}
    for path in sorted((ROOT / NAME).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


@cache
def layer_of(module: str) -> str:
    """The layer whose name for the module is the longest."""
    prefixes = [(f"{NAME}.{name}".rstrip("."), layer) for layer, names in LAYERS.items() for name in names]
    return max((len(prefix), layer) for prefix, layer in prefixes if f"{module}.".startswith(f"{prefix}."))[1]


@cache
def imports_of(text: str, for_types: bool) -> tuple[tuple[int, str, str], ...]:
    """See `imports`."""
    return tuple(imports(ast.parse(text), for_types))


def imports(tree: ast.AST, for_types: bool) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of each import when the program runs, also inside functions and as a call. With
    ``for_types``, imports for type checkers too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and last_word(node.test) == "TYPE_CHECKING" and not for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and last_word(node.func) in ("import_module", "__import__"):
            yield from ((node.lineno, str(name.value), "") for name in node.args[:1] if isinstance(name, ast.Constant))
        yield from imports(node, for_types)


def graph(texts: Mapping[str, str], for_types: bool = False) -> dict[str, dict[str, int]]:
    """Module -> the modules that it imports, each with a line."""
    found: dict[str, dict[str, int]] = {module: {} for module in texts}
    for module, text in texts.items():
        for line, package, name in imports_of(text, for_types):
            target = f"{package}.{name}" if f"{package}.{name}" in texts else package
            if target in texts and target != module:
                found[module].setdefault(target, line)
    return found


def wrong_arrows(arrows: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Imports that `MAY_IMPORT` does not have."""
    return [
        f"{module}:{line}: {here} may not import {there} ({target})"
        for module, targets in arrows.items()
        for target, line in targets.items()
        if (here := layer_of(module)) != (there := layer_of(target)) and there not in MAY_IMPORT[here]
    ]


def circle(arrows: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Modules of which each imports the next, and the last the first; nothing where there are none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module not in done:
            path.append(module)
            for target in arrows[module]:
                if found := visit(target):
                    return found
            done.add(path.pop())
        return []

    return next(filter(None, map(visit, arrows)), [])


def test_every_import_goes_along_an_arrow() -> None:
    assert wrong_arrows(graph(sources())) == []


def test_floors_of_core_lie_upon_each_other() -> None:
    """Imports for type checkers alone keep the order of floors, too."""
    core = {module: text for module, text in sources().items() if f"{module}.".startswith(f"{NAME}.core.")}
    assert wrong_arrows(graph(core, for_types=True)) == []


def folder_arrows(backend: str, texts: Mapping[str, str]) -> list[str]:
    """Imports of a backend that go up, or to a folder that `FOLDERS` does not have."""
    package, order = f"{NAME}.platform.{backend}", FOLDERS[backend]
    folders = {module: module.removeprefix(f"{package}.").split(".")[0] for module in texts}
    inside = {module: text for module, text in texts.items() if f"{module}.".startswith(f"{package}.")}
    files = {module for module in inside if module.count(".") == package.count(".") + 1} - {
        f"{package}.{folder}" for folder in order
    }

    def height(module: str) -> int:
        return len(order) if module == package or module in files else order.index(folders[module])

    return [
        f"{module}:{line}: {folders[module]} imports {target}"
        for module, targets in graph(inside, for_types=True).items()
        for target, line in targets.items()
        if target != package and height(target) > height(module)
    ]


@pytest.mark.parametrize("backend", sorted(FOLDERS))
def test_folders_of_a_backend_lie_upon_each_other(backend: str) -> None:
    assert folder_arrows(backend, sources()) == []


def test_an_import_that_goes_up_is_seen() -> None:
    """Imports of a higher folder, and of a file next to the folders, are found; also those for types only."""
    name = f"{NAME}.platform.torch.basics.tensor"
    for target in ("gradients.autograd", "base"):
        for planted in (
            f"import {NAME}.platform.torch.{target}",
            f"def f():\n    import {NAME}.platform.torch.{target}",
        ):
            found = folder_arrows("torch", {**sources(), name: f"{sources()[name]}\n{planted}\n"})
            assert len(found) == 1 and found[0].startswith(name) and target in found[0], found


@pytest.mark.parametrize("backend", sorted(FOLDERS))
def test_no_folder_of_a_backend_has_more_than_fifteen_files(backend: str) -> None:
    """The folder of handlers is exempt: its files are similar, one for each protocol."""
    package = ROOT / NAME / "platform" / backend
    assert {path.name for path in package.iterdir() if path.is_dir() and path.name[0] != "_"} == {*FOLDERS[backend]}
    for folder in (package, *(package / name for name in FOLDERS[backend] if name != "handlers")):
        assert len(list(folder.glob("*.py"))) <= 15, folder


def test_no_imports_go_in_a_circle() -> None:
    assert circle(graph(sources())) == []


def test_the_arrows_themselves_go_one_way() -> None:
    """Layers can be built one upon the other."""
    assert circle({layer: dict.fromkeys(targets, 0) for layer, targets in MAY_IMPORT.items()}) == []


@pytest.mark.parametrize(
    ("module", "line", "arrow"),
    [
        (
            "platform.torch.basics.transforms",
            "from hyper_parallel.core.caches import Cache",
            "torch may not import tools",
        ),
        (
            "platform.mindspore.gradients.grad",
            "import hyper_parallel.core.weak_table",
            "mindspore may not import tools",
        ),
        ("platform.contract.core", "from hyper_parallel.platform import registry", "contract may not import platforms"),
        ("core.dtensor.tensor", "from hyper_parallel.platform.torch import base", "dtensor may not import torch"),
        ("core.dtensor.api", "import_module('hyper_parallel.platform.torch.cpu')", "dtensor may not import torch"),
        (
            "core.layouts.layout",
            "from hyper_parallel.core.dtensor import api",
            "layouts may not import dtensor",
        ),
        ("core.dtensor.undistributed", "import hyper_parallel.core.tensor_parallel", "may not import tensor_parallel"),
        (
            "core.tensor_parallel.program.overlap",
            "import hyper_parallel.core.tensor_parallel.styles.base",
            "programs may not import styles",
        ),
        (
            "platform.torch.basics.tensor",
            "import hyper_parallel.platform.mindspore.base",
            "torch may not import mindspore",
        ),
        ("testing.worker", "import hyper_parallel.platform.torch.base", "testing may not import torch"),
    ],
)
def test_a_wrong_arrow_is_seen(module: str, line: str, arrow: str) -> None:
    """Wrong imports are found at the top of a module and inside a function."""
    name = f"{NAME}.{module}"
    for planted in (line, f"def f():\n    {line}"):
        found = wrong_arrows(graph({**sources(), name: f"{sources()[name]}\n{planted}\n"}))
        assert len(found) == 1 and found[0].startswith(name) and arrow in found[0], found


@pytest.mark.parametrize(
    ("module", "other"),
    [
        ("core.rules.op_sharding", "core.operations.dispatch"),
        ("platform.torch.basics.tensor", "platform.torch.patches"),
        ("core.communication.recorder", "core.communication.redistribute"),
    ],
)
def test_a_circle_is_seen(module: str, other: str) -> None:
    """A circle is found within a layer and inside a function too, but not if only types are meant."""
    name, line = f"{NAME}.{module}", f"import {NAME}.{other}"
    for planted, seen in ((line, True), (f"def f():\n    {line}", True), (f"if TYPE_CHECKING:\n    {line}", False)):
        found = circle(graph({**sources(), name: f"{sources()[name]}\n{planted}\n"}))
        assert bool(found) is seen and (not seen or {name, f"{NAME}.{other}"} <= set(found)), found
