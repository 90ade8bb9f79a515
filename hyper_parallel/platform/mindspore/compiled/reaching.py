"""Search for distributed objects that a function about to be compiled can reach, and the error for them."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from mindspore import Parameter, nn

from hyper_parallel.platform.mindspore.compiled.cells import has_stand_in, is_leaf, stand_in
from hyper_parallel.platform.mindspore.compiled.forwards import NotTracedError, original_class
from hyper_parallel.platform.mindspore.handlers.dropout import drops_apart
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, distributed_in

__all__ = ["GRADIENTS", "REMEDY", "Refused", "graph_error", "reachable", "refuse"]

#: For functions of these packages, arguments are searched, but not the names of their modules.
_LIBRARIES = ("mindspore", "numpy", "hyper_parallel")
#: Module of the functions that MindSpore makes for gradients.
GRADIENTS = "mindspore.ops.composite.base"
REMEDY = (
    "distributed tensors work in PyNative mode, without jit. Use mindspore.set_context(mode=mindspore.PYNATIVE_MODE) "
    "and remove the decorator"
)


class Refused:
    """A module that cannot be in a graph, with the reason."""

    def __init__(self, module: nn.Cell, why: NotTracedError) -> None:
        label = getattr(module, "_hyper_parallel_path", "") or type(module).__name__
        self.text = f"the module {label!r}, which graphs cannot contain ({why})"


def graph_error(what: str, found: Any, about: str) -> RuntimeError:
    """Return the error for ``found``, a DTensor or a `Refused`, in the graph called ``what``. ``about`` ends the
    message: it explains which objects such a graph can hold."""
    if isinstance(found, Refused):
        name = found.text
    else:
        name = f"the distributed parameter {found.name!r}" if isinstance(found, Parameter) else "a DTensor"
    return RuntimeError(f"{what} uses {name}: {REMEDY}{about}")


def refuse(what: str, about: str, *roots: Any) -> None:
    """Raise when a DTensor can be reached from ``roots``."""
    found = next(reachable(roots), None)
    if found is not None:
        raise graph_error(what, found, about)


def reachable(root: Any, stand_ins: list[nn.Cell] | None = None) -> Iterator[Any]:
    """Yield the DTensors that can be reached from a function, a cell or any other object.

    With a list ``stand_ins``, cells that have stand-ins are added to it, and their contents are not searched. A
    `Refused` is yielded for a styled cell that can have no stand-in.

    The search goes from a function to its defaults, its closure, and the module names that it uses. From these objects
    it follows only attributes that the code of the function or of its callees names. From a cell it goes to parameters,
    attributes and ``construct``.
    """
    return _walk(root, frozenset(), set(), stand_ins)


def _walk(x: Any, names: frozenset[str], seen: set[int], stand_ins: list[nn.Cell] | None) -> Iterator[Any]:
    """Yield DTensors as `reachable` does. ``names`` are the attributes named in the code that led to ``x``."""
    if isinstance(x, InterceptedTensor):
        yield x
        return
    if x is None or isinstance(x, (bool, int, float, str, bytes, type)) or id(x) in seen:
        return
    seen.add(id(x))
    parts: Iterable[Any] = ()
    if isinstance(x, FunctionType):
        parts, names = _parts_of_function(x, stand_ins is not None)
    elif stand_ins is not None and isinstance(x, nn.Cell):
        try:
            parts = _parts_beside_styles(x, stand_ins)
        except NotTracedError as why:
            yield Refused(x, why)
    else:
        parts = _parts(x, names)
    for part in parts:
        yield from _walk(part, names, seen, stand_ins)


def _parts_beside_styles(cell: nn.Cell, stand_ins: list[nn.Cell]) -> Iterable[Any]:
    if has_stand_in(cell):
        stand_in(cell)
        stand_ins.append(cell)
        if is_leaf(cell):
            return ()
    if cell._recompute_cell is not None and next(distributed_in(cell), None) is not None:
        raise NotTracedError("it is recomputed in backward")
    if drops_apart(cell):
        raise NotTracedError(
            "its dropout would use MindSpore's kernel in a graph, which does not draw the same numbers on all ranks "
            "on CPUs"
        )
    return *vars(cell).values(), original_class(cell).construct


def _parts(x: Any, names: frozenset[str]) -> Iterable[Any]:
    """Return the objects that ``x`` refers to.

    No object is created for this: the search remembers objects by id, so they must stay alive.
    """
    if isinstance(x, (tuple, list, set, frozenset)):
        return x
    if isinstance(x, dict):
        return x.values()
    if isinstance(x, MethodType):
        return x.__func__, x.__self__
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    if isinstance(x, nn.Cell):
        return *x.get_parameters(), *vars(x).values(), type(x).construct
    own = getattr(x, "__dict__", {})  # a module's names, an object's attributes
    return [own[name] for name in names if name in own]


def _parts_of_function(function: FunctionType, beside_weights: bool) -> tuple[Iterable[Any], frozenset[str]]:
    """Return the objects that a function refers to, and the attribute names that it uses.

    With ``beside_weights``, the weights of MindSpore's gradient functions are left out: graphs differentiate with
    respect to these weights, and do not read them.
    """
    loaded, attributes = _names_in(function.__code__)
    closure = [
        cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if _is_filled(cell) and not (beside_weights and name == "weights" and function.__module__ == GRADIENTS)
    ]
    parts = [function.__defaults__, function.__kwdefaults__, getattr(function, "__wrapped__", None), *closure]
    if not (function.__module__ or "").startswith(_LIBRARIES):
        module = function.__globals__
        parts += [module[name] for name in loaded if name in module]
    return parts, attributes


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the global names and the attribute names in a function and its nested functions. Strings count as
    attribute names: they may be arguments of ``getattr``."""
    loaded, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, str):
            attributes.add(constant)
        elif isinstance(constant, CodeType):
            inner = _names_in(constant)
            loaded |= inner[0]
            attributes |= inner[1]
    return frozenset(loaded), frozenset(attributes)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
