"""The solver between `rules` and `dispatch`: it computes the layout of each operand from a rule's result.

For each mesh dimension, it compares the possible shardings, and chooses the one that moves the least data. The choices
are replicated operands, one sharded label, or partial sums that stay partial in a sum of products.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.communication.redistribute import redistribution_cost
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.layouts.cuts import cut_order
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import PackedShard, Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.rules.op_sharding import Label, OpSharding


@dataclass(frozen=True)
class Unsized:
    """Layout of a result whose size follows from the data.

    Attributes:
        mesh, placements: as in `Layout`.
        shape: global shape, with None for unsharded dimensions whose size follows from the data.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int | None, ...]

    def sized(self, local_shape: tuple[int, ...]) -> Layout:
        """Return the layout of a result whose local shape on this rank is ``local_shape``."""
        sizes = zip(self.shape, local_shape, strict=True)
        return get_layout(self.mesh, self.placements, tuple(here if size is None else size for size, here in sizes))


@dataclass(frozen=True)
class Strategy:
    """Layouts of the operands and results of an operation.

    Attributes:
        operands: the layout that each operand is read with, None for an operand that is not a tensor.
        partial_grad_dims: for each operand, the mesh dimensions over which its gradient is partial. The operand is read
            through `partial_grad_view` on them.
        results: the layout of each result, or `Unsized`.
    """

    operands: tuple[Layout | None, ...]
    partial_grad_dims: tuple[tuple[int, ...], ...]
    results: tuple[Any, ...]


@dataclass(frozen=True)
class _Choice:
    """A possible sharding of the operation on one mesh dimension.

    ``label`` is sharded as ``shard``; with None, no label is sharded. With ``splits``, ranks compute different parts of
    the result, so their gradients of replicated operands are partial.
    """

    operands: tuple[Placement | None, ...]
    results: tuple[Placement, ...]
    label: Label | None = None
    shard: Shard | None = None
    splits: bool = True

    @property
    def packed(self) -> bool:
        return isinstance(self.shard, PackedShard)


def solve(
    sharding: OpSharding,
    layouts: tuple[Layout | None, ...],
    mesh: DeviceMesh,
    pinned: int | None = None,
    packed: bool = True,
) -> Strategy | None:
    """Return the cheapest strategy for an operation.

    Args:
        sharding: result of the rule.
        layouts: current layouts of the operands; a promoted plain tensor counts as replicated.
        mesh: the mesh of all operands.
        pinned: index of an operand that is written in place and must keep its layout.
        packed: whether operands may be read as packed shards.

    Returns:
        The strategy, or None when ``pinned`` cannot keep its layout.
    """
    # If the values of an operand are not read, it need not be reduced first.
    layouts = tuple(
        layout.cotangent if i in sharding.unread and layout is not None else layout for i, layout in enumerate(layouts)
    )
    # A special order of splits is kept only if the label keeps all of its splits. Otherwise the natural order is used.
    natural: set[Label] = set()
    while True:
        chosen = _choose(sharding, layouts, mesh, pinned, natural, packed)
        if chosen is None:
            return None
        misfits = _without_order(chosen, mesh)
        if not misfits:
            break
        natural |= misfits
    operands = tuple(
        None if layout is None else layout.with_placements(tuple(c.operands[i] or Replicate() for c in chosen))
        for i, layout in enumerate(layouts)
    )
    is_native = sharding.call is None or (sharding.native_if is not None and sharding.native_if(operands))
    if not is_native and any(c.packed for c in chosen):
        # A replacement of the local call may need the start index of the shard, which packed shards do not have.
        return solve(sharding, layouts, mesh, pinned, packed=False)
    partial = tuple(
        ()
        if i in sharding.unread
        else tuple(d for d, c in enumerate(chosen) if c.splits and c.operands[i] is Replicate() and mesh.shape[d] > 1)
        for i in range(len(layouts))
    )
    results = tuple(
        (Unsized if None in shape else get_layout)(mesh, tuple(c.results[i] for c in chosen), shape)
        for i, shape in enumerate(sharding.result_shapes)
    )
    return Strategy(operands, partial, results)


def _choose(
    sharding: OpSharding,
    layouts: tuple[Layout | None, ...],
    mesh: DeviceMesh,
    pinned: int | None,
    natural: set[Label],
    packed: bool,
) -> list[_Choice] | None:
    """Return the cheapest choice for each mesh dimension. The labels ``natural`` must be split in the natural order."""
    kept = None if pinned is None else layouts[pinned]
    shards_of_label: dict[Label, int] = {}
    chosen: list[_Choice] = []
    for mesh_dim in range(mesh.ndim):
        choices = [
            c
            for c in _choices(sharding, layouts, mesh_dim, mesh.shape[mesh_dim], natural)
            if _can_split(sharding, layouts, c, shards_of_label.get(c.label, 1) * mesh.shape[mesh_dim])
            and all(_go_together(c, other, natural) for other in chosen)
            and (packed or not c.packed)
            and (kept is None or c.operands[pinned or 0] is c.results[0] is kept.placements[mesh_dim])
        ]
        if not choices:
            return None
        best = min(choices, key=lambda c: _cost(c, layouts, mesh_dim))
        chosen.append(best)
        if best.label is not None:
            shards_of_label[best.label] = shards_of_label.get(best.label, 1) * mesh.shape[mesh_dim]
    return chosen


def _go_together(one: _Choice, other: _Choice, natural: set[Label]) -> bool:
    """Return whether two mesh dimensions can use these choices together.

    At most one of the two choices may be packed. The other choice may shard the same label further, unless the
    operation separates the packed parts (``natural``).
    """
    packed, rest = (one, other) if one.packed else (other, one)
    if not packed.packed:
        return True
    cut_twice = any(
        isinstance(p, Shard) and q is not None and q.is_shard(p.dim)
        for p, q in zip(packed.operands, rest.operands, strict=True)
    )
    return not rest.packed and not (cut_twice and (packed.label != rest.label or packed.label in natural))


def _without_order(chosen: list[_Choice], mesh: DeviceMesh) -> set[Label]:
    """Return the labels whose splits contradict each other in order."""
    found: set[Label] = set()
    for label in {c.label for c in chosen if c.label is not None}:
        placements = tuple(c.shard if c.shard and c.label == label else Replicate() for c in chosen)
        if cut_order(placements, mesh.shape, 0) is None:
            found.add(label)
    return found


def _choices(
    sharding: OpSharding, layouts: tuple[Layout | None, ...], mesh_dim: int, mesh_size: int, natural: set[Label]
) -> list[_Choice]:
    replicated = tuple(None if labels is None else Replicate() for labels in sharding.operands)
    choices = [
        _Choice(replicated, (Replicate(),) * len(sharding.results), splits=False),
        *(_listed(sharding, layouts, mesh_dim, i) for i in range(len(sharding.choices))),
        *(_sharded(sharding, label, shard) for label, shard in _sharded_labels(sharding, layouts, mesh_dim, natural)),
        _unpacked(sharding, layouts, mesh_dim, mesh_size),
        *(_partial(sharding, layouts, mesh_dim, reduce_op) for reduce_op in ("sum", "avg")),
    ]
    return [choice for choice in choices if choice is not None]


def _listed(sharding: OpSharding, layouts: tuple[Layout | None, ...], mesh_dim: int, i: int) -> _Choice | None:
    """Return entry ``i`` of `OpSharding.choices` as a choice, or None if it is not applicable.

    At least one operand must already have the sharded or partial placement of the choice. Sizes of all sharded
    dimensions must be equal, or divisible by the number of ranks. No operand is converted to a partial sum.
    """
    operands, results = sharding.choices[i]
    operands = tuple(
        p.with_dim(p.dim % layout.ndim) if isinstance(p, Shard) and layout is not None else p
        for p, layout in zip(operands, layouts, strict=True)
    )
    have = [
        layout is not None and layout.placements[mesh_dim] is p for p, layout in zip(operands, layouts, strict=True)
    ]
    if any(isinstance(p, Partial) and not lies_so for p, lies_so in zip(operands, have, strict=True)):
        return None
    if not any(lies_so and p is not Replicate() for p, lies_so in zip(operands, have, strict=True)):
        return None
    shapes = (*(None if layout is None else layout.shape for layout in layouts), *sharding.result_shapes)
    sizes = {
        s[p.dim % len(s)] for p, s in zip((*operands, *results), shapes, strict=True) if s and isinstance(p, Shard)
    }
    ranks = next(layout.mesh.size() for layout in layouts if layout is not None)
    if len(sizes) > 1 and any(size % ranks for size in sizes):
        return None
    made = zip(results, sharding.result_shapes, strict=True)
    whole = all(p is Replicate() for p in (*operands, *results))
    return _Choice(
        operands,
        tuple(p.with_dim(p.dim % len(s)) if isinstance(p, Shard) else p for p, s in made),
        None if whole else ("listed", i),
        splits=not whole,
    )


def _sharded_labels(
    sharding: OpSharding, layouts: tuple[Layout | None, ...], mesh_dim: int, natural: set[Label]
) -> list[tuple[Label, Shard]]:
    """Return (label, `Shard` type) for each label that is sharded in some operand.

    The type includes packed sizes and strides; its dimension is 0.
    """
    found: list[tuple[Label, Shard]] = []
    for labels, layout in zip(sharding.operands, layouts, strict=True):
        if labels is not None and layout is not None and isinstance(p := layout.placements[mesh_dim], Shard):
            label = labels[p.dim]
            shard = Shard(0) if label in natural and isinstance(p, StridedShard) else p.with_dim(0)
            if label is not None and (label, shard) not in found:
                found.append((label, shard))
    return found


def _unpacked(sharding: OpSharding, layouts: tuple[Layout | None, ...], mesh_dim: int, size: int) -> _Choice | None:
    """Return a choice that separates packed shards: each part is sharded along a dimension of a result."""
    packed = layouts[0].placements[mesh_dim] if layouts and layouts[0] is not None else None
    for dim, sizes, result_dim in sharding.unpack:
        if packed is PackedShard(dim, sizes):
            after = tuple(shape[result_dim] for shape in sharding.result_shapes)
            if sizes == after or all(n % size == 0 for n in (*sizes, *after)):
                results = (Shard(result_dim),) * len(after)
                return _Choice((packed,), results, ("unpacked", dim), packed.with_dim(0))
    return None


def _sharded(sharding: OpSharding, label: Label, shard: Shard) -> _Choice | None:
    to_partial: set[int] = set()
    results: tuple[Placement, ...]
    if all(label in labels for labels in sharding.results):
        results = tuple(shard.with_dim(labels.index(label)) for labels in sharding.results)
    else:  # the label is contracted
        called = sharding.reduce == "call" or label in sharding.combined
        if not called and (sharding.reduce is None or any(label in labels for labels in sharding.results)):
            return None
        # In a sum of split products, an unsplit term must count once, so it becomes Partial.
        split = [any(label in (sharding.operands[i] or ()) for i in term) for term in sharding.terms]
        to_partial = {t[0] for t, is_split in zip(sharding.terms, split, strict=True) if not (is_split or called)}
        contracted = Replicate() if called else Partial(sharding.reduce or "sum")
        results = tuple(shard.with_dim(own.index(label)) if label in own else contracted for own in sharding.results)
    operands = tuple(
        None
        if labels is None
        else shard.with_dim(labels.index(label))
        if label in labels
        else Partial()
        if i in to_partial
        else Replicate()
        for i, labels in enumerate(sharding.operands)
    )
    return _Choice(operands, results, label, shard)


def _partial(sharding: OpSharding, layouts: tuple[Layout | None, ...], mesh_dim: int, reduce_op: str) -> _Choice | None:
    kind = Partial(reduce_op)
    have = [layout is not None and layout.placements[mesh_dim] is kind for layout in layouts]
    if not sharding.terms or not any(have[i] for term in sharding.terms for i in term):
        return None
    # If several factors of a product are partial, all but one must be reduced. The largest one stays partial.
    sizes = [0 if layout is None else math.prod(layout.shape) for layout in layouts]
    summands = {max((i for i in term if have[i]), key=sizes.__getitem__, default=term[0]) for term in sharding.terms}
    operands = tuple(
        None if labels is None else kind if i in summands else Replicate() for i, labels in enumerate(sharding.operands)
    )
    return _Choice(operands, (kind,) * len(sharding.results))


def _can_split(sharding: OpSharding, layouts: tuple[Layout | None, ...], choice: _Choice, shards: int) -> bool:
    """Return whether the dimensions of a label, which may differ in size, are split at the same positions.

    Every rank must also get an element if the operation requires one.
    """
    label = choice.label
    if label is None:
        return True
    shapes = (*(None if x is None else x.shape for x in layouts), *sharding.result_shapes)
    sizes = [
        size
        for labels, shape in zip((*sharding.operands, *sharding.results), shapes, strict=True)
        if labels is not None and shape is not None
        for own, size in zip(labels, shape, strict=True)
        if own == label
    ]
    if not choice.packed:
        if label in sharding.nonempty and any(0 in chunk_sizes(size, shards) for size in sizes):
            return False
        whole_units = [number for own, number in sharding.units if own == label]
        return len({*sizes, *whole_units}) == 1 or all(size % shards == 0 for size in (*sizes, *whole_units))
    return len(set(sizes)) <= 1 and label not in sharding.nonempty and label not in sharding.filled


def _cost(choice: _Choice, layouts: tuple[Layout | None, ...], mesh_dim: int) -> tuple[float, float]:
    moved = 0.0
    for placement, layout in zip(choice.operands, layouts, strict=True):
        if layout is not None and placement is not None and placement is not layout.placements[mesh_dim]:
            # Cost on this mesh dimension alone. The cost on other mesh dimensions does not depend on this choice.
            before, after = _alone(layout, mesh_dim, layout.placements[mesh_dim]), _alone(layout, mesh_dim, placement)
            # A change of the split order requires a full tensor in between.
            between = [before, _alone(layout, mesh_dim, Replicate()), after] if before is after else [before, after]
            try:
                moved += sum(itertools.starmap(redistribution_cost, itertools.pairwise(between)))
            except ValueError:
                return (math.inf, 0.0)
    # Of equal costs, prefer the choice that computes less.
    return (moved, 0.0 if choice.label is not None else 1.0)


def _alone(layout: Layout, mesh_dim: int, placement: Placement) -> Layout:
    """Return the layout with this placement on one mesh dimension and `Replicate` on the others."""
    if isinstance(placement, StridedShard):
        placement = Shard(placement.dim)
    placements: list[Placement] = [Replicate()] * layout.mesh.ndim
    placements[mesh_dim] = placement
    return layout.with_placements(placements)
