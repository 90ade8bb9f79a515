"""The differentiable steps between placements on one mesh dimension, and the views that reduce gradients.

Each step is an autograd function on local tensors whose backward is another step, so gradients of gradients are right
too. The contract that all of them keep: the cotangent of a local tensor is the full gradient for `Replicate`, the
shard of it for `Shard`, and for `Partial` the full gradient (what each summand receives).

=========================  =======================  =============================================
step                       forward                  backward
=========================  =======================  =============================================
Shard(d) -> Replicate      all-gather               slice, or reduce-scatter in the partial view
Replicate -> Shard(d)      slice                    all-gather
Partial -> Replicate       all-reduce               identity
Partial -> Shard(d)        reduce-scatter           all-gather
Shard(a) -> Shard(b)       all-to-all               all-to-all
Replicate -> Partial       value on one rank        identity
partial-gradient view      identity                 all-reduce
=========================  =======================  =============================================

Source: the f, g and g-bar functions of Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.caches import Cache
from hyper_parallel.core.dtensor.communication import collectives
from hyper_parallel.core.dtensor.communication.coalesce import BLOCKS
from hyper_parallel.core.dtensor.communication.extremes import differs
from hyper_parallel.core.dtensor.layouts.chunking import packed_ranges, shard_sizes
from hyper_parallel.core.dtensor.layouts.layout import Layout
from hyper_parallel.core.dtensor.placement_types import PackedShard, Partial, Replicate, Shard
from hyper_parallel.platform.contract import NOTHING_FASTER

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
    from hyper_parallel.platform.contract import Platform

__all__ = ["Step", "Transitions", "by_rank", "summation", "take_packed", "transitions_of"]


@dataclass(eq=False)
class Step:
    """One change of placement on one mesh dimension; not to be changed.

    Attributes:
        mesh, mesh_dim: where.
        source, target: the placements before and after.
        source_sizes, target_sizes: for `Shard`, how many elements of the sharded dimension each rank of the mesh
            dimension holds; empty otherwise.
        layout: layout after the step, None for a step on a cotangent.
    """

    mesh: DeviceMesh
    mesh_dim: int
    source: Any  # a Placement; which kind follows from the step
    target: Any
    source_sizes: tuple[int, ...]
    target_sizes: tuple[int, ...]
    layout: Layout | None
    _reversed: Step | None = field(default=None, init=False, repr=False)
    _collective: Callable[[Any], Any] | None = field(default=None, init=False, repr=False)

    @property
    def reversed(self) -> Step:
        """The step of the cotangent: from the placement after to the placement before, a `Partial` being
        `Replicate`."""
        if self._reversed is None:
            # Of what was scattered; otherwise the cotangent of the cotangent of an average would be averaged again.
            scattered = isinstance(self.source, Partial) and isinstance(self.target, Shard)
            before = Replicate() if scattered else self.source
            self._reversed = Step(
                self.mesh, self.mesh_dim, self.target, before, self.target_sizes, self.source_sizes, None
            )
        return self._reversed

    def gather(self, x: Any) -> Any:
        """All-gather ``x``, for a ``source`` that is a shard: rank by rank."""
        if self._collective is None:
            self._collective = collectives.bind_all_gather(self.mesh, self.mesh_dim, self.source.dim, self.source_sizes)
        return self._collective(x)

    def sum_and_scatter(self, x: Any) -> Any:
        """Reduce-scatter the sum of ``x``, for a ``target`` that is a shard."""
        if self._collective is None:
            self._collective = collectives.bind_reduce_scatter(
                self.mesh, self.mesh_dim, self.target.dim, self.target_sizes
            )
        return self._collective(x)

    @staticmethod
    def between(before: Layout, after: Layout, mesh_dim: int) -> Step:
        """The step from ``before`` to ``after``, which differ on ``mesh_dim`` only."""
        return Step(
            before.mesh,
            mesh_dim,
            before.placements[mesh_dim],
            after.placements[mesh_dim],
            _sizes(before, mesh_dim),
            _sizes(after, mesh_dim),
            after,
        )


def _sizes(layout: Layout, mesh_dim: int) -> tuple[int, ...]:
    placement = layout.placements[mesh_dim]
    if not isinstance(placement, Shard) or layout.mesh.get_coordinate() is None:
        return ()
    return shard_sizes(placement, layout.size_within(placement.dim, mesh_dim), layout.mesh.shape[mesh_dim])


class Transitions:
    """The steps as functions of one platform's autograd. Get it with `transitions_of`."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self._parameter_views: dict[tuple[DeviceMesh, tuple[int, ...]], Callable[[Any], Any]] = Cache(
            1 << 12, "views of parameters"
        )
        make = platform.autograd_function
        self._share_full = make(self._share_forward, self._slice_cotangent)
        self._share_partial = make(self._share_forward, self._scatter_cotangent)
        self._slice = make(self._slice_forward, self._gather_cotangent)
        self._all_reduce = make(self._all_reduce_forward, self._unchanged_cotangent)
        self._overwrite = make(self._overwrite_forward, self._unchanged_cotangent)
        self._select = make(self._select_forward, self._selected_cotangent)
        self._multiply = make(self._multiply_forward, self._multiplied_cotangent)
        self._reduce_scatter = make(self._reduce_scatter_forward, self._gather_scattered_cotangent)
        self._all_to_all = make(self._all_to_all_forward, self._all_to_all_cotangent)
        self._to_partial = make(self._to_partial_forward, self._from_partial_cotangent)
        self._of_summand = make(self._of_summand_forward, self._to_partial_cotangent)
        self._copy = make(self._copy_forward, self._reduced_cotangent)
        self._convert_cotangent = make(self._alias_forward, self._converted_cotangent)

    # ------------------------------------------------------------ steps
    def run(self, x: Any, step: Step) -> Any:
        """Apply ``step`` to the local tensor ``x``."""
        source, target = step.source, step.target
        if isinstance(source, Shard):
            if isinstance(target, Shard):
                return self._all_to_all(x, step)
            return self.share(x, step, self.gather_data(x, step))
        if isinstance(source, Partial):
            if isinstance(target, Shard):
                return self._reduce_scatter(x, step)
            if source.reduce_op in ("sum", "avg"):
                return self._all_reduce(x, step)
            return self._multiply(x, step) if source.reduce_op == "product" else self._choose(x, step)
        return (self._slice if isinstance(target, Shard) else self._to_partial)(x, step)

    def _choose(self, x: Any, step: Step) -> Any:
        """From ``Partial("max")`` or ``("min")`` to ``Replicate()``."""
        counts: list[Any] = []
        y = self._select(x, step, getattr(x, "_ties", None), counts)
        if counts and step.layout is not None and any(p.is_partial() for p in step.layout.placements):
            y._ties = counts[0]  # there are more ranks to be compared
        return y

    def gather_data(self, x: Any, step: Step) -> Any:
        """The all-gathered data of a ``Shard -> Replicate`` step, outside autograd."""
        data = step.gather(self.platform.detach(x))
        return self._by_part(data, step.source, step.mesh.shape[step.mesh_dim])

    def share(self, x: Any, step: Step, data: Any) -> Any:
        """The gathered ``data`` as a function of the shard ``x``, for consumers that return the full cotangent."""
        return self._share_full(x, step, data) if self.platform.requires_grad(x) else data

    def share_partial(self, x: Any, step: Step, data: Any) -> Any:
        """As `share`, for consumers that return a partial cotangent: backward is one reduce-scatter."""
        return self._share_partial(x, step, data)

    def scatter_cotangent(self, g: Any, step: Step) -> Any:
        """The cotangent of the shard, of a partial cotangent of what ``step`` gathered."""
        return self._reduce_scatter(g, step.reversed)

    def gather_cotangent_of_sum(self, g: Any, step: Step) -> Any:
        """The cotangent of each summand, of that of the shard that ``step`` reduced and scattered."""
        full = self.gather_data(g, step.reversed)
        return self.share_partial(g, step.reversed, full) if self.platform.requires_grad(g) else full

    def copy(self, x: Any, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Any:
        """Identity whose backward all-reduces over ``mesh_dims``: Megatron's f."""
        return self._copy(x, mesh, mesh_dims)

    def parameter_view(self, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Callable[[Any], Any]:
        """`copy` as ``view(x)`` of a parameter, which `coalesce_gradients` may take part in; see
        `Platform.gradient_view`."""
        found = self._parameter_views.get((mesh, mesh_dims))
        if found is None:
            found = self._parameter_views[mesh, mesh_dims] = self._make_parameter_view(mesh, mesh_dims)
        return found

    def _make_parameter_view(self, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Callable[[Any], Any]:
        platform = self.platform
        reducers = [(collectives.bind_all_reduce(mesh, d), summation(mesh, d)) for d in mesh_dims]

        def reduce(x: Any, g: Any) -> Any:
            if platform.requires_grad(g):
                for _, step in reducers:
                    g = self._all_reduce(g, step)
                return g
            if BLOCKS and BLOCKS[-1].take(x, g, mesh, mesh_dims):
                return platform.zeros(platform.shape_of(g), g)
            g = platform.clone(g)
            for all_reduce, _ in reducers:
                g = all_reduce(g)
            return g

        return platform.gradient_view(reduce, (mesh, mesh_dims))

    def sum_new(self, mesh: DeviceMesh, mesh_dim: int) -> Callable[[Any], Any]:
        """`run` from ``Partial()`` to ``Replicate()`` as ``reduce(y)``, for a ``y`` that nobody else holds and whose
        operation does not need its value in backward: it is overwritten, and where the platform has hooks there is no
        node in the graph."""
        step, write = summation(mesh, mesh_dim), collectives.bind_all_reduce(mesh, mesh_dim)
        overwritten = (self.platform.fast or NOTHING_FASTER).overwriting(write, lambda g: self._for_summands(g, step))
        return overwritten or (lambda y: self._overwrite(y, step, write))

    def convert_cotangent(self, x: Any, convert: Any) -> Any:
        """Identity whose backward applies ``convert`` to the cotangent."""
        return self._convert_cotangent(x, convert)

    def to_owner(self, g: Any, layout: Layout) -> Any:
        """The gradient ``g`` of each rank's part of a tensor of ``layout``, for who reads it as a replicated tensor:
        what is computed from it is the same on all ranks, and counts once."""
        if layout.summed_mesh_dims and self.platform.requires_grad(g):
            for mesh_dim in layout.summed_mesh_dims:
                g = self._of_summand(g, summation(layout.mesh, mesh_dim))
        return g

    def to_summands(self, g: Any, layout: Layout) -> Any:
        """The other way round: ``g``, the same on all ranks, as the gradient of each rank's part, of which each rank
        makes something else."""
        if layout.summed_mesh_dims and self.platform.requires_grad(g):
            return self._copy(g, layout.mesh, layout.summed_mesh_dims)
        return g

    # ------------------------------------------------------------ forward and backward of each
    def _share_forward(self, ctx: Any, x: Any, step: Step, data: Any) -> Any:
        ctx.step = step
        return self.platform.detach(data)

    def _slice_cotangent(self, ctx: Any, g: Any) -> Any:
        return self._slice(g, ctx.step.reversed)

    def _scatter_cotangent(self, ctx: Any, g: Any) -> Any:
        return self.scatter_cotangent(g, ctx.step)

    def _slice_forward(self, ctx: Any, x: Any, step: Step) -> Any:
        ctx.step = step
        rank, sizes, x = step.mesh.get_local_rank(step.mesh_dim), step.target_sizes, self.platform.detach(x)
        if isinstance(step.target, PackedShard):
            return take_packed(x, step.target, rank, len(sizes), self.platform)
        return self.platform.clone(self.platform.narrow(x, step.target.dim, sum(sizes[:rank]), sizes[rank]))

    def _gather_cotangent(self, ctx: Any, g: Any) -> Any:
        step = ctx.step.reversed
        return self.share(g, step, self.gather_data(g, step))

    def _all_reduce_forward(self, ctx: Any, x: Any, step: Step) -> Any:
        ctx.step = step
        ctx.scale = step.mesh.shape[step.mesh_dim] if step.source.reduce_op == "avg" else None
        return collectives.all_reduce(
            self.platform.clone(self.platform.detach(x)), step.mesh, step.mesh_dim, step.source.reduce_op
        )

    def _overwrite_forward(self, ctx: Any, x: Any, step: Step, all_reduce: Callable[[Any], Any]) -> Any:
        ctx.step, ctx.scale = step, None
        return all_reduce(self.platform.detach(x))

    def _unchanged_cotangent(self, ctx: Any, g: Any) -> Any:
        g = self._for_summands(g, ctx.step)
        return g if ctx.scale is None else g / ctx.scale

    def _select_forward(self, ctx: Any, x: Any, step: Step, ties: Any, counts: list[Any]) -> Any:
        x = self.platform.detach(x)
        y = collectives.all_reduce_extreme(x, step.mesh, step.mesh_dim, step.source.reduce_op)
        if self.platform.is_floating_point(x):
            # Elements that tie share the cotangent evenly, as those of one tensor do in amax.
            if ties is None:
                ties = self.platform.ones(self.platform.shape_of(x), x)
            chosen = self.platform.masked_fill(ties, differs(x, y), 0.0)
            count = collectives.all_reduce(self.platform.clone(chosen), step.mesh, step.mesh_dim, "sum")
            ctx.step = step
            ctx.save_for_backward(chosen / count)
            counts.append(count)
        return y

    def _selected_cotangent(self, ctx: Any, g: Any) -> Any:
        return self._for_summands(g, ctx.step) * ctx.saved_tensors[0]

    def _multiply_forward(self, ctx: Any, x: Any, step: Step) -> Any:
        platform, size = self.platform, step.mesh.shape[step.mesh_dim]
        shape = tuple(platform.shape_of(x))
        column = platform.detach(x).reshape((1, *shape))
        everyone = collectives.all_gather(column, step.mesh, step.mesh_dim, 0, (1,) * size)
        parts = [platform.narrow(everyone, 0, i, 1).reshape(shape) for i in range(size)]
        others = platform.ones(shape, x)
        for i, part in enumerate(parts):
            if i != step.mesh.get_local_rank(step.mesh_dim):
                others = others * part
        ctx.save_for_backward(others)
        return others * parts[step.mesh.get_local_rank(step.mesh_dim)]

    def _multiplied_cotangent(self, ctx: Any, g: Any) -> Any:
        return g * ctx.saved_tensors[0]

    def _reduce_scatter_forward(self, ctx: Any, x: Any, step: Step) -> Any:
        ctx.step = step
        op = step.source.reduce_op if isinstance(step.source, Partial) else "sum"
        x = by_rank(self.platform.detach(x), step.target, step.mesh.shape[step.mesh_dim], self.platform)
        if op == "sum":
            return step.sum_and_scatter(x)
        return collectives.reduce_scatter(x, step.mesh, step.mesh_dim, step.target.dim, step.target_sizes, op)

    def _by_part(self, data: Any, source: Shard, size: int) -> Any:
        """What was gathered rank by rank, in the order of the whole tensor: the inverse of `by_rank`."""
        if not isinstance(source, PackedShard) or size == 1:
            return data
        pieces: list[tuple[int, int, int]] = []
        position = 0
        for rank in range(size):
            for start, length in packed_ranges(source, rank, size):
                pieces.append((start, position, length))
                position += length
        return self.platform.cat(
            [self.platform.narrow(data, source.dim, at, length) for _, at, length in sorted(pieces) if length],
            source.dim,
        )

    def _gather_scattered_cotangent(self, ctx: Any, g: Any) -> Any:
        full = self.gather_cotangent_of_sum(g, ctx.step)
        if isinstance(ctx.step.source, Partial) and ctx.step.source.reduce_op == "avg":
            return full / ctx.step.mesh.shape[ctx.step.mesh_dim]
        return full

    def _all_to_all_forward(self, ctx: Any, x: Any, step: Step) -> Any:
        ctx.step = step
        return collectives.all_to_all(
            self.platform.detach(x),
            step.mesh,
            step.mesh_dim,
            step.source.dim,
            step.target.dim,
            step.source_sizes,
            step.target_sizes,
        )

    def _all_to_all_cotangent(self, ctx: Any, g: Any) -> Any:
        return self._all_to_all(g, ctx.step.reversed)

    # A summand receives the full gradient, but what each rank then does with it is a part of the whole computation. So
    # the cotangent of that gradient, in gradients of gradients, is a partial sum: these two keep the books.
    def _for_summands(self, g: Any, step: Step) -> Any:
        """``g`` as the gradient of every rank's summand: to be reduced in the next backward."""
        return self._copy(g, step.mesh, (step.mesh_dim,)) if self.platform.requires_grad(g) else g

    def _of_summand_forward(self, ctx: Any, g: Any, step: Step) -> Any:
        ctx.step = step
        return self.platform.detach(g)

    def _to_partial_cotangent(self, ctx: Any, g: Any) -> Any:
        return self._to_partial(g, summation(ctx.step.mesh, ctx.step.mesh_dim).reversed)

    def _to_partial_forward(self, ctx: Any, x: Any, step: Step) -> Any:
        ctx.step = step
        x = self.platform.detach(x)
        if step.target.reduce_op != "sum" or step.mesh.get_local_rank(step.mesh_dim) == 0:
            return self.platform.clone(x)
        return self.platform.zeros(self.platform.shape_of(x), x)

    def _from_partial_cotangent(self, ctx: Any, g: Any) -> Any:
        if self.platform.requires_grad(g):
            g = self._of_summand(g, ctx.step)
        # A summand receives the full gradient. Of an average it receives 1/n of it, n equal copies make it whole.
        return g * ctx.step.mesh.shape[ctx.step.mesh_dim] if ctx.step.target.reduce_op == "avg" else g

    def _copy_forward(self, ctx: Any, x: Any, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Any:
        ctx.mesh, ctx.mesh_dims = mesh, mesh_dims
        return self.platform.detach(x)

    def _reduced_cotangent(self, ctx: Any, g: Any) -> Any:
        for mesh_dim in ctx.mesh_dims:
            g = self._all_reduce(g, summation(ctx.mesh, mesh_dim))
        return g

    def _alias_forward(self, ctx: Any, x: Any, convert: Any) -> Any:
        ctx.convert = convert
        return self.platform.detach(x)

    def _converted_cotangent(self, ctx: Any, g: Any) -> Any:
        return ctx.convert(g)


def take_packed(x: Any, placement: PackedShard, rank: int, size: int, platform: Platform) -> Any:
    """What ``rank`` of ``size`` ranks holds of the whole plain tensor ``x``: a new tensor."""
    ranges = packed_ranges(placement, rank, size)
    pieces = [platform.narrow(x, placement.dim, start, length) for start, length in ranges if length]
    if not pieces:
        return platform.clone(platform.narrow(x, placement.dim, 0, 0))
    return platform.cat(pieces, placement.dim) if len(pieces) > 1 else platform.clone(pieces[0])


def by_rank(x: Any, placement: Shard, size: int, platform: Platform) -> Any:
    """The whole plain tensor ``x`` with its elements in the order in which the ranks hold them, so that a collective
    can cut it at consecutive places."""
    if not isinstance(placement, PackedShard) or size == 1:
        return x
    pieces = [take_packed(x, placement, rank, size, platform) for rank in range(size)]
    return platform.cat([piece for piece in pieces if platform.shape_of(piece)[placement.dim]], placement.dim)


_SUMMATIONS: dict[tuple[DeviceMesh, int], Step] = Cache(1 << 12, "steps that sum")
_TRANSITIONS: dict[Any, Transitions] = {}


def summation(mesh: DeviceMesh, mesh_dim: int) -> Step:
    """The step from ``Partial()`` to ``Replicate()`` on a mesh dimension, made once."""
    found = _SUMMATIONS.get((mesh, mesh_dim))
    if found is None:
        found = _SUMMATIONS[mesh, mesh_dim] = Step(mesh, mesh_dim, Partial(), Replicate(), (), (), None)
    return found


def transitions_of(platform: Platform) -> Transitions:
    """The `Transitions` of a platform, made once."""
    found = _TRANSITIONS.get(platform)
    if found is None:
        found = _TRANSITIONS[platform] = Transitions(platform)
    return found
