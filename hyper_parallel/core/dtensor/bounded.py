"""Dictionaries that keep what was worked out for a shape or a layout, and do not grow without end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Bounded", "Table"]


class Bounded(dict):
    """A dict that is emptied before it takes more than ``most`` entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


class Table(Bounded):
    """What ``make(key)`` gives, made when it is first asked for. It belongs to no object: copies of what holds it share
    it."""

    def __init__(self, make: Callable[[Any], Any], most: int = 1 << 10) -> None:
        super().__init__(most)
        self._make = make

    def __missing__(self, key: Any) -> Any:
        value = self[key] = self._make(key)
        return value

    def __deepcopy__(self, memo: dict) -> Table:
        return self
