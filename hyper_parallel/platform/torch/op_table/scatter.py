"""Writes and reads at indices in tensors, and table look-ups."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.contract.dispatch import Bound, Given
from hyper_parallel.platform.indexing import decode_index
from hyper_parallel.platform.torch.op_table.binding import WORDS, Table, as_called, find, rows
from hyper_parallel.platform.torch.op_table.index import encode

__all__ = ["INDEX_ADD", "table"]

_PUT = "x index/indices value/values -accumulate=False"
_AT = "x dim index source/src/value/tensor/tensor2"


def table() -> Table:
    """Return the op-table rows for scatter, index_add, put, take, searchsorted, bucketize, isin, masks, and similar
    functions."""
    return {
        **as_called("scatter", "scatter", f"{_AT} reduce", _scattered),
        **as_called("scatter_add", "scatter", _AT, _at("add")),
        **as_called("scatter_reduce", "scatter", f"{_AT} reduce", _scatter_reduced),
        **as_called("index_add", "index_write", f"{_AT} alpha", _at("add")),
        **as_called("index_copy index_fill", "index_write", _AT, _at("replace")),
        **as_called("index_reduce", "index_write", f"{_AT} reduce", _at("reduce")),
        **dict.fromkeys(find("index_put"), NativeOp("setitem", _PUT, _call_index_put, words=WORDS, adjust=_encoded)),
        **as_called("take", "take", "x index", _nothing),
        **as_called("put", "put", "x index source accumulate", _put),
        **as_called(
            "searchsorted", "searchsorted", f"sequences/sorted_sequence values/input {_SEARCH}", _nothing, torch
        ),
        **as_called("bucketize", "by_table", "x table/boundaries", _nothing, torch),
        **rows("masked_select", "masked_select"),
        **rows("masked_scatter", "masked_scatter"),
        **as_called("isin", "by_table", "x/elements table/test_elements", _nothing, torch),
    }


#: Arguments of searchsorted; the sorter is passed by name.
_SEARCH = "out_int32 right side out sorters/sorter"


def _nothing(given: Given) -> tuple:
    return ()


def _at(how: str) -> Any:
    """Return a function that computes the static arguments of ``scatter`` and ``index_write``."""
    return lambda given: (given.values["dim"], how)


def _scattered(given: Given) -> tuple:
    reduce = given.values.get("reduce")
    return _at({None: "replace", "add": "add"}.get(reduce, "combine"))(given)


def _scatter_reduced(given: Given) -> tuple:
    keeps = dict(given.named).get("include_self", True)
    return _at("add" if given.values.get("reduce") == "sum" and keeps else "combine")(given)


def _put(given: Given) -> tuple:
    return ("add" if given.values.get("accumulate") else "replace",)


# ---------------------------------------------------------------------------------------------------- index_put


def _encoded(func: Any, operands: tuple, static_args: tuple) -> Bound:
    (x, values), (indices,) = operands, static_args
    tensors, encoded = encode(x, tuple(slice(None) if i is None else i for i in indices))
    return (x, values, *tensors), (encoded,)


def _call_index_put(func: Any, operands: tuple, static_args: tuple) -> Any:
    x = operands[0].clone()
    x[decode_index(static_args[0], operands[2:])] = operands[1]
    return x


def _call_index_add(func: Any, operands: tuple, static_args: tuple) -> Any:
    index = decode_index(static_args[0], operands[2:])
    return operands[0].index_put([None if isinstance(i, slice) else i for i in index], operands[1], True)


#: Row of ``index_put(..., accumulate=True)``.
INDEX_ADD = NativeOp("index_add", _PUT, _call_index_add, words=WORDS, adjust=_encoded)
