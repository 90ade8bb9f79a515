"""Paths of modules: the paths that match a pattern, and the direct submodules of each parent."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Paths", "by_parent"]

_GLOB = re.compile(r"[*?[]")


class _Segment:
    """A node in the tree of path segments.

    Attributes:
        below: child nodes, by segment.
        numbers: indices of the paths that end here.
    """

    __slots__ = ("below", "numbers")

    def __init__(self) -> None:
        self.below: dict[str, _Segment] = {}
        self.numbers: list[int] = []


class Paths:
    """Paths in a tree of their segments, where matches of a pattern are found without a scan of all paths.

    Args:
        paths: paths such as ``"layers.0.up"``.

    Example:
        >>> Paths(["", "up", "layers.0.up", "layers.1.up"]).matching("layers.*.up")
        ['layers.0.up', 'layers.1.up']
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths, self._top = list(paths), _Segment()
        for number, path in enumerate(self._paths):
            at = self._top
            for name in _segments(path):
                at = at.below.setdefault(name, _Segment())
            at.numbers.append(number)

    def matching(self, pattern: str) -> list[str]:
        """Return the paths that match a pattern, in order. Each segment of the pattern may be a glob pattern."""
        found = [self._top]
        for segment in _segments(pattern):
            if _GLOB.search(segment):
                found = [x for at in found for name, x in at.below.items() if fnmatch.fnmatchcase(name, segment)]
            else:
                found = [at.below[segment] for at in found if segment in at.below]
        return [self._paths[number] for number in sorted(number for at in found for number in at.numbers)]


def by_parent(modules: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the direct submodules of each parent: path of the parent -> path of the submodule -> submodule."""
    found: dict[str, dict[str, Any]] = {}
    for path, module in modules.items():
        if path:
            found.setdefault(path.rpartition(".")[0], {})[path] = module
    return found


def _segments(path: str) -> list[str]:
    return path.split(".") if path else []
