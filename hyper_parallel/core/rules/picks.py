"""Selection of elements whose number depends on the data, in the order of a single device.

Each rank counts the selected elements of its shard, such as nonzero ones. The counts are exchanged, so every rank knows
the total and the positions of its elements. Then only the selected elements are gathered, padded to the largest count,
and never the tensor itself. A single device selects in row-major order. In this order, a shard that is split along a
later dimension consists of several *segments*. There is one segment for each index of the dimensions before the last
split dimension. One count per segment is exchanged; there is one segment if only dimension 0 is sharded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.communication.collectives import bind_all_gather
from hyper_parallel.core.communication.shard_steps import Gather
from hyper_parallel.core.layouts.cuts import ranges_of
from hyper_parallel.core.layouts.placement_types import Replicate, Shard

if TYPE_CHECKING:
    from hyper_parallel.core.layouts.layout import Layout


class Picks:
    """The number of elements that each rank selects from its shard, and the positions of these elements. All ranks know
    all counts.

    Args:
        layout: layout of the tensor to select from. At least one mesh dimension of more than one rank must shard it.
        like: a local tensor on the device of the shard.
        count: number of elements that this rank selects, if it is known.
        mask: returns a local tensor that is True for selected elements and broadcasts to the shard. It is called if
            there are segments, or no ``count``. With None, the selected elements of each rank stay consecutive.

    Attributes:
        total: number of elements that all ranks select.
        own_count: number of elements that this rank selects.
    """

    def __init__(self, layout: Layout, like: Any, count: int | None, mask: Callable[[], Any] | None) -> None:
        mesh, self._platform = layout.mesh, layout.mesh.platform
        self._mesh, coordinate = mesh, list(mesh.get_coordinate() or ())
        self._mesh_dims = [d for d, p in enumerate(layout.placements) if isinstance(p, Shard) and mesh.shape[d] > 1]
        self._coordinate = [coordinate[d] for d in self._mesh_dims]
        self._peers = list(itertools.product(*(range(mesh.shape[d]) for d in self._mesh_dims)))
        self._me = self._peers.index(tuple(self._coordinate))
        depth = max((p.dim for p in layout.placements if isinstance(p, Shard)), default=0)
        firsts = []  # the global flat index of each segment's first element
        for peer in self._peers:
            for mesh_dim, index in zip(self._mesh_dims, peer, strict=True):
                coordinate[mesh_dim] = index
            places = _first_places(layout, coordinate, depth)
            firsts.append(places if mask is not None else places[:1])
        self._edges = np.cumsum([0, *map(len, firsts)])
        self._order = np.argsort(np.concatenate(firsts), kind="stable")

        own = _counted(layout, mask, depth, like, self._platform) if mask and len(firsts[self._me]) != 1 else None
        if own is None and count is None:
            assert mask is not None, "nothing to count"
            own = _counted(layout, mask, depth, like, self._platform)
        if own is None:
            own = self._platform.places(np.full((len(firsts[self._me]),), count, np.int64), like)
        by_peer = self._exchanged(own, max(map(len, firsts)))
        #: Number of selected elements in each segment, rank by rank.
        self._counts = np.concatenate([row[: len(each)] for row, each in zip(by_peer, firsts, strict=True)])
        self._starts = np.empty_like(self._counts)
        self._starts[self._order] = _exclusive_sums(self._counts[self._order])
        self._by_peer = np.array([self._counts[slice(*edge)].sum() for edge in itertools.pairwise(self._edges)])
        self.total, self.own_count = int(self._counts.sum()), int(self._by_peer[self._me])

    def _exchanged(self, counts: Any, segments: int) -> np.ndarray:
        """Return the counts of all peers, one row each."""
        platform, mesh = self._platform, self._mesh
        missing = segments - platform.shape_of(counts)[0]
        if missing:
            counts = platform.cat([counts, platform.zeros((missing,), counts)], 0)
        counts = counts.reshape((1, segments))
        for mesh_dim in reversed(self._mesh_dims):
            rows = (platform.shape_of(counts)[0],) * mesh.shape[mesh_dim]
            counts = bind_all_gather(mesh, mesh_dim, 0, rows)(counts)
        return np.frombuffer(platform.bytes_of(counts), np.int64).reshape(len(self._peers), segments)

    @property
    def own(self) -> np.ndarray:
        """The positions of this rank's elements among all selected ones, in the local order."""
        mine = slice(*self._edges[self._me : self._me + 2])
        return _runs(self._starts[mine], self._counts[mine])

    def gathered(self, picked: Any, dim: int = 0) -> Any:
        """Return the selected elements of all ranks along dimension ``dim``, in the order of the global tensor. It is
        differentiable.

        If a rank has several segments of the dimension, ``dim`` must be 0.
        """
        platform = self._platform
        by_peer = self._by_peer.reshape([self._mesh.shape[d] for d in self._mesh_dims])
        for level, mesh_dim in reversed([*enumerate(self._mesh_dims)]):
            inner = tuple(range(level + 1, by_peer.ndim))
            sizes = tuple(map(int, by_peer.sum(inner)[tuple(self._coordinate[:level])]))
            picked = Gather(self._mesh, mesh_dim, Shard(dim), Replicate(), sizes)(picked)
        order = self._order[self._counts[self._order] > 0]
        if bool((np.diff(order) > 0).all()):
            return picked
        begins = _exclusive_sums(self._counts)
        if len(self._counts) > len(self._peers):
            return picked[platform.places(_runs(begins[order], self._counts[order]), picked)]
        return platform.cat([platform.narrow(picked, dim, int(begins[i]), int(self._counts[i])) for i in order], dim)


def _first_places(layout: Layout, coordinate: list[int], depth: int) -> np.ndarray:
    """Return the global flat index of the first element of each segment, for the shard of the rank at
    ``coordinate``."""
    boxes = [
        ranges_of(size, layout.shard_mesh_dims(dim), layout.placements, layout.mesh.shape, coordinate)[0]
        for dim, size in enumerate(layout.shape[: depth + 1])
    ]
    *outer, (start, _) = boxes
    places = np.zeros((1,), np.int64)
    for (first, length), size in zip(outer, layout.shape, strict=False):
        places = (places[:, None] * size + np.arange(first, first + length)).reshape(-1)
    return places * layout.shape[depth] + start


def _counted(layout: Layout, mask: Callable[[], Any], depth: int, like: Any, platform: Any) -> Any:
    """Return the number of selected elements in each segment of this rank's shard."""
    shape = tuple(layout.local_shape)
    segments = math.prod(shape[:depth])
    nothing = platform.places(np.zeros((segments,), np.int64), like)
    if 0 in shape:
        return nothing
    picked = platform.masked_fill(platform.zeros(shape, nothing), mask(), 1)
    return platform.sum_along(picked.reshape((segments, -1)), 1).reshape((segments,))


def _exclusive_sums(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges ``starts[i], starts[i] + 1, ...`` of ``counts[i]`` numbers each."""
    return np.repeat(starts - _exclusive_sums(counts), counts) + np.arange(int(counts.sum()))
