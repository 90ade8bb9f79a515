"""Helpers that backends share to observe a program: see `contract.observation`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

__all__ = ["is_called_from", "tensors_in"]


def is_called_from(modules: Collection[str]) -> bool:
    """Return whether a function of a module with one of these names is on the call stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False


def tensors_in(values: Any, kind: type) -> Iterator[Any]:
    """Yield the objects of class ``kind`` in ``values``, which may contain nested lists, tuples and dicts."""
    if isinstance(values, kind):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value, kind)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()), kind)
