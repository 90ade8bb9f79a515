"""Writing to places that index tensors name, taking from them, and looking elements up in tables."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.indexing import decode_index
from hyper_parallel.platform.torch.op_table.as_called import Given, as_called
from hyper_parallel.platform.torch.op_table.binding import Bound, Table, UnboundCallError, binds, find, rows
from hyper_parallel.platform.torch.op_table.index import encode

__all__ = ["INDEX_ADD", "table"]

_AT = "input dim index source/src/value/tensor/tensor2"


def table() -> Table:
    """Rows of scatter, index_add and their relatives, of put, take, searchsorted, bucketize, isin, and masks."""
    return {
        **as_called("scatter", "scatter", f"{_AT} reduce", _scattered),
        **as_called("scatter_add", "scatter", _AT, _at("add")),
        **as_called("scatter_reduce", "scatter", f"{_AT} reduce", _scatter_reduced),
        **as_called("index_add", "index_write", f"{_AT} alpha", _at("add")),
        **as_called("index_copy index_fill", "index_write", _AT, _at("replace")),
        **as_called("index_reduce", "index_write", f"{_AT} reduce", _at("reduce")),
        **dict.fromkeys(find("index_put"), NativeOp("setitem", _bind_index_put, _call_index_put)),
        **as_called("take", "take", "input index", _needs(0, 1)),
        **as_called("put", "put", "input index source accumulate", _put),
        **as_called("searchsorted", "searchsorted", f"sorted_sequence input {_SEARCH}", _searched, torch),
        **as_called("bucketize", "by_table", "input boundaries", _needs(0, 1), torch),
        **rows("masked_select", "masked_select", "input mask -> input mask"),
        **rows("masked_scatter", "masked_scatter", "input mask source -> input mask source"),
        **as_called("isin", "by_table", "elements test_elements", _of_elements, torch),
    }


#: Of searchsorted; the sorter is given by name.
_SEARCH = "out_int32 right side out sorter"


def _needs(*numbers: int) -> Any:
    """No static arguments, for calls whose tensors are the arguments of these numbers."""

    def facts(given: Given) -> tuple:
        given.need(*numbers)
        return ()

    return facts


def _at(how: str) -> Any:
    """Return a function that gives the static arguments of ``scatter`` and ``index_write``."""

    def facts(given: Given) -> tuple:
        if given.numbers not in ((0, 2), (0, 2, 3)) or not isinstance(given.values.get(1), int):
            raise UnboundCallError
        return given.values[1], how

    return facts


def _scattered(given: Given) -> tuple:
    reduce = given.values.get(4)
    return _at({None: "replace", "add": "add"}.get(reduce, "combine"))(given)


def _scatter_reduced(given: Given) -> tuple:
    keeps = dict(given.named).get("include_self", True)
    return _at("add" if given.values.get(4) == "sum" and keeps else "combine")(given)


def _put(given: Given) -> tuple:
    given.need(0, 1, 2)
    return ("add" if given.values.get(3) else "replace",)


def _searched(given: Given) -> tuple:
    if given.numbers not in ((0, 1), (0, 1, 6)):
        raise UnboundCallError
    return ()


def _of_elements(given: Given) -> tuple:
    if given.numbers not in ((0,), (0, 1)):
        raise UnboundCallError
    return ()


# ---------------------------------------------------------------------------------------------------- index_put


@binds("input indices values accumulate=False")
def _bind_index_put(x: Any, indices: Any, values: Any, accumulate: bool) -> Bound:
    tensors, encoded = encode(x, tuple(slice(None) if i is None else i for i in indices))
    return (x, values, *tensors), (encoded,)


def _call_index_put(func: Any, operands: tuple, static_args: tuple) -> Any:
    x = operands[0].clone()
    x[decode_index(static_args[0], operands[2:])] = operands[1]
    return x


def _call_index_add(func: Any, operands: tuple, static_args: tuple) -> Any:
    index = decode_index(static_args[0], operands[2:])
    return operands[0].index_put([None if isinstance(i, slice) else i for i in index], operands[1], True)


#: The row of ``index_put(..., accumulate=True)``.
INDEX_ADD = NativeOp("index_add", _bind_index_put, _call_index_add)
