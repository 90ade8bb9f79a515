"""Index tensors into a dimension of which each rank has a part: it takes, or writes, what lies there.

What is taken elsewhere counts as zero, so that the results of all ranks add up. What is written elsewhere goes to a
spare row behind the part, which is dropped. Either way all ranks compute the same, and the shapes do not depend on the
data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.layouts.layout import Layout
from hyper_parallel.core.dtensor.operations.rules.labels import replaced


def take(
    platform: Any, native: Any, operands: tuple, static_args: Any, layout: Layout, dim: int, along: int | None = None
) -> Any:
    """``native((x, index), static_args)`` for an x of ``layout``, of which ``dim`` is sharded: with zeros for what this
    rank does not have.

    Args:
        along: the dimension of the result along which a 1-D index runs; None for an index of the result's shape.
    """
    x, index = operands
    size = layout.local_shape[dim]
    places, elsewhere, is_negative, unknown = _places(platform, index, layout, dim)
    if size == 0:
        # An element to take, which keeps the result connected to x: its backward may communicate.
        x, size = platform.cat([x, platform.zeros(replaced(platform.shape_of(x), dim, 1), x)], dim), 1
    places = platform.masked_fill(places, elsewhere, 0)
    # What counts from the end still does, and what no rank has stays out of range: the native operation may refuse it.
    places = _either(platform, is_negative, places - size, places)
    places = platform.masked_fill(places, unknown, size + 1)
    found = native((x, places), static_args)
    if along is not None:
        elsewhere = elsewhere.reshape([-1 if d == along else 1 for d in range(len(layout.shape))])
    return platform.masked_fill(found, elsewhere, 0)


@dataclass(frozen=True)
class Writing:
    """A write to places that index tensors name: ``native((x, value, *tensors), static_args)``.

    Attributes:
        dims: the dimension of x and the number of the tensor, for each.
        in_place: whether x is written.
    """

    dims: tuple[tuple[int, int], ...]
    in_place: bool

    def is_whole(self, layouts: tuple) -> bool:
        """Whether every rank has all of the dimensions along which index tensors run."""
        return not any(layouts[0].shard_mesh_dims(dim) for dim, _ in self.dims)

    def write(
        self,
        platform: Any,
        native: Any,
        operands: tuple,
        static_args: tuple,
        operand_layouts: tuple,
        result_layouts: tuple,
    ) -> Any:
        """Write what goes to this rank's part, be it nothing: the value stays part of the graph on every rank."""
        x, value, *tensors = operands
        layout, new = operand_layouts[0], x
        cut = [(dim, number) for dim, number in self.dims if layout.shard_mesh_dims(dim)]
        for dim, number in cut:
            new = platform.cat([new, platform.zeros(replaced(platform.shape_of(new), dim, 1), new)], dim)
            places, elsewhere, _, unknown = _places(platform, tensors[number], layout, dim)
            places = platform.masked_fill(places, elsewhere, layout.local_shape[dim])
            tensors[number] = platform.masked_fill(places, unknown, layout.local_shape[dim] + 1)
        new = native((new, value, *tensors), static_args)
        for dim, _ in cut:
            new = platform.narrow(new, dim, 0, layout.local_shape[dim])
        return native((x, new), ((Ellipsis,), *static_args[1:])) if self.in_place else platform.contiguous(new)


def _places(platform: Any, index: Any, layout: Layout, dim: int) -> tuple[Any, Any, Any, Any]:
    """Of an index into a sharded dimension: places in this rank's part; what does not lie there; what counts from the
    end; what no rank has."""
    size, whole = layout.local_shape[dim], layout.shape[dim]
    is_negative = index < 0
    index = _either(platform, is_negative, index + whole, index)
    places = index - layout.local_offset[dim]
    return places, (places < 0) | (places >= size), is_negative, (index < 0) | (index >= whole)


def _either(platform: Any, where: Any, x: Any, y: Any) -> Any:
    """Whole numbers ``x`` where that is true, else ``y``."""
    return platform.masked_fill(y, where, 0) + platform.masked_fill(x, where == False, 0)  # noqa: E712
