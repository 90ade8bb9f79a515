"""Which cell stands for a styled one in graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

from mindspore import nn

from hyper_parallel.platform.contract import CompiledForward, CompiledInputs
from hyper_parallel.platform.mindspore.compiled.forwards import GraphCell, NotTracedError, make_cell
from hyper_parallel.platform.mindspore.compiled.hooks import make_surrounded

__all__ = ["compiled_hook", "has_stand_in", "is_leaf", "number_of", "set_compiled_forward", "stand_in"]

#: By cell: what it was made of, the cell that stands for it, and its number.
_made: weakref.WeakKeyDictionary[nn.Cell, tuple[Any, GraphCell, int]] = weakref.WeakKeyDictionary()
_numbers = count()


def set_compiled_forward(module: nn.Cell, how: CompiledForward | None) -> None:
    """See `CompilerRole.set_compiled_forward`."""
    # A function, which copies of the module share: what it has is not to be copied.
    object.__setattr__(module, "_graph_form", lambda: how)


def compiled_hook(hook: Callable, how: CompiledInputs | None) -> Callable:
    """See `CompilerRole.compiled_hook`."""
    hook.graph_form = how  # type: ignore[attr-defined]
    return hook


def is_leaf(cell: nn.Cell) -> bool:
    """Whether a style runs the forward of ``cell``."""
    return "_replaced_forward" in vars(cell)


def has_stand_in(cell: Any) -> bool:
    """Whether another cell is to stand for ``cell``."""
    return isinstance(cell, nn.Cell) and (is_leaf(cell) or bool(_style_hooks(cell)))


def _style_hooks(cell: nn.Cell) -> list[Any]:
    hooks = (*cell._forward_pre_hook.values(), *cell._forward_hook.values())
    return [hook for hook in hooks if getattr(hook, "of_style", False)]


def stand_in(cell: nn.Cell) -> GraphCell:
    """The cell for the parameters, the style and the hooks that ``cell``, which `has_stand_in`, has now.

    Raises:
        NotTracedError: where there is none.
    """
    hooks = (*cell._forward_pre_hook.values(), *cell._forward_hook.values())
    form = vars(cell).get("_graph_form")
    parameters = tuple(cell._params.values()) if is_leaf(cell) else ()
    key = (form, *hooks, *((id(p), getattr(p, "_layout", None)) for p in parameters))
    known = _made.get(cell)
    if known is not None and known[0] == key:
        return known[1]
    if vars(cell).get("_hyper_parallel_unit") is not None:
        raise NotTracedError("it is a unit of data parallelism")
    if is_leaf(cell):
        how = None if form is None else form()
        if how is None:
            raise NotTracedError("its style, or this kind of module, is not traced")
        if hooks or cell._recompute_cell is not None or cell.mixed_precision_type is not None:
            raise NotTracedError("it has hooks, is computed again or casts")
        new = make_cell(cell, how)
    else:
        new = make_surrounded(cell)
    _made[cell] = key, new, next(_numbers)
    return new


def number_of(cell: nn.Cell) -> int:
    """A number that tells the `stand_in` of a cell from all others."""
    stand_in(cell)
    return _made[cell][2]
