"""One call of a unit of `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Call", "versions_of"]


class Call:
    """One call of a unit; it lives as long as its graph.

    Attributes:
        parameters: the shards.
        trained: of each buffer, the indices of those that gradients are asked for.
        recorded: whether there may be a backward.
        within: the units whose forward it is a part of.
        waiting: parts of gradients that are still to be summed over tensor-parallel ranks; see `DTensor._collect`.
    """

    def __init__(self, parameters: list[Any], trained: list[list[int]], recorded: bool, within: tuple) -> None:
        self.parameters, self.trained, self.recorded, self.within = parameters, trained, recorded, within
        self.versions = versions_of(parameters)
        self.waiting: list[Any] = []

    def check_unchanged(self, what: str) -> None:
        """Raise RuntimeError when a parameter was written to since, as frameworks do for what autograd keeps: backward
        would read other values than forward has read."""
        if versions_of(self.parameters) != self.versions:
            raise RuntimeError(
                f"{what}: a parameter was changed in place between a forward and its backward: run backward before the "
                "optimizer's step, or forward again"
            )


def versions_of(parameters: Sequence[Any]) -> list[int]:
    """How often each has been written to."""
    return [p._version for p in parameters]
