"""Operations whose result sizes depend on data, masks, and writes at indices given by tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.indexing import decode_index, encode_index
from hyper_parallel.platform.mindspore.op_table.binding import Bound, by_name, row

__all__ = ["COMPOSED", "OPS", "is_mask", "without_masks"]

OPS: dict[str, NativeOp] = by_name(
    {
        "NonZero ArgWhere": row("nonzero"),
        "MaskedSelect": row("masked_select"),
        "MaskedScatter": row("masked_scatter"),
        # Distinct elements in order of first occurrence, with the index of each element.
        "Unique": row(
            "unique_in_order", lambda func, args, kwargs: (args, (None, True, False)), lambda func, xs, how: func(*xs)
        ),
    }
)


def _dispatch(row: NativeOp, func: Any, args: tuple, *others: Any) -> Any:
    found = next(x for x in args if getattr(x, "_layout", None) is not None)
    return type(found)._dispatch(row, func, (*args, *others), {})


# -------------------------------------------------------------------- those that differ from the one before
def _asked(func: Any, operands: tuple, static_args: tuple) -> Any:
    dim, places, counts = static_args
    found = func(*operands, places, counts, dim)
    asked = [y for y, wanted in zip(found, (True, places, counts), strict=True) if wanted]
    return tuple(asked) if len(asked) > 1 else asked[0]


_CONSECUTIVE = row("unique_in_order", lambda func, args, kwargs: (args[:1], args[1:]), _asked)


def _unique_consecutive(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return elements that differ from their predecessor, and the indices and counts, or None if not requested."""
    x, places, counts, dim = args
    found = _dispatch(_CONSECUTIVE, func, (x,), dim, bool(places), bool(counts))
    remaining = iter(found if isinstance(found, tuple) else (found,))
    return tuple(next(remaining) if wanted else None for wanted in (True, places, counts))


def _unique_with_pad(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the distinct elements, padded with a number to the size of ``x``, and the index of each element."""
    x, number = args
    if isinstance(number, Tensor) or not x.size:
        return NotImplemented
    values, places = ops.unique(x)
    missing = x.size - values.size
    if missing:
        values = ops.cat((values, ops.full_like(values[:1], number).broadcast_to((missing,))))
    return values, places


def _nonzero_columns(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the indices of nonzero elements for each dimension, as ``nonzero(x, as_tuple=True)`` does."""
    places = ops.nonzero(args[0])
    return tuple(places[:, d] for d in range(args[0].ndim))


# -------------------------------------------------------------------- masks in an index
def is_mask(item: Any) -> bool:
    """Return whether an item of an index is a distributed mask."""
    return getattr(item, "_layout", None) is not None and item.dtype == ms.bool_ and item.ndim > 0


def without_masks(index: tuple) -> tuple:
    """Return an index with each distributed mask replaced by the indices of the mask's true elements."""
    found: list[Any] = []
    for item in index:
        found += _nonzero_columns(None, (item,), {}) if is_mask(item) else [item]
    return tuple(found)


# -------------------------------------------------------------------- index_put
def _bind_index_put(func: Any, args: tuple, kwargs: dict) -> Bound:
    x, value, *indices = args
    tensors, encoded = encode_index(tuple(indices), lambda i: isinstance(i, Tensor), lambda i: False)
    return (x, value, *tensors), (encoded,)


def _call_index_put(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, value, *tensors = operands
    return func(x, value, decode_index(static_args[0], tensors))


_WRITTEN = row("setitem", _bind_index_put, _call_index_put, by_function=True)
_ADDED = row("index_add", _bind_index_put, _call_index_put, by_function=True)


def _index_put(func: Any, args: tuple, kwargs: dict) -> Any:
    """Write at indices, or accumulate. Masks are replaced by the indices of their true elements."""
    x, value, indices = args
    return _dispatch(_ADDED if func.prim.accumulate else _WRITTEN, func, (x, value, *without_masks(indices)))


#: Primitive -> composition, as in `composed`.
COMPOSED: dict[str, Callable[[Any, tuple, dict], Any]] = {
    "UniqueConsecutive": _unique_consecutive,
    "UniqueWithPad": _unique_with_pad,
    "NonZeroExt": _nonzero_columns,
    "IndexPut": _index_put,
}
