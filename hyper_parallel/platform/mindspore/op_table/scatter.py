"""Writes and reads at indices in tensors, and table look-ups."""

from __future__ import annotations

from typing import Any

from mindspore import Parameter

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.op_table.as_called import Facts, Given, as_called
from hyper_parallel.platform.mindspore.op_table.binding import Choose, by_name
from hyper_parallel.platform.mindspore.op_table.layers import labelled
from hyper_parallel.platform.mindspore.processes.collectives import copied

__all__ = ["OPS", "VARIANTS"]

#: Numbers in generated code for the treatment of existing values by a scatter.
_HOW = {0: "replace", 1: "add", "none": "replace", "add": "add"}
_BATCH = "abdefklm"


def _at(how: str | None = None) -> Facts:
    """Return a function that computes the static arguments of ``scatter`` and ``index_write``.

    If ``how`` is None, the function reads ``how`` from the call.
    """
    return lambda given: (given.values["dim"], how or _HOW.get(given.values.get("reduce", 0), "combine"))


def _by_attribute(given: Given) -> tuple:
    """Read the dim of ``IndexAdd`` from the primitive."""
    return given.func.prim.axis, "add"


def _nothing(given: Given) -> tuple:
    return ()


# -------------------------------------------------------------------- indices of several dimensions
def _at_points(terms: str, adds: bool = False) -> NativeOp:
    """Return the op-table row for ``x[index[t, 0], index[t, 1], ...] = updates[t]``, or for another combination.

    Updates may be sharded if they are added.
    """

    def sign(given: Given) -> str | None:
        x, index, updates = given.shapes
        depth, batch = index[-1], len(index) - 1
        if len(updates) != batch + len(x) - depth:
            return None
        labels, times = _BATCH[: len(x) - depth], ("tuvwxyz"[:batch] if adds else "." * batch)
        return f"{'.' * depth}{labels},{times}.,{times}{labels}->{'.' * depth}{labels}{terms and '|'}{terms}"

    return labelled("x index updates", sign, shapes=lambda given: (given.shapes[0],))


def _gather_points(given: Given) -> str | None:
    x, index = given.shapes
    depth, times, labels = index[-1], "tuvwxyz"[: len(index) - 1], _BATCH[: len(x) - index[-1]]
    return f"{'.' * depth}{labels},{times}.->{times}{labels}|0"


def _shape_of_points(given: Given) -> tuple:
    x, index = given.shapes
    return ((*index[:-1], *x[index[-1] :]),)


def _scatter_points(given: Given) -> str | None:
    index, updates = given.shapes
    depth, times = index[-1], "tuvwxyz"[: len(index) - 1]
    labels = _BATCH[: len(updates) - len(times)]
    return f"{times}.,{times}{labels}->{'.' * depth}{labels}|1"


def _scattered(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    """Call ``ScatterNd``, which takes the shape of its result, with the local shape."""
    index, updates, shape = args
    depth = index.shape[-1]
    return func(index, updates, (*shape[:depth], *updates.shape[index.ndim - 1 :]))


def _segments(terms: str) -> NativeOp:
    """Return the op-table row for ``result[ids[t]] += x[t]``, or for another combination."""

    def sign(given: Given) -> str | None:
        x, ids = given.shapes
        times = "tuvwxyz"[: len(ids)] if terms else "." * len(ids)
        labels = _BATCH[: len(x) - len(ids)]
        return f"{times}{labels},{times}->.{labels}{terms}"

    def shapes(given: Given) -> tuple:
        x, ids = given.shapes
        return ((given.values["count"], *x[len(ids) :]),)

    return labelled("x ids -count", sign, shapes=shapes)


_SEARCHED = as_called("searchsorted", "sequences/x values", _nothing)


def _choose_search(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the op-table row for a search without a sorter."""
    return _SEARCHED if len(args) < 3 or args[2] is None else None


def _of_copy(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    """Call on a copy of the first operand, because the kernel on CPU overwrites it."""
    return func(copied(args[0]), *args[1:], **kwargs)


_ADDED = as_called("index_write", "x index source", _by_attribute, _of_copy)


def _choose_index_add(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the op-table row for `ops.index_add`. For a parameter the original call must run, because it writes to the
    parameter."""
    return None if isinstance(args[0], Parameter) else _ADDED


VARIANTS: dict[str, Choose] = {"SearchSorted": _choose_search, "IndexAdd": _choose_index_add}

OPS: dict[str, NativeOp] = by_name(
    {
        "Scatter": as_called("scatter", "x dim index source reduce", _at()),
        "ScatterAddExt": as_called("scatter", "x dim index source", _at("add")),
        "TensorScatterElements": as_called("scatter", "x index source dim reduce", _at()),
        "IndexAddExt": as_called("index_write", "x dim index source/src", _at("add"), _of_copy),
        "IndexFill": as_called("index_write", "x dim index source/value", _at("replace")),
        "Take": as_called("take", "x index", _nothing),
        "TensorScatterAdd": _at_points("0+2", adds=True),
        "TensorScatterUpdate": _at_points("0+2"),
        "TensorScatterSub TensorScatterMul TensorScatterDiv TensorScatterMax TensorScatterMin": _at_points(""),
        "GatherNd": labelled("x index", _gather_points, shapes=_shape_of_points),
        "ScatterNd": labelled(
            "index updates -shape",
            _scatter_points,
            _scattered,
            shapes=lambda given: (tuple(given.values["shape"]),),
        ),
        "UnsortedSegmentSum": _segments("|0"),
        "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd": _segments(""),
    }
)
