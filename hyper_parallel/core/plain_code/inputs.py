"""`Inputs`: the tensors with which a followed model is called, and the placements that styles declare for them.

A model may be a part of a program whose tensors are shards: a block, or a stage of a pipeline. Its caller then gives it
shards, and takes shards of the same placement.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from hyper_parallel.core.plain_code.marks import Held, Mark, held
from hyper_parallel.platform.contract import Platform

__all__ = ["Inputs"]


class Inputs:
    """The inputs of a model. They are not kept alive."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}
        self._declared: list[tuple[weakref.ref[Any], Held]] = []
        self._placed: set[tuple[Any, Any]] = set()

    def __contains__(self, x: Any) -> bool:
        known = self._known.get(id(x))
        return known is not None and known() is x

    def __iter__(self) -> Iterator[Any]:
        return (x for known in self._known.values() if (x := known()) is not None)

    def add(self, x: Any) -> None:
        """Add an input of the model. Its placement may be known from the model that returned it."""
        self._known[id(x)] = weakref.ref(x)
        found = held(x)
        if found is not None and isinstance(found.ways, tuple):
            self._placed.update(_placement(mark) for mark in found.ways)

    def declare(self, x: Any, found: Held, platform: Platform) -> None:
        """Record the placement of an input, as the style that takes the input declares it."""
        platform.write_mark(x, found)
        self._declared.append((weakref.ref(x), found))
        self._placed.update(_placement(mark) for mark in found.ways)  # type: ignore[union-attr]

    def are_placed_as(self, ways: tuple[Mark | None, ...]) -> bool:
        """Return whether each possible placement in ``ways`` is also the placement of some input."""
        return all(_placement(mark) in self._placed for mark in ways)

    def clear(self, platform: Platform) -> None:
        """Remove the declared placements, because another program may use these tensors for something else."""
        for known, found in self._declared:
            x = known()
            if x is not None and held(x) is found:
                platform.write_mark(x, None)
        self._declared.clear()
        self._known.clear()


def _placement(mark: Mark | None) -> tuple[Any, Any]:
    return (None, None) if mark is None else (mark.layout.mesh, mark.layout.placements)
