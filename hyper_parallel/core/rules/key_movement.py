"""Communication of keys and values for attention over a sharded sequence, by all-gather or in a ring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.communication.redistribute import redistribution_steps
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.rules.sequence_cut import SequenceCut, sizes_of
from hyper_parallel.platform.contract import Platform

__all__ = ["KeyGather", "Ring", "RingBuffers"]


@dataclass(frozen=True)
class KeyGather:
    """All-gather of keys and values from shards, and its backward. Keys and values are sent in one message if their
    shapes differ at most in the features."""

    platform: Platform
    steps: tuple[Any, ...]

    @classmethod
    def of(cls, layout: Layout, dim: int) -> KeyGather:
        """Return the all-gather for keys of this layout."""
        placements = [Replicate() if p.is_shard(dim) else p for p in layout.placements]
        return cls(layout.mesh.platform, tuple(redistribution_steps(layout, layout.with_placements(placements))))

    def forward(self, k: Any, v: Any) -> tuple[Any, Any]:
        """Return full keys and values from shards, outside autograd."""
        return self._both([k, v], [step.collective for step in self.steps])

    def backward(self, both: list[Any]) -> tuple[Any, Any]:
        """Return this rank's shards of the gradients of keys and values, summed over ranks. The result is
        differentiable. The list ``both`` is emptied to free its memory."""
        return self._both(both, [step.for_parts.back for step in reversed(self.steps)])

    def _both(self, both: list[Any], steps: list[Any]) -> tuple[Any, Any]:
        platform = self.platform
        (*of_k, features), (*of_v, more) = map(platform.shape_of, both)
        if not steps or of_k != of_v:
            k, v = (_taken([x], steps) for x in both)
            return k, v
        joined = [platform.cat(both, -1)]
        both.clear()
        moved, last = _taken(joined, steps), len(of_k)
        return platform.narrow(moved, last, 0, features), platform.narrow(moved, last, features, more)


def _taken(held: list[Any], steps: list[Any]) -> Any:
    """Apply all steps to the only tensor in the list, and return the result.

    The input of each step is freed before the next step.
    """
    for step in steps:
        held.append(step(held.pop()))
    return held.pop()


class _Message:
    """A buffer that is being sent to the next rank, and the buffer that is received from the previous rank."""

    def __init__(self, ring: Ring, buffer: Any) -> None:
        self._received = ring.platform.empty((ring._most,), buffer)
        self._sent = buffer  # has to live until it has arrived
        self._work = asynchronous.start("shift", self._received, buffer, ring.mesh, ring.mesh_dim)

    def arrived(self) -> Any:
        """Wait for the received buffer and return it. The sent buffer is freed with this object."""
        self._work.wait()
        return self._received


class RingBuffers(NamedTuple):
    """The memory for keys and values that are passed around a ring of ranks.

    Attributes:
        shapes: shapes of the keys and the values of each rank.
        counts: number of elements of the keys and values of each rank.
        most: maximum of ``counts``, which is the size of every buffer.
        mesh_dim: the mesh dimension of the ring.
        size, rank: number of ranks in the ring, and index of this rank.
    """

    shapes: list[list[tuple[int, ...]]]
    counts: list[int]
    most: int
    mesh_dim: int
    size: int
    rank: int

    @classmethod
    def of(cls, cut: SequenceCut, *shapes: Sequence[int]) -> RingBuffers:
        """Return the buffers for keys and values of these shapes on this rank."""
        around = [(tuple(s[:-2]), s[-1]) for s in shapes]
        each = [[(*before, n, features) for before, features in around] for n in sizes_of(cut.ranges)]
        counts = [sum(map(math.prod, two)) for two in each]
        (mesh_dim,) = cut.mesh_dims
        mesh = cut.layout.mesh
        return cls(each, counts, max(counts), mesh_dim, mesh.shape[mesh_dim], mesh.get_local_rank(mesh_dim))


class Ring:
    """Ring of the ranks along a mesh dimension, through which the keys and values of each rank are passed.

    Args:
        platform: platform of the tensors.
        cut: sharded sequence of the keys and values.
        k: keys of this rank.
        v: values of this rank.
        buffers: memory of the ring.
    """

    def __init__(self, platform: Platform, cut: SequenceCut, k: Any, v: Any, buffers: RingBuffers) -> None:
        self.platform, self.k, self.v, self.mesh = platform, k, v, cut.layout.mesh
        self._shapes, self._counts, self._most, self.mesh_dim, self.size, self.rank = buffers
        self._coming: _Message | None = None

    def start(self) -> None:
        """Start to send this rank's keys and values."""
        if self._coming is None and self.size > 1:
            self._coming = _Message(self, self._packed(self.k, self.v))

    def others(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield the source rank of each received piece, and its keys and values. The next piece is received
        meanwhile."""
        self.start()
        for step in range(1, self.size):
            assert self._coming is not None
            buffer, self._coming = self._coming.arrived(), None
            source = (self.rank - step) % self.size
            if step < self.size - 1:
                self._coming = _Message(self, buffer)
            yield source, *self._unpacked(buffer, source)
            del buffer

    def pieces(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield this rank's keys and values, followed by those of `others`."""
        self.start()
        yield self.rank, self.k, self.v
        yield from self.others()

    def gradients(self, part: Callable[[int, Any, Any], list[Any]], then: Callable[[], None] | None) -> list[Any]:
        """Return the gradients of this rank's keys and values. On each rank, ``part(source, k, v)`` computes the
        gradients of one piece, which are summed over ranks.

        The gradients of a piece follow the piece around the ring, and return to the source from the last rank.
        Meanwhile, this rank calls ``then()`` and computes the gradients of its local piece.
        """
        coming: _Message | None = None
        for piece in self.others():
            found = part(*piece)
            del piece
            buffer = self._packed(*found)
            found.clear()
            if coming is not None:
                buffer += coming.arrived()
            coming = _Message(self, buffer)
            del buffer
        if then is not None:
            then()
        home = part(self.rank, self.k, self.v)
        if coming is not None:
            for i, x in enumerate(self._unpacked(coming.arrived(), self.rank)):
                home[i] += x
        return home

    def _packed(self, k: Any, v: Any) -> Any:
        """Return both tensors as one vector of a length that is equal on all ranks."""
        platform = self.platform
        flat = platform.join([k, v])
        missing = self._most - flat.shape[0]
        return platform.cat([flat, platform.zeros((missing,), flat)], 0) if missing else flat

    def _unpacked(self, buffer: Any, source: int) -> tuple[Any, Any]:
        count = self._counts[source]
        flat = buffer if count == self._most else self.platform.narrow(buffer, 0, 0, count)
        k, v = self.platform.part(flat, self._shapes[source])
        return k, v
