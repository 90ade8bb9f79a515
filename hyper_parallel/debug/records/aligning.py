"""Matching of the tensors of two records whose modules have different paths."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher

from hyper_parallel.debug.records.wholes import Tensor

__all__ = ["Names", "names_between"]

Key = tuple[str, int, str, int, str, str]


class Names:
    """Mapping from paths of the first record to paths of the second.

    Args:
        given: paths, or prefixes of paths, of the first record -> those of the second. ``*`` matches one component of a
            path, and is replaced by the matched component on the right.
        stripped, added: prefix that only paths of the first record have, and prefix that only paths of the second have.
        found: paths of modules that were matched by their order and shapes.
    """

    def __init__(
        self,
        given: Mapping[str, str] | None = None,
        stripped: str = "",
        added: str = "",
        found: Mapping[str, str] | None = None,
    ) -> None:
        self._given = [(re.compile(_pattern(old)), new) for old, new in (given or {}).items()]
        self.stripped, self.added, self.found = stripped, added, dict(found or {})

    def __call__(self, path: str) -> str:
        """Return the path in the second record."""
        for pattern, new in self._given:
            match = pattern.fullmatch(path)
            if match:
                parts = iter(match.groups()[:-1])
                head = ".".join(next(parts) if part == "*" else part for part in new.split(".")) if new else ""
                return ".".join(filter(None, (head, match.groups()[-1])))
        for old in sorted(self.found, key=len, reverse=True):
            if path == old or path.startswith(f"{old}."):
                return self.found[old] + path[len(old) :]
        if self.stripped and (path == self.stripped or path.startswith(f"{self.stripped}.")):
            path = path[len(self.stripped) + 1 :]
        return ".".join(filter(None, (self.added, path)))

    def as_dict(self) -> dict[str, object]:
        """Return the automatically matched paths, for people."""
        return {"stripped": self.stripped, "added": self.added, "by_order": self.found}


def _pattern(old: str) -> str:
    """Return a regular expression for paths with the prefix ``old``: a group for each ``*``, and a group for the
    rest."""
    parts = [r"([^.]+)" if part == "*" else re.escape(part) for part in old.split(".")] if old else []
    return rf"{re.escape('.').join(parts)}(?:\.(.*))?" if parts else "(.*)"


def names_between(a: Mapping[Key, Tensor], b: Mapping[Key, Tensor], given: Mapping[str, str] | None) -> Names:
    """Return the mapping of paths.

    It prefers given pairs of paths, then equal paths, with or without a prefix, then equal order.
    """
    paths_a, paths_b = _paths(a), _paths(b)
    best, most = Names(given), _matches(Names(given), paths_a, paths_b)
    if most < min(len(paths_a), len(paths_b)):
        for prefix in _prefixes(paths_b):
            names = Names(given, added=prefix)
            if (count := _matches(names, paths_a, paths_b)) > most:
                best, most = names, count
        for prefix in _prefixes(paths_a):
            names = Names(given, stripped=prefix)
            if (count := _matches(names, paths_a, paths_b)) > most:
                best, most = names, count
    found = _by_order(a, b, best)
    return Names(given, best.stripped, best.added, found) if found else best


def _paths(tensors: Mapping[Key, Tensor]) -> list[str]:
    """Return the paths of modules and parameters."""
    return list(dict.fromkeys(key[2] for key in tensors if key[0] in ("output", "parameter", "update")))


def _matches(names: Names, paths_a: Collection[str], paths_b: Collection[str]) -> int:
    there = set(paths_b)
    return sum(bool(found := names(path)) and found in there for path in paths_a)


def _prefixes(paths: Collection[str]) -> list[str]:
    """Return prefixes of paths, with up to three components."""
    found: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        for count in range(1, min(len(parts), 4)):
            found[".".join(parts[:count])] = None
    return list(found)


def _by_order(a: Mapping[Key, Tensor], b: Mapping[Key, Tensor], names: Names) -> dict[str, str]:
    """Match modules whose paths the other record lacks, by call order and output shapes. Return path -> path."""
    there = {key[2] for key in b}
    taken = {names(key[2]) for key in a}
    left_a = [key for key in a if key[0] == "output" and key[1:2] == (0,) and names(key[2]) not in there]
    left_b = [key for key in b if key[0] == "output" and key[1:2] == (0,) and key[2] not in taken]
    if not left_a or not left_b:
        return {}
    shapes_a, shapes_b = [_shape(a[key]) for key in left_a], [_shape(b[key]) for key in left_b]
    found: dict[str, str] = {}
    for block in SequenceMatcher(None, shapes_a, shapes_b, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            found.setdefault(left_a[block.a + i][2], left_b[block.b + i][2])
    return found


def _shape(tensor: Tensor) -> tuple[int, ...]:
    ways = tensor.ways()
    return ways[0].shape if len(ways) == 1 else tensor.entry.local
