"""Cells that replace styled cells in graphs: their stand-ins."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

from mindspore import nn

from hyper_parallel.platform.contract import Conversions, Program
from hyper_parallel.platform.mindspore.compiled.forwards import GraphCell, NotTracedError, make_cell
from hyper_parallel.platform.mindspore.compiled.hooks import make_surrounded
from hyper_parallel.platform.mindspore.tensors.tensor import NoDispatch

__all__ = [
    "compiled_hook",
    "has_stand_in",
    "is_leaf",
    "number_of",
    "set_compiled_forward",
    "share_compiled_inputs",
    "stand_in",
]

#: By cell: the state that its stand-in was made from, the stand-in, and its number.
_made: weakref.WeakKeyDictionary[nn.Cell, tuple[Any, GraphCell, int]] = weakref.WeakKeyDictionary()
_numbers = count()


def set_compiled_forward(module: nn.Cell, how: Program | None) -> None:
    """Record the program that a graph of ``module`` runs. See `CompilerRole.set_compiled_forward`."""
    how = None if how is None or how.distributed else how
    # A function, because copies of the module share it: the description must not be copied.
    object.__setattr__(module, "_graph_form", lambda: how)


def compiled_hook(hook: Callable, how: Conversions | None) -> Callable:
    """Return ``hook`` with the conversions that a graph makes. See `CompilerRole.compiled_hook`."""
    hook.graph_form = how  # type: ignore[attr-defined]
    return hook


def share_compiled_inputs(module: nn.Cell) -> None:
    """Record that layers of ``module`` may share an input. See `CompilerRole.share_compiled_inputs`."""
    object.__setattr__(module, "_graph_shares", True)


def is_leaf(cell: nn.Cell) -> bool:
    """Return whether a style runs the forward of ``cell``."""
    return "_replaced_forward" in vars(cell)


def has_stand_in(cell: Any) -> bool:
    """Return whether graphs need another cell in place of ``cell``."""
    return isinstance(cell, nn.Cell) and (is_leaf(cell) or "_graph_shares" in vars(cell) or _has_style_hooks(cell))


def _has_style_hooks(cell: nn.Cell) -> bool:
    return any(getattr(hook, "of_style", False) for hook in _hooks(cell))


def _hooks(cell: nn.Cell) -> tuple[Any, ...]:
    return (*cell._forward_pre_hook.values(), *cell._forward_hook.values())


def stand_in(cell: nn.Cell) -> GraphCell:
    """Return the stand-in for the current parameters, style and hooks of ``cell``, for which `has_stand_in` is true.

    Raises:
        NotTracedError: for a cell that graphs cannot hold.
    """
    key = _state(cell)
    known = _made.get(cell)
    if known is not None and known[0] == key:
        return known[1]
    new = _make(cell)
    _made[cell] = key, new, next(_numbers)
    return new


def _state(cell: nn.Cell) -> tuple[Any, ...]:
    """Return the facts of a cell that its stand-in depends on: modes, hooks, forms and parameters."""
    state: list[Any] = [cell.training, cell.mixed_precision_type, cell._recompute_cell is None, *_hooks(cell)]
    parts = [cell] if is_leaf(cell) else [part for part in cell._cells.values() if part is not None and is_leaf(part)]
    for part in parts:
        state += (id(part), vars(part).get("_graph_form"), len(_hooks(part)))
        # A graph reads the memory that a parameter had when the graph was made.
        state += [(id(p), getattr(p, "_layout", None), _memory(p)) for p in part._params.values() if p is not None]
    return tuple(state)


def _memory(p: Any) -> int:
    with NoDispatch():
        return int(p.untyped_storage().data_ptr())


def _make(cell: nn.Cell) -> GraphCell:
    if not is_leaf(cell):
        columns = {}
        if "_graph_shares" in vars(cell):
            columns = {name: how for name, part in cell._cells.items() if (how := _column(part)) is not None}
        return make_surrounded(cell, columns)
    how = _form(cell)
    if how is None:
        raise NotTracedError("its style, or this kind of module, is not traced")
    if _hooks(cell):
        raise NotTracedError("it has hooks")
    if cell._recompute_cell is not None or cell.mixed_precision_type is not None:
        raise NotTracedError("it is recomputed in backward, or casts its inputs")
    return make_cell(cell, how)


def _form(cell: nn.Cell) -> Program | None:
    form = vars(cell).get("_graph_form")
    if form is None or vars(cell).get("_hyper_parallel_unit") is not None:
        return None
    return form()


def _column(cell: nn.Cell | None) -> Program | None:
    """Return the style's description of a cell, if it is a column-parallel linear layer with a replicated input."""
    if cell is None or not is_leaf(cell):
        return None
    how = _form(cell)
    stand_in(cell)  # raises where there is none
    return how if how is not None and how.input_for_parts and how.given is None else None


def number_of(cell: nn.Cell) -> int:
    """Return a number that identifies the `stand_in` of a cell."""
    stand_in(cell)
    return _made[cell][2]
