"""Functions around the calls of a cell, by a class of its own: hooks would be a part of graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from mindspore import nn

__all__ = ["around_calls"]

#: cell -> the functions before and after its calls. Copies have none.
_AROUND: weakref.WeakKeyDictionary[nn.Cell, tuple[Callable, Callable]] = weakref.WeakKeyDictionary()


def around_calls(
    module: nn.Cell, before: Callable[[nn.Cell], None], after: Callable[[nn.Cell, Any], None]
) -> Callable[[], None]:
    """See `Platform.around_calls`. Graphs are made of ``construct``, and so see neither."""
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
    """A subclass under the same name."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, after = _AROUND.get(self, (None, None))
        if before is None or after is None:
            return cls.__call__(self, *args, **kwargs)
        before(self)
        output = None
        try:
            output = cls.__call__(self, *args, **kwargs)
        finally:
            after(self, output)
        return output

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "__call__": __call__, "_of_style": True})
