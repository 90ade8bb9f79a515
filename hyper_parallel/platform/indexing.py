"""Indices of ``x[index]`` as hashable values: keys for cached plans of indexing.

An index is encoded as a tuple with one entry per item: an int, None, ``Ellipsis``, ``("slice", start, stop, step)``,
or ``("tensor", i, ndim, is_bool)`` for the i-th tensor among the operands. No framework is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["has_empty_slice", "decode_index", "encode_index"]


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
            encoded.append(("slice", item.start, item.stop, item.step))
        elif item is None or item is Ellipsis or isinstance(item, int):
            encoded.append(item)
        else:
            raise TypeError(f"cannot index a distributed tensor with {item!r}: use ints, slices, None, ... or tensors")
    return tuple(tensors), tuple(encoded)


def has_empty_slice(encoded: Sequence[Any], shape: Sequence[int]) -> bool:
    """Return whether one of the slices of an encoded index takes nothing of its dimension.

    Example:
        >>> has_empty_slice((None, ("slice", 2, 2, None)), (4, 5))
        True
    """
    items = [item for item in encoded if item is not None]
    taken = [item[2] if isinstance(item, tuple) and item[0] == "tensor" and item[3] else 1 for item in items]
    dim = 0
    for at, (item, dims) in enumerate(zip(items, taken, strict=True)):
        if item is Ellipsis:
            dim = len(shape) - sum(taken[at + 1 :])
            continue
        if isinstance(item, tuple) and item[0] == "slice" and not range(shape[dim])[slice(*item[1:])]:
            return True
        dim += dims
    return False


def decode_index(encoded: Sequence[Any], tensors: Sequence[Any]) -> tuple:
    """The index that `encode_index` took apart."""
    return tuple(
        item if not isinstance(item, tuple) else slice(*item[1:]) if item[0] == "slice" else tensors[item[1]]
        for item in encoded
    )
