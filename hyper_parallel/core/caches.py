"""Caches: dictionaries that keep results worked out for a shape or a layout, and do not grow without end.

Those that a module owns have a name and are known here: all are emptied together when process groups are gone, and
`cache_sizes` counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

_NAMED: list[tuple[str, Cache]] = []


class Cache(dict):
    """A dict that is emptied before it takes more than ``most`` entries.

    Args:
        most: how many entries.
        name: its name in `cache_sizes`, of one that lives as long as the program; several may share a name.
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
    """Cache of the values of ``make(key)``, each made at its first use. No object owns it: copies of its holder
    share it."""

    def __init__(self, make: Callable[[Any], Any], most: int = 1 << 10, name: str = "") -> None:
        super().__init__(most, name)
        self._make = make

    def __missing__(self, key: Any) -> Any:
        value = self[key] = self._make(key)
        return value

    def __deepcopy__(self, memo: dict) -> Table:
        return self


def clear_caches() -> None:
    """Empty every cache that has a name. Cached values can be computed again."""
    for _, cache in _NAMED:
        cache.clear()


def cache_sizes() -> dict[str, int]:
    """The number of entries of each cache, by name: to see whether a cache grows that should not. A cache appears when
    the module that keeps it is first used.

    Example:
        >>> from hyper_parallel import DTensor
        >>> from hyper_parallel.debug import cache_sizes
        >>> "plans of operations" in cache_sizes()
        True
    """
    sizes: Counter[str] = Counter()
    for name, cache in _NAMED:
        sizes[name] += len(cache)
    return dict(sizes)
