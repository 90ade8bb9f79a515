"""Reading and writing by indices along a sharded dimension: each rank accesses the elements of its shard.

An element that another rank holds is read as zero, so that the results of all ranks can be summed. A write to such an
element goes to a spare row after the shard, and the spare row is dropped. So all ranks compute the same operations, and
shapes do not depend on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.communication.redistribute import redistribute_local
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.memory_order import UNKNOWN, strides_of
from hyper_parallel.core.layouts.placement_types import Partial
from hyper_parallel.core.layouts.strides import (
    indexed_strides,
    is_contiguous,
    spaced_strides,
)
from hyper_parallel.core.rules.labels import Labels, replaced
from hyper_parallel.core.rules.op_sharding import LocalCall
from hyper_parallel.platform.indexing import FULL_SLICE, Place


def whole_along(dims: Iterable[int]) -> Callable[[tuple], bool]:
    """Return the `OpSharding.native_if` of an operation that reads or writes operand 0 along ``dims``. This function
    returns whether every rank has all elements of these dimensions.
    """
    dims = tuple(dims)
    return lambda layouts: not any(layouts[0].shard_mesh_dims(dim) for dim in dims)


@dataclass(frozen=True)
class Taking:
    """Local call that reads elements by index tensors: ``native((x, *tensors), static_args)``. Elements of other ranks
    are zeros.

    Attributes:
        dims: (dimension of x, index of the tensor) for each index tensor.
        behind: number of result dimensions after those of the index tensors.
        signed: whether the native operation may reject negative indices.
    """

    dims: tuple[tuple[int, int], ...]
    behind: int
    signed: bool = False

    def take(self, call: LocalCall) -> Any:
        """Return the elements in this rank's shard.

        A rank without elements reads a filler element, so that the result stays connected to x in the graph.
        """
        platform = call.platform
        x, *tensors = call.operands
        layout = call.operand_layouts[0]
        absent: Any = None
        for dim, number in self.dims:
            if not layout.shard_mesh_dims(dim):
                continue
            size = layout.local_shape[dim]
            places, elsewhere, is_negative, unknown = _places(platform, tensors[number], layout, dim)
            if size == 0:
                # A filler element keeps x in the graph, because backward may communicate.
                x, size = _between_zeros(platform, x, dim, 0, 1), 1
            places = platform.masked_fill(places, elsewhere, 0)
            if self.signed:
                places = _either(platform, is_negative, places - size, places)
            # An index that is out of range globally stays out of range, so that the native operation can reject it.
            tensors[number] = platform.masked_fill(places, unknown, size + 1)
            absent = elsewhere if absent is None else absent | elsewhere
        found = call.native((x, *tensors), call.static_args)
        return platform.masked_fill(found, absent.reshape((*platform.shape_of(absent), *(1,) * self.behind)), 0)


@dataclass(frozen=True)
class Writing:
    """Local call that writes elements by index tensors: ``native((x, value, *tensors), static_args)``.

    Attributes:
        dims: (dimension of x, index of the tensor) for each index tensor.
        in_place: whether x is written in place.
    """

    dims: tuple[tuple[int, int], ...]
    in_place: bool

    def write(self, call: LocalCall) -> Any:
        """Write the elements of this rank's shard.

        A rank without elements writes to a spare row. So the value stays connected to the result in the graph.
        """
        platform = call.platform
        x, value, *tensors = call.operands
        layout, new = call.operand_layouts[0], x
        cut = [(dim, number) for dim, number in self.dims if layout.shard_mesh_dims(dim)]
        for dim, number in cut:
            new = _between_zeros(platform, new, dim, 0, 1)
            places, elsewhere, _, unknown = _places(platform, tensors[number], layout, dim)
            places = platform.masked_fill(places, elsewhere, layout.local_shape[dim])
            tensors[number] = platform.masked_fill(places, unknown, layout.local_shape[dim] + 1)
        new = call.native((new, value, *tensors), call.static_args)
        for dim, _ in cut:
            new = platform.narrow(new, dim, 0, layout.local_shape[dim])
        return (
            call.native((x, new), ((Ellipsis,), *call.static_args[1:])) if self.in_place else platform.contiguous(new)
        )


@dataclass(frozen=True)
class Cut:
    """Local call that reads or writes elements selected by ints and slices. The selection may cut through shards.

    Attributes:
        ranges: for each dimension of x, the selected global indices.
        dims: dimensions of x of which only some elements are selected.
        kept: for each dimension of ``x[index]``, the dimension of x, or None for a new dimension.
    """

    ranges: tuple[range, ...]
    dims: tuple[int, ...]
    kept: tuple[int | None, ...]

    @staticmethod
    def of(region: tuple[Place, ...], labels: Labels) -> Cut | None:
        """Return the `Cut` for a region of x, or None if no dimension is cut or a step is negative. ``labels`` are the
        labels of x, with None for cut dimensions.
        """
        dims = tuple(dim for dim, label in enumerate(labels) if label is None)
        ranges = [place.picked for place in region if place.dim is not None]
        if not dims or any(picked is None or picked.step < 1 for picked in ranges):
            return None  # the native operation raises the error for an int that is out of range
        kept = tuple(place.dim for place in region if place.dim is None or place.is_slice)
        return Cut(tuple(ranges), dims, kept)  # type: ignore[arg-type]

    def write(self, call: LocalCall) -> Any:
        """Write the elements of this rank's shard. A rank without elements writes an empty slice, so that the value
        stays in the graph."""
        x, value = call.operands[:2]
        layout = call.operand_layouts[0]
        if call.operand_layouts[1] is not None:
            value = value.reshape(self._shape_for_x(tuple(value.shape)))
        index: list[tuple] = []
        for dim, picked in enumerate(self.ranges):
            if not layout.shard_mesh_dims(dim):
                index.append(("slice", picked.start, picked.stop, picked.step))
                continue
            if dim not in self.dims:
                index.append(FULL_SLICE)
                continue
            first, last = self._own(layout, dim)
            if call.operand_layouts[1] is not None and value.shape[dim] == len(picked) != last - first:
                value = call.platform.narrow(value, dim, first, last - first)
            index.append(self._own_slice(layout, dim))
        return call.native((x, value, *call.operands[2:]), (tuple(index), *call.static_args[1:]))

    def take(self, call: LocalCall) -> Any:
        """Return ``x[index]``, replicated over the ranks that share the cut dimensions.

        Each rank pads its selected elements with zeros, and the results are summed over ranks. The result has the
        strides of the single device's view.
        """
        platform = call.platform
        (x,), layout, result = call.operands, call.operand_layouts[0], call.result_layouts[0]
        strides = strides_of(x, layout)
        cut = [dim for dim in self.dims if layout.shard_mesh_dims(dim)]
        own = {dim: self._own(layout, dim) for dim in cut}
        without = [dim for dim, (first, last) in own.items() if first == last]
        for dim in without:
            if layout.local_shape[dim] == 0:
                x = _between_zeros(platform, x, dim, 0, 1)
        index = tuple(
            ("slice", 0, 1, None)  # a filler element keeps x in the graph, because backward may communicate
            if dim in without
            else self._own_slice(layout, dim)
            if dim in cut
            else FULL_SLICE
            if layout.shard_mesh_dims(dim)
            else ("slice", picked.start, picked.stop, picked.step)
            for dim, picked in enumerate(self.ranges)
        )
        y = call.native((x,), (index, *call.static_args[1:]))
        sizes = platform.shape_of(y)
        shape = tuple(1 if dim is None else sizes[dim] for dim in self.kept)
        y = y if shape == sizes else y.reshape(shape)
        for at, kept in enumerate(self.kept):
            if kept in own:
                first, last = (0, 1) if kept in without else own[kept]
                y = _between_zeros(platform, y, at, first, len(self.ranges[kept]) - last)
        if without:  # at the end, because MindSpore loses gradients of gradients through views of computed values
            y = platform.masked_fill(y, platform.zeros((1,) * result.ndim, y) == 0, 0)
        split = {mesh_dim for dim in cut for mesh_dim in layout.shard_mesh_dims(dim)}
        parts = (Partial() if mesh_dim in split else p for mesh_dim, p in enumerate(result.placements))
        y = redistribute_local(y, result.with_placements(tuple(parts)), result)
        if strides is UNKNOWN:
            return y
        strides = indexed_strides(layout.shape, strides, call.static_args[0])
        behind = platform.copies_offsets and any(picked.start for picked in self.ranges)
        if is_contiguous(result.shape, strides) and not behind:
            return y
        return platform.with_strides(y, spaced_strides(result.shape, strides, result.local_shape), behind)

    def _own(self, layout: Layout, dim: int) -> tuple[int, int]:
        """Return (first, last) of this rank's range among the selected elements along a cut dimension."""
        picked, start = self.ranges[dim], layout.local_offset[dim]
        first, last = (
            min(max(-(-(edge - picked.start) // picked.step), 0), len(picked))
            for edge in (start, start + layout.local_shape[dim])
        )
        return first, last

    def _own_slice(self, layout: Layout, dim: int) -> tuple:
        """Return the selected elements of this rank as a slice of its shard of x."""
        first, last = self._own(layout, dim)
        own = self.ranges[dim][first:last]
        begin = own.start - layout.local_offset[dim] if own else 0
        return ("slice", begin, begin + (own[-1] - own.start + 1 if own else 0), own.step)

    def _shape_for_x(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the value, extended to one dimension for each dimension of x."""
        sizes = [1] * len(self.ranges)
        for dim, size in zip(reversed(self.kept), reversed(shape), strict=False):
            if dim is not None:
                sizes[dim] = size
        return tuple(sizes)


def _between_zeros(platform: Any, x: Any, dim: int, before: int, after: int) -> Any:
    """Return ``x`` with ``before`` and ``after`` zeros added along a dimension."""
    shape = platform.shape_of(x)
    first, last = ([platform.zeros(replaced(shape, dim, n), x)] if n else [] for n in (before, after))
    return platform.cat([*first, x, *last], dim) if first or last else x


def _places(platform: Any, index: Any, layout: Layout, dim: int) -> tuple[Any, Any, Any, Any]:
    """Return local positions and masks for an index tensor along a sharded dimension.

    The masks mark elements outside of this rank's shard, negative indices, and indices that are out of range globally.
    """
    size, whole = layout.local_shape[dim], layout.shape[dim]
    is_negative = index < 0
    index = _either(platform, is_negative, index + whole, index)
    places = index - layout.local_offset[dim]
    return places, (places < 0) | (places >= size), is_negative, (index < 0) | (index >= whole)


def _either(platform: Any, where: Any, x: Any, y: Any) -> Any:
    """Return ``x`` where the mask ``where`` is true, else ``y``, for integer tensors."""
    return platform.masked_fill(y, where, 0) + platform.masked_fill(x, where == False, 0)  # noqa: E712
