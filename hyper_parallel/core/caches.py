"""Caches: dictionaries of limited size, for results that depend on a shape or a layout.

Caches of modules have a name and are registered here. All of them are emptied when process groups are destroyed, and
`cache_sizes` counts their entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

_NAMED: list[tuple[str, Cache]] = []


class Cache(dict):
    """A dict that is emptied before it exceeds ``most`` entries.

    Args:
        most: maximal number of entries.
        name: name in `cache_sizes`, for a cache that lives as long as the program. Several caches may share a name.
    """

    def __init__(self, most: int, name: str = "") -> None:
        self._most = most
        if name:
            _NAMED.append((name, self))

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


class Table(Cache):
    """A cache of the values of ``make(key)``, each computed at its first use. A deep copy of an object that holds the
    table shares the table."""

    def __init__(self, make: Callable[[Any], Any], most: int = 1 << 10, name: str = "") -> None:
        super().__init__(most, name)
        self._make = make

    def __missing__(self, key: Any) -> Any:
        value = self[key] = self._make(key)
        return value

    def __deepcopy__(self, memo: dict) -> Table:
        return self


def clear_caches() -> None:
    """Empty all named caches. Values are recomputed on demand."""
    for _, cache in _NAMED:
        cache.clear()


def cache_sizes() -> dict[str, int]:
    """Return the number of entries of each named cache, to find caches that grow unexpectedly.

    A cache is listed once its module has been imported.

    Example:
        >>> from hyper_parallel import DTensor
        >>> from hyper_parallel.debug import cache_sizes
        >>> "recipes of operations" in cache_sizes()
        True
    """
    sizes: Counter[str] = Counter()
    for name, cache in _NAMED:
        sizes[name] += len(cache)
    return dict(sizes)
