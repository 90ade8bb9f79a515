"""Selection of elements by their values: elements where a mask is true, nonzero elements, or unique elements.

Each rank selects from its shard, for any sharding. The ranks exchange their counts, so that the total is known. Then
only the selected elements are gathered, and every rank has the result (see `rules.picks`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.rules.labels import Labels, axis, broadcast, named, whole
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding
from hyper_parallel.core.rules.picks import Picks
from hyper_parallel.core.rules.registry import rule


def _common(layouts: tuple, operands: tuple, labels: Labels, shape: tuple[int, ...]) -> Layout:
    """Return the layout of a tensor with ``labels`` and ``shape``, sharded like operands with these labels and
    ``layouts``."""
    mesh = next(layout.mesh for layout in layouts if layout is not None)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for layout, own in zip(layouts, operands, strict=True):
        for mesh_dim, placement in enumerate(layout.placements):
            if isinstance(placement, Shard) and own[placement.dim] in labels:
                placements[mesh_dim] = placement.with_dim(labels.index(own[placement.dim]))
    return get_layout(mesh, tuple(placements), shape)


def _is_cut(layout: Layout) -> bool:
    return any(isinstance(p, Shard) and n > 1 for p, n in zip(layout.placements, layout.mesh.shape, strict=True))


def _by_mask(shape: tuple, labels: Labels, operands: tuple, results: Labels, sizes: tuple) -> OpSharding:
    """Return the sharding for an operation that selects elements, or rows, of operand 0 by a mask, operand 1.

    Args:
        shape, labels: shape and labels of the tensor to select from: both operands, broadcast.
        operands: labels of the operands.
        results: labels of the result.
        sizes: sizes of the result, None for the first.
    """

    def run(call: LocalCall) -> Any:
        picked = call.run()
        common = _common(call.operand_layouts, operands, labels, shape)
        if not _is_cut(common):
            return picked
        return Picks(common, call.operands[1], call.platform.shape_of(picked)[0], lambda: call.operands[1]).gathered(
            picked
        )

    return OpSharding(
        operands=operands,
        results=(results,),
        result_shapes=(sizes,),
        terms=((0,),),
        combined=labels,
        call=run,
        native_if=lambda layouts: not _is_cut(_common(layouts, operands, labels, shape)),
    )


@rule("masked_select", "x mask")
def masked_select(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Elements where a mask is true, in one dimension. Both operands broadcast."""
    together = broadcast(shapes)
    if together is None:
        return None
    shape, labels, operands = together
    return _by_mask(shape, labels, operands, (None,), (None,))


def rows_at_mask(shapes: tuple) -> OpSharding | None:
    """Return the sharding for ``x[mask]`` with a mask over the first dimensions of x, which become one dimension. All
    other dimensions stay sharded."""
    x, mask = shapes
    count = len(mask)
    if tuple(x[:count]) != tuple(mask) or not count:
        return None
    labels = named(x)
    taken, kept = labels[:count], labels[count:]
    return _by_mask(tuple(mask), taken, (labels, taken), (None, *kept), (None, *x[count:]))


@rule("masked_scatter", "x mask source")
def masked_scatter(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Copy of x with consecutive elements of the source at the positions of the mask. x and the mask broadcast.

    Each rank has the full source, and reads its elements after those of the preceding ranks.
    """
    x, mask, source = shapes
    together = broadcast((x, mask))
    if together is None:
        return None
    shape, labels, operands = together

    def run(call: LocalCall) -> Any:
        picks = Picks(
            _common(call.operand_layouts[:2], operands, labels, shape), call.operands[1], None, lambda: call.operands[1]
        )
        available = math.prod(source)
        if picks.total > available:
            raise ValueError(
                f"masked_scatter: the mask selects {picks.total} elements, but the source has {available} elements"
            )
        own, values = picks.own, call.operands[2].reshape((available,))
        if not len(own) or own[-1] - own[0] == len(own) - 1:
            part = call.platform.narrow(values, 0, int(own[0]) if len(own) else 0, len(own))
        else:
            part = values[call.platform.places(own, values)]
        return call.native((call.operands[0], call.operands[1], part), call.static_args)

    return OpSharding(
        operands=(*operands, (None,) * len(source)),
        results=(labels,),
        result_shapes=(shape,),
        terms=((0,), (2,)),
        call=run,
        native_if=lambda layouts: not _is_cut(_common(layouts[:2], operands, labels, shape)),
    )


@rule("nonzero")
def nonzero(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Positions of nonzero elements, as rows of indices."""
    x, labels = tuple(shapes[0]), named(shapes[0])

    def run(call: LocalCall) -> Any:
        rows = call.run()
        if any(call.operand_layouts[0].local_offset):
            rows = rows + call.platform.places(np.array([call.operand_layouts[0].local_offset]), rows)
        return Picks(
            call.operand_layouts[0], rows, call.platform.shape_of(rows)[0], lambda: call.operands[0] != 0
        ).gathered(rows)

    return OpSharding(
        operands=(labels,),
        results=((None, None),),
        result_shapes=((None, len(x)),),
        combined=labels,
        call=run,
        native_if=lambda layouts: not _is_cut(layouts[0]),
    )


def _differing(x: tuple, labels: Labels, static_args: tuple) -> OpSharding:
    """Return the sharding for operations that select unique elements, or unique slices along a dimension.

    Such an operation may also return the counts, and the index of each element among the unique elements. Each rank
    first selects from its shard. Then the results of all ranks are compared, because several ranks may find equal
    elements.
    """
    dim, with_places, with_counts = static_args[:3]
    along = 0 if dim is None else axis(dim, len(x))
    found = (None,) if dim is None else whole(named(x), range(len(x)))
    size = (None,) if dim is None else (*x[:along], None, *x[along + 1 :])
    places = [(labels, x) if dim is None else ((labels[along],), (x[along],))] if with_places else []
    results = [(found, size), *places, *([((None,), (None,))] if with_counts else [])]

    def run(call: LocalCall) -> Any:
        platform = call.platform
        local = _several(call.run())
        picks = Picks(call.operand_layouts[0], call.operands[0], platform.shape_of(local[0])[along], None)
        again = (dim, with_places or with_counts, False, *call.static_args[3:])
        values, *where = _several(call.native((picks.gathered(local[0], along),), again))
        results = [values]
        if with_places:
            own = picks.own
            results.append(platform.narrow(where[0], 0, int(own[0]), len(own))[local[1]] if len(own) else local[1])
        if with_counts:
            counts = picks.gathered(local[-1])
            zeros = platform.zeros((platform.shape_of(values)[along],), counts)
            results.append(platform.scatter_add(zeros, 0, where[0], counts))
        return tuple(results) if len(results) > 1 else values

    return OpSharding(
        operands=(labels,),
        results=tuple(labels for labels, _ in results),
        result_shapes=tuple(shape for _, shape in results),
        combined=tuple(label for label in labels if label is not None),
        call=run,
        native_if=lambda layouts: not _is_cut(layouts[0]),
    )


def _several(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


_DIFFERING = "x | dim=None places=False counts=False"


@rule("unique", _DIFFERING)
def unique(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Unique elements in ascending order, or unique slices along a dimension. The other dimensions are unsharded."""
    x, dim = tuple(shapes[0]), static_args[0]
    labels = named(x)
    if dim is not None:
        labels = whole(labels, set(range(len(x))) - {axis(dim, len(x))})
    return _differing(x, labels, static_args)


@rule("unique_in_order", _DIFFERING)
def unique_in_order(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Elements that differ from the previous one, or from all previous ones, in order.

    All dimensions are unsharded, except the one along which elements are compared.
    """
    x = tuple(shapes[0])
    along = axis(static_args[0] or 0, len(x))
    return _differing(x, whole(named(x), set(range(len(x))) - {along}), static_args)
