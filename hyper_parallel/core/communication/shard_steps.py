"""The steps of `transitions` from and to shards: gather, slice, reduce-scatter, all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.read_past import summands_of
from hyper_parallel.core.communication.recorder import dim_name
from hyper_parallel.core.communication.transitions import Move
from hyper_parallel.core.layouts.chunking import packed_ranges
from hyper_parallel.core.layouts.placement_types import PackedShard, Partial, Replicate, Shard
from hyper_parallel.platform.contract import NOTHING_FASTER, Platform
from hyper_parallel.platform.contract.autograd import TensorFunction, named


class Gather(Move):
    """All-gather of a shard for consumers that return the full cotangent."""

    verb = "gather"

    def __call__(self, x: Any) -> Any:
        return self.share(x, self.data_of(x))

    def data_of(self, x: Any) -> Any:
        """Return the all-gathered data of the shard ``x``, outside autograd, in the order of the global tensor."""
        return by_part(self.collective(self.platform.detach(x)), self.source, self.size, self.platform)

    def share(self, x: Any, data: Any) -> Any:
        """Return the gathered ``data``, recorded as computed from the shard ``x``.

        So `Gather` and `GatherForParts` can share one collective.
        """
        return self._take(x, self, data) if self.platform.requires_grad(x) else data

    def forward(self, ctx: Any, x: Any, data: Any = None) -> Any:
        return self.platform.detach(data)

    @cached_property
    def collective(self) -> TensorFunction:
        """The all-gather as a function of a local tensor, outside autograd. It concatenates shards in rank order."""
        return collectives.bind_all_gather(self.mesh, self.mesh_dim, self.source.dim, self.source_sizes)

    @cached_property
    def for_parts(self) -> Gather:
        """Return the all-gather of the same shard for consumers that return a partial cotangent."""
        return GatherForParts(
            self.mesh, self.mesh_dim, self.source, self.target, self.source_sizes, self.target_sizes, self.layout
        )

    def move(self, x: Any) -> Any:
        local, partial, data = self.take_both(x)
        y = self.platform.wrap(local, self.layout)
        if partial is not None or self.platform.requires_grad(x):
            y._gathered = (x, self, data, (x._writes, x._version), partial, y._version)
        return y

    @cached_property
    def take_both(self) -> Callable[[Any], tuple[Any, Any, Any]]:
        """A function that gathers a shard for both kinds of consumers.

        It returns three tensors. The first is the full tensor for consumers that return the full cotangent. The second
        is the full tensor for consumers that return a partial cotangent, or None if it would be expensive. The third is
        the data that both tensors share.
        """
        requires_grad, detach = self.platform.requires_grad, self.platform.detach

        def alone(x: Any) -> tuple[Any, Any, Any]:
            data = self.data_of(x)
            return self.share(x, data), None, data

        if isinstance(self.source, PackedShard) or self.size == 1 or self.layout is None:
            return alone
        scatter: Any = self.for_parts.back
        gather, reduce_scatter, slice_ = self.collective, scatter.collective, self.back

        def forward(ctx: Any, x: Any) -> tuple[Any, Any]:
            data = gather(detach(x))
            return data, detach(data)

        def backward(full: Any, partial: Any) -> Any:
            if partial is None:
                return None if full is None else slice_(full)
            scattered = scatter(partial) if requires_grad(partial) else reduce_scatter(partial)
            return scattered if full is None else scattered + slice_(full)

        both = (self.platform.fast or NOTHING_FASTER).autograd_pair(
            named(f"AllGather_{dim_name(self.mesh, self.mesh_dim)}", forward), backward
        )
        if both is None:
            return alone

        def share(x: Any) -> tuple[Any, Any, Any]:
            if not requires_grad(x):
                data = gather(detach(x))
                return data, None, data
            full, partial = both(x)
            return full, partial, partial

        return share


class GatherForParts(Gather):
    """All-gather of a shard for consumers that return a partial cotangent, because each rank computes a part of the
    result."""

    verb = "gather_for_parts"
    ends = Replicate()


class Slice(Move):
    """Slicing of a replicated tensor into this rank's shard."""

    verb = "slice"

    def move(self, x: Any) -> Any:
        summands = summands_of(x)
        if summands is None or self.mesh_dim not in summands[0]:
            return super().move(x)
        # The gradient of the shard, padded with zeros, is a summand, so backward need not communicate.
        mesh_dims, make = summands
        x._read_past = x._version

        def part(partial: tuple[int, ...] = ()) -> Any:
            return self._part(make((self.mesh_dim, *partial)))

        y = self.platform.wrap(part(), self.layout)
        rest = tuple(d for d in mesh_dims if d != self.mesh_dim)
        if rest and self.platform.requires_grad(y):
            y._summands = rest, part, y._version
        return y

    def forward(self, ctx: Any, x: Any) -> Any:
        return self._part(x)

    def _part(self, x: Any) -> Any:
        rank, sizes, platform = self.mesh.get_local_rank(self.mesh_dim), self.target_sizes, self.platform
        if isinstance(self.target, PackedShard):
            return take_packed(x, self.target, rank, len(sizes), platform)
        return platform.clone(platform.narrow(x, self.target.dim, sum(sizes[:rank]), sizes[rank]))


class AllToAll(Move):
    """Exchange of shards of one tensor dimension for shards of another."""

    verb = "exchange"

    @cached_property
    def collective(self) -> TensorFunction:
        """The all-to-all as a function of a local tensor, outside autograd. Shards are in rank order."""
        dims = self.source.dim, self.target.dim
        return collectives.bind_all_to_all(self.mesh, self.mesh_dim, *dims, self.source_sizes, self.target_sizes)

    def forward(self, ctx: Any, x: Any) -> Any:
        return self.collective(x)


class ReduceScatter(Move):
    """Reduction of a sum or an average into shards."""

    verb = "scatter"
    starts = Partial()

    @cached_property
    def collective(self) -> TensorFunction:
        """The reduce-scatter as a function of a local tensor, outside autograd. Shards are in rank order."""
        op = self.source.reduce_op
        return collectives.bind_reduce_scatter(self.mesh, self.mesh_dim, self.target.dim, self.target_sizes, op)

    def forward(self, ctx: Any, x: Any) -> Any:
        return self.collective(by_rank(x, self.target, self.size, self.platform))

    def bind(self) -> TensorFunction:
        if self.source is not Partial() or isinstance(self.target, PackedShard) or self.size == 1:
            return self
        back: Any = self.back
        requires_grad, scatter, gather = self.platform.requires_grad, self.collective, back.collective

        def backward(g: Any) -> Any:
            return back(g) if requires_grad(g) else gather(g)

        fast = self.platform.fast or NOTHING_FASTER
        forward = named(f"ReduceScatter_{dim_name(self.mesh, self.mesh_dim)}", lambda ctx, y: scatter(y))
        return fast.autograd_step(forward, backward) or self


def take_packed(x: Any, placement: PackedShard, rank: int, size: int, platform: Platform) -> Any:
    """Return the shard of the full plain tensor ``x`` that ``rank`` of ``size`` ranks holds, as a new tensor."""
    ranges = packed_ranges(placement, rank, size)
    pieces = [platform.narrow(x, placement.dim, start, length) for start, length in ranges if length]
    if not pieces:
        return platform.clone(platform.narrow(x, placement.dim, 0, 0))
    return platform.cat(pieces, placement.dim) if len(pieces) > 1 else platform.clone(pieces[0])


def by_rank(x: Any, placement: Shard, size: int, platform: Platform) -> Any:
    """Return the full plain tensor ``x`` with its elements sorted by the rank that holds them.

    A collective can then split it into consecutive chunks.
    """
    if not isinstance(placement, PackedShard) or size == 1:
        return x
    pieces = [take_packed(x, placement, rank, size, platform) for rank in range(size)]
    return platform.cat([piece for piece in pieces if platform.shape_of(piece)[placement.dim]], placement.dim)


def by_part(x: Any, placement: Shard, size: int, platform: Platform) -> Any:
    """Sort data from rank order into the order of the global tensor. Inverse of `by_rank`."""
    if not isinstance(placement, PackedShard) or size == 1:
        return x
    pieces: list[tuple[int, int, int]] = []
    position = 0
    for rank in range(size):
        for start, length in packed_ranges(placement, rank, size):
            pieces.append((start, position, length))
            position += length
    dim = placement.dim
    return platform.cat([platform.narrow(x, dim, at, length) for _, at, length in sorted(pieces) if length], dim)
