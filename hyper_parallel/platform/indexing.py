"""Indices of ``x[index]`` as hashable values: what a plan for indexing is cached under.

An index is encoded as a tuple with one entry per item: an int, None, ``Ellipsis``, ``("slice", start, stop, step)``,
or ``("tensor", i, ndim, is_bool)`` for the i-th tensor among the operands. No framework is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["decode_index", "encode_index"]


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


def decode_index(encoded: Sequence[Any], tensors: Sequence[Any]) -> tuple:
    """The index that `encode_index` took apart."""
    return tuple(
        item if not isinstance(item, tuple) else slice(*item[1:]) if item[0] == "slice" else tensors[item[1]]
        for item in encoded
    )
