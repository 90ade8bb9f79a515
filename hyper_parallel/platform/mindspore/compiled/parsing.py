"""Replacements of objects that MindSpore's parser looks up, when ``jit`` or graph mode compiles source code.

In place of styled cells the parser gets their stand-ins (`forwards`, `hooks`). Only stand-ins may hold distributed
parameters. Any other distributed tensor is an error. Reachable tensors raise before anything is parsed. Unreachable
tensors, such as the value of a computed name, raise where the parser meets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, ClassVar

import mindspore as ms
from mindspore import nn
from mindspore.graph._parse.namespace import ClassMemberNamespace, ClosureNamespace

from hyper_parallel.platform.mindspore.compiled.cells import has_stand_in, is_leaf, number_of, stand_in
from hyper_parallel.platform.mindspore.compiled.forwards import GraphCell, NotTracedError
from hyper_parallel.platform.mindspore.compiled.reaching import (
    GRADIENTS,
    REMEDY,
    Refused,
    graph_error,
    reachable,
    refuse,
)
from hyper_parallel.platform.mindspore.compiled.shapes import pending_comparisons
from hyper_parallel.platform.mindspore.gradients.local_gradients import LocalGradients
from hyper_parallel.platform.mindspore.handlers.clipping import refuse_parts
from hyper_parallel.platform.mindspore.handlers.optimizers import run_compiled_step
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, distributed_in, is_dispatching

__all__ = [
    "checked_answer",
    "checked_cell",
    "checked_compile",
    "checked_jit",
    "checked_jit_compile",
    "checked_resolution",
]

_ABOUT = (
    ". Graph mode and jit with capture_mode='ast' support modules with styles that pass plain tensors to each other: "
    "see docs/compile.md for the supported modules"
)
_NOT_CALLED = ", or call the cell in graph mode: graphs compiled without a call cannot contain modules with styles"
_SOMETHING = "a function or cell that is compiled"


class _Parsing:
    """Context in which a graph that uses styled cells is made or run. ``functions`` names the graphs, for messages."""

    functions: ClassVar[list[str]] = []

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self.functions.append(self._what)

    def __exit__(self, *exc_info: object) -> None:
        self.functions.pop()


def checked_jit(original: Callable, executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the call of a function that is compiled with jit."""
    if not is_dispatching():
        return original(executor, *args, **kwargs)  # an optimizer's step, compiled for local tensors
    if isinstance(executor.obj, (nn.Optimizer, ms.experimental.optim.Optimizer)):
        return run_compiled_step(original, executor, args, kwargs)
    function = executor.fn
    if function.__module__ == "mindspore.amp" and next(distributed_in((args, kwargs)), None) is not None:
        return function(*args, **kwargs)  # loss scaling: compiled for speed only
    used: list[nn.Cell] = []
    what = f"the function {function.__name__!r} compiled with jit"
    found = next(reachable((args, kwargs, executor.obj, function), used), None)
    if found is not None:
        raise graph_error(what, found, _ABOUT)
    if not used:
        return original(executor, *args, **kwargs)
    kept = executor._cell_cache_key_extend, executor.obj, executor.fn
    # MindSpore caches graphs by this name, so other parameters and styles need another name.
    executor._cell_cache_key_extend += f".{'.'.join([str(number_of(cell)) for cell in used])}"
    if has_stand_in(executor.obj):
        executor.obj = stand_in(executor.obj)
        executor.fn = type(executor.obj).construct
        args = (executor.obj, *args[1:])
    try:
        with _Parsing(what):
            return original(executor, *args, **kwargs)
    finally:
        _expect_gradients(used)
        executor._cell_cache_key_extend, executor.obj, executor.fn = kept


def _expect_gradients(used: list[nn.Cell]) -> None:
    """Note that a graph may return local shards of gradients, which no backward of the library has recorded."""
    LocalGradients.expect(p for cell in used if is_leaf(cell) for p in cell._params.values())


def checked_jit_compile(original: Callable, executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the compilation of a graph: ranks compare the plain shards that the graph takes before it runs."""
    pending_comparisons.clear()
    phase = original(executor, *args, **kwargs)
    for compare, module, shape in pending_comparisons:
        compare(module, shape)
    pending_comparisons.clear()
    return phase


def checked_cell(original: Callable, cell: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the call of a cell in graph mode."""
    if not is_dispatching():
        return original(cell, *args, **kwargs)  # an optimizer's step, on local tensors
    used: list[nn.Cell] = []
    what = f"{type(cell).__name__} in graph mode"
    found = next(reachable((args, kwargs, cell), used), None)
    if found is not None:
        raise graph_error(what, found, _ABOUT)
    if not used:
        refuse_parts(cell, args[0] if args else None)
        return original(cell, *args, **kwargs)
    root = stand_in(cell) if has_stand_in(cell) else cell
    kept = root.phase
    # MindSpore caches graphs by this name, as in `checked_jit`.
    root.phase = f"{cell.phase}.{'.'.join([str(number_of(part)) for part in used])}"
    try:
        with _Parsing(what):
            return original(root, *args, **kwargs)
    finally:
        _expect_gradients(used)
        root.phase = kept


def checked_compile(original: Callable, executor: Any, cell: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the compilation of a cell. Inside `checked_cell` ranks compare shards; elsewhere DTensors raise."""
    if _Parsing.functions:
        return checked_jit_compile(original, executor, cell, *args, **kwargs)
    if is_dispatching():  # otherwise it is an optimizer's step, on local tensors
        refuse(f"{type(cell).__name__} in a graph", _NOT_CALLED, args, kwargs, cell)
    return original(executor, cell, *args, **kwargs)


def checked_resolution(original: Callable, namespace: Any, name: str) -> Any:
    """Replace the parser's name resolution: attributes, and names of modules or closures."""
    if not is_dispatching():
        return original(namespace, name)
    owner = namespace.dicts[0] if isinstance(namespace, ClassMemberNamespace) else None
    what = _Parsing.functions[-1] if _Parsing.functions else _SOMETHING
    if isinstance(owner, GraphCell) and name in (*owner.owned, "_params"):
        raise RuntimeError(
            f"{what} reads {name!r} of a module whose style distributed its parameters. Call the module instead of "
            f"reading the parameter, or read the parameter in PyNative mode, without jit{_ABOUT}"
        )
    if isinstance(owner, GraphCell) and owner.original is not None and name == "_cells":
        # The `_cells` of the stand-in has other names.
        raise graph_error(
            what, Refused(owner.original, NotTracedError("the code reads its table of submodules")), _ABOUT
        )
    if isinstance(owner, GraphCell) and owner.original is not None and not hasattr(owner, name):
        owner = owner.original
        namespace = ClassMemberNamespace(owner)
    answer = original(namespace, name)
    if isinstance(owner, GraphCell) or (isinstance(owner, nn.Cell) and "_stands_in" in vars(owner)):
        return answer
    if name == "weights" and isinstance(namespace, ClosureNamespace) and namespace.name.startswith(GRADIENTS):
        return answer
    if has_stand_in(owner) and name == "_replaced_forward":
        raise graph_error(
            what,
            Refused(owner, NotTracedError("MindSpore calls it in a way that cannot be traced")),
            _ABOUT,
        )
    # Modules and dicts of names are not searched, because the function uses only a part of them.
    if not isinstance(answer, dict) or isinstance(owner, nn.Cell):
        found = next(_tensors_in(answer), None)
        if found is not None:
            raise graph_error(what, found, _ABOUT)
    try:
        return _with_stand_ins(answer)
    except NotTracedError as why:
        raise RuntimeError(f"{what} uses {name!r}, which graphs cannot contain ({why}): {REMEDY}{_ABOUT}") from None


def checked_answer(original: Callable, *args: Any) -> Any:
    """Replace the other functions that look up objects for MindSpore's parser. The replacements raise if such an object
    contains a DTensor."""
    answer = original(*args)
    if is_dispatching():
        found = next(_tensors_in([x for x in (*args[:1], answer) if not isinstance(x, dict)]), None)
        if found is not None:
            raise graph_error(_SOMETHING, found, _ABOUT)
    return answer


def _tensors_in(answer: Any) -> Iterator[Any]:
    """Yield the DTensors in an object that MindSpore's parser looked up. Cells are not searched."""
    if isinstance(answer, InterceptedTensor):
        yield answer
    elif isinstance(answer, (tuple, list)):
        for item in answer:
            yield from _tensors_in(item)
    elif isinstance(answer, dict):
        yield from _tensors_in(tuple(answer.values()))


def _with_stand_ins(answer: Any) -> Any:
    """Return an object that the parser looked up, with stand-ins in place of cells that have a stand-in."""
    if isinstance(answer, MethodType) and answer.__name__ == "construct" and has_stand_in(answer.__self__):
        return stand_in(answer.__self__).construct
    if has_stand_in(answer):
        return stand_in(answer)
    if isinstance(answer, nn.CellList):
        found = _changed(list(answer))
        return answer if found is None else nn.CellList(found, auto_prefix=False)
    if type(answer) in (tuple, list):
        found = _changed(answer)
        return answer if found is None else type(answer)(found)
    if type(answer) is dict and any(map(has_stand_in, answer.values())):
        raise NotTracedError("it is a dict of modules with styles")
    return answer


def _changed(items: Any) -> list[Any] | None:
    """Return the items with stand-ins in place of cells, or None if no item changes."""
    found = [_with_stand_ins(item) for item in items]
    return found if any(new is not old for new, old in zip(found, items, strict=True)) else None
