"""Indices of ``x[index]`` as hashable keys for cached plans, and as regions of a tensor.

An index is encoded as a tuple with one entry per item. Ints, None and ``Ellipsis`` stay. Other items become ``("slice",
start, stop, step)``, ``("bool", value)``, or ``("tensor", i, ndim, is_bool)``, the i-th tensor among the operands.
`region_of` returns the dimension and range of each item. This module names no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

__all__ = ["FULL_SLICE", "Place", "decode_index", "encode_index", "has_empty_slice", "region_of"]

#: ``:`` in an encoded index.
FULL_SLICE = ("slice", None, None, None)


def encode_index(index: Any, is_tensor: Callable[[Any], bool], is_bool: Callable[[Any], bool]) -> tuple[tuple, tuple]:
    """Split an index into its tensors and a hashable description.

    Raises:
        TypeError: for an item that is no int, slice, None, Ellipsis, bool or tensor.
    """
    items = index if isinstance(index, tuple) else (index,)
    tensors: list[Any] = []
    encoded: list[Any] = []
    for item in items:
        if is_tensor(item):
            encoded.append(("tensor", len(tensors), len(item.shape), is_bool(item)))
            tensors.append(item)
        elif isinstance(item, slice):
            encoded.append(("slice", *map(_bound, (item.start, item.stop, item.step))))
        elif isinstance(item, bool):
            encoded.append(("bool", item))  # because True equals 1 as a key
        elif item is None or item is Ellipsis or isinstance(item, int):
            encoded.append(item)
        else:
            raise TypeError(f"cannot index a distributed tensor with {item!r}: use ints, slices, None, ... or tensors")
    return tuple(tensors), tuple(encoded)


def _bound(value: Any) -> int | None:
    """Return a bound of a slice. A tensor becomes its number: the program may write another one into the tensor."""
    return value if value is None or type(value) is int else index(value)


def decode_index(encoded: Sequence[Any], tensors: Sequence[Any]) -> tuple:
    """Rebuild the index that `encode_index` encoded."""
    return tuple(_decoded(item, tensors) if isinstance(item, tuple) else item for item in encoded)


def _decoded(item: tuple, tensors: Sequence[Any]) -> Any:
    return slice(*item[1:]) if item[0] == "slice" else tensors[item[1]] if item[0] == "tensor" else item[1]


class Place(NamedTuple):
    """An item of an encoded index, with the dimension and range of the tensor that it selects.

    Attributes:
        item: the item.
        dim: the dimension of the tensor, the first one for a mask; None for an item that adds a dimension.
        picked: the indices that an int or a slice selects along it. None for other items, and where that index or
            dimension does not exist.
    """

    item: Any
    dim: int | None
    picked: range | None

    @property
    def is_slice(self) -> bool:
        """Return whether the item is a slice."""
        return isinstance(self.item, tuple) and self.item[0] == "slice"

    @property
    def tensor(self) -> int | None:
        """Position of an index tensor among the operands, None for other items."""
        return self.item[1] if isinstance(self.item, tuple) and self.item[0] == "tensor" else None


def region_of(index: Sequence[Any], shape: Sequence[int]) -> tuple[Place, ...]:
    """Return the dimension and range that each item of an encoded index selects in a tensor of that shape. The first
    ``...``, and trailing dimensions without item, become full slices.

    Example:
        >>> [(place.dim, place.picked) for place in region_of((0, ..., None), (4, 5))]
        [(0, range(0, 1)), (1, range(0, 5)), (None, None)]
    """
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    before, after = index[:at], index[at + 1 :]
    left = len(shape) - sum(map(_dims_of, (*before, *after)))
    places: list[Place] = []
    dim = 0
    for item in (*before, *(FULL_SLICE,) * left, *after):
        count = _dims_of(item)
        picked = _picked(item, shape[dim]) if count and dim < len(shape) else None
        places.append(Place(item, dim if count else None, picked))
        dim += count
    return tuple(places)


def _dims_of(item: Any) -> int:
    """Return how many dimensions of the tensor an item consumes."""
    if item is None or item is Ellipsis:
        return 0
    if not isinstance(item, tuple) or item[0] == "slice":
        return 1
    return 0 if item[0] == "bool" else item[2] if item[3] else 1


def _picked(item: Any, size: int) -> range | None:
    if isinstance(item, tuple):
        return range(size)[slice(*item[1:])] if item[0] == "slice" else None
    return range(item % size, item % size + 1) if -size <= item < size else None


def has_empty_slice(encoded: Sequence[Any], shape: Sequence[int]) -> bool:
    """Return whether a slice of an encoded index is empty.

    Example:
        >>> has_empty_slice((None, ("slice", 2, 2, None)), (4, 5))
        True
    """
    return any(place.is_slice and place.picked is not None and not place.picked for place in region_of(encoded, shape))
