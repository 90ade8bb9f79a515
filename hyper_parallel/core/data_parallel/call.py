"""One call of a unit of `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

__all__ = ["Call", "chosen", "versions_of"]

_VERSION = attrgetter("_version")


class Call:
    """One call of a unit; it lives as long as its graph.

    Attributes:
        parameters: the shards.
        trained: of each buffer, the indices of those that gradients are asked for.
        recorded: whether there may be a backward.
        within: the units whose forward it is a part of.
        waiting: parts of gradients that are still to be summed over tensor-parallel ranks; see `DTensor._collect`.
        freed: whether its whole parameters were given back when it ended.
        gives, returns: weak references to the contexts of the functions whose results are its whole parameters, and of
            those that its own results are of.
        anchors: while the forward runs, one trained whole parameter of each buffer, where there are several ranks.
        reached: the number of the backward pass that found its whole parameters there.
        again: whether a backward of it was recorded: another one may need the whole parameters before it comes to the
            results.
    """

    def __init__(self, parameters: list[Any], trained: list[list[int]], recorded: bool, within: tuple) -> None:
        self.parameters, self.trained, self.recorded, self.within = parameters, trained, recorded, within
        self.versions = versions_of(parameters)
        self.waiting: list[Any] = []
        self.anchors: list[Any] = []
        self.freed = self.again = False
        self.gives: list[Any] = []
        self.returns: list[Any] = []
        self.reached = 0

    def comes_around(self, runs: Callable[[Any], bool]) -> bool:
        """Whether a backward pass comes to the parameters, and not through the results.

        Args:
            runs: see `Platform.before_backward`.
        """
        # Mostly it comes through the results, which answers alone.
        return not _any(self.returns, runs) and _any(self.gives, runs)

    def check_whole(self, what: str) -> None:
        """Raise RuntimeError, in a backward that has not come to the results, when the whole parameters that it has
        read were given back before, or written to."""
        self.check_unchanged(what)
        if self.freed:
            raise RuntimeError(
                f"{what}: a backward has come to its parameters, and not to what it has returned, after which they "
                "would have been gathered again: gradients are wrong. Return what the loss is computed of, such as an "
                "auxiliary loss, or add it to the loss of what was returned, or leave the parameters whole, with "
                "fully_shard(reshard_after_forward=False)"
            )

    def check_unchanged(self, what: str) -> None:
        """Raise RuntimeError when a parameter was written to since, as frameworks do for what autograd keeps: backward
        would read other values than forward has read."""
        if versions_of(self.parameters) != self.versions:
            raise RuntimeError(
                f"{what}: a parameter was changed in place between a forward and its backward: run backward before the "
                "optimizer's step, or forward again"
            )


def _any(contexts: Sequence[Any], runs: Callable[[Any], bool]) -> bool:
    return any(ctx is not None and runs(ctx) for ctx in (ref() for ref in contexts))


def chosen(xs: Sequence[Any], indices: Sequence[int]) -> Sequence[Any]:
    """``xs[i]`` for each of ``indices``, which ascend: mostly all."""
    return xs if len(indices) == len(xs) else [xs[i] for i in indices]


def versions_of(parameters: Sequence[Any]) -> list[int]:
    """How often each has been written to."""
    return list(map(_VERSION, parameters))
