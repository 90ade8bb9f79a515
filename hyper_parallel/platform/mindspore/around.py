"""Functions that are called before and after each call of a cell.

The cell gets a subclass, because hooks would become part of graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from mindspore import nn

__all__ = ["around_calls"]

#: cell -> the functions called before and after its calls. Copies of the cell are not in the table.
_AROUND: weakref.WeakKeyDictionary[nn.Cell, tuple[Callable, Callable]] = weakref.WeakKeyDictionary()


def around_calls(
    module: nn.Cell, before: Callable[[nn.Cell, Any], None], after: Callable[[nn.Cell, Any], None]
) -> Callable[[], None]:
    """Call ``before`` and ``after`` around each call of a cell, and return a function that removes both.

    Graphs contain ``construct`` alone, so they call neither function. See `Platform.around_calls`."""
    cls: Any = type(module)
    _AROUND[module] = before, after
    module.__class__ = _class_around(cls)
    owner = weakref.ref(module)

    def take_away() -> None:
        cell = owner()
        if cell is not None:
            _AROUND.pop(cell, None)
            if type(cell) is _class_around(cls):
                cell.__class__ = cls

    return take_away


@cache
def _class_around(cls: type) -> type:
    """Return a subclass of the same name whose calls run the functions in ``_AROUND``."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, after = _AROUND.get(self, (None, None))
        if before is None or after is None:
            return cls.__call__(self, *args, **kwargs)
        before(self, (args, kwargs))
        output = None
        try:
            output = cls.__call__(self, *args, **kwargs)
        finally:
            after(self, output)
        return output

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "__call__": __call__, "_of_style": True})
