"""A table with weakly referenced keys, which are compared by identity, and the release of unreferenced objects."""

from __future__ import annotations

import gc
import weakref
from typing import Any


class WeakTable:
    """A table like ``weakref.WeakKeyDictionary`` that also accepts unhashable keys, such as modules that compare by
    value.

    Example:
        >>> from hyper_parallel.core.weak_table import WeakTable
        >>> class Module:
        ...     __hash__ = None
        >>> table, module = WeakTable(), Module()
        >>> table.set(module, 3)
        >>> table.get(module)
        3
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def get(self, owner: Any) -> Any:
        """Return the value that is stored for ``owner``, or None."""
        entry = self._entries.get(id(owner))
        return None if entry is None else entry[1]

    def values(self) -> list[Any]:
        """Return the stored values, oldest first."""
        return [value for _, value in list(self._entries.values())]

    def set(self, owner: Any, value: Any) -> None:
        """Store ``value`` for ``owner``, replacing its previous value."""
        key, entries = id(owner), self._entries
        entries[key] = (weakref.ref(owner, lambda _: entries.pop(key, None)), value)


def collect_garbage() -> None:
    """Collect garbage until nothing is left. Objects that only a garbage autograd graph keeps alive may need the next
    collection."""
    for _ in range(3):
        if not gc.collect():
            return
