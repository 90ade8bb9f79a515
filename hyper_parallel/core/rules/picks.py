"""Elements that ranks pick of their parts of a tensor, in the order in which one device picks them.

How many elements are not zero, or True, only the data say. Each rank counts those of its part. The counts are
exchanged, so every rank knows how many there are and where its own go. The picked elements are then gathered, padded to
the largest count, and nothing else: never the tensor itself.

One device picks in row-major order. A part that is cut along a later dimension then consists of *segments*. There is
one for each index of the dimensions before the last cut. So many counts are exchanged: one where dimension 0 alone is
sharded.
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
    """The number of elements that each rank picks of its part, and their places. All but the own count is the same on
    all ranks.

    Args:
        layout: of the tensor that elements are picked from. Only its shards count, one mesh dimension of more than one
            rank at least.
        like: a local tensor on the device of the part.
        count: how many this rank picks, if that is known.
        mask: gives a local tensor that is True where an element is picked and broadcasts to the part. Asked where there
            are segments, or no ``count``. None: the picked elements of each rank stay together.

    Attributes:
        total: how many all ranks pick.
        own_count: how many this rank picks.
    """

    def __init__(self, layout: Layout, like: Any, count: int | None, mask: Callable[[], Any] | None) -> None:
        mesh, self._platform = layout.mesh, layout.mesh.platform
        self._mesh, coordinate = mesh, list(mesh.get_coordinate() or ())
        self._mesh_dims = [d for d, p in enumerate(layout.placements) if isinstance(p, Shard) and mesh.shape[d] > 1]
        self._coordinate = [coordinate[d] for d in self._mesh_dims]
        self._peers = list(itertools.product(*(range(mesh.shape[d]) for d in self._mesh_dims)))
        self._me = self._peers.index(tuple(self._coordinate))
        depth = max((p.dim for p in layout.placements if isinstance(p, Shard)), default=0)
        firsts = []  # the place of each segment's first element in the whole tensor
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
        #: For each segment of each rank, rank by rank: how many are picked there.
        self._counts = np.concatenate([row[: len(each)] for row, each in zip(by_peer, firsts, strict=True)])
        self._starts = np.empty_like(self._counts)
        self._starts[self._order] = _exclusive_sums(self._counts[self._order])
        self._by_peer = np.array([self._counts[slice(*edge)].sum() for edge in itertools.pairwise(self._edges)])
        self.total, self.own_count = int(self._counts.sum()), int(self._by_peer[self._me])

    def _exchanged(self, counts: Any, segments: int) -> np.ndarray:
        """The counts of all peers, a row each."""
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
        """The places of this rank's elements among all, in the order in which this rank picks them."""
        mine = slice(*self._edges[self._me : self._me + 2])
        return _runs(self._starts[mine], self._counts[mine])

    def gathered(self, picked: Any, dim: int = 0) -> Any:
        """Gather the picked elements of all ranks along dimension ``dim``, in the order of the whole tensor.
        Differentiable.

        Elements picked in segments are picked along dimension 0.
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
    """The place of the first element of each segment of the part of the rank at ``coordinate``."""
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
    """The number of picked elements in each segment of this rank's part."""
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
    """``starts[0], starts[0] + 1, ...`` of each of ``counts[0], ...`` numbers, one after the other."""
    return np.repeat(starts - _exclusive_sums(counts), counts) + np.arange(int(counts.sum()))
