"""Tensors that modules find where data parallelism has taken their parameters: methods of parameters that write.

A whole parameter of a unit is a tensor, often a view of a buffer. MindSpore writes to no view: `copy_` into one changes
nothing on CPU, and the primitive ``Assign`` refuses it. There a stand-in takes new memory, which the unit finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.mindspore.processes.collectives import dense, is_dense
from hyper_parallel.platform.mindspore.tensors.parameter import local_value
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, NoDispatch

__all__ = ["assigned", "data_property", "is_stand_in", "stand_for", "written"]


def stand_for(xs: Sequence[Any], parameters: Sequence[Any]) -> None:
    """Give tensors the attributes and methods of the parameters that they stand for."""
    for x, p in zip(xs, parameters, strict=True):
        own = x.__dict__
        own.update(inited_param=None, name=p.name, requires_grad=p.requires_grad)
        own.update(set_data=partial(written, x), copy_=partial(_copied_into, x))


def is_stand_in(x: Any) -> bool:
    """Return whether ``x`` stands for a parameter."""
    return "set_data" in getattr(x, "__dict__", ())


def written(x: Any, data: Any, slice_shape: bool = False) -> Any:
    """Write new values: `Parameter.set_data` of a stand-in.

    Args:
        x: the stand-in.
        data: a tensor or a number. For a distributed ``x`` it is the whole tensor, or a DTensor placed as ``x`` is.
        slice_shape: whether ``data`` is this rank's part of a distributed ``x``.

    Raises:
        ValueError: for values of another shape or placement.
    """
    if data is x:
        return x
    if isinstance(x, InterceptedTensor) and isinstance(data, Tensor):
        data = local_value(x, data, slice_shape)
    with NoDispatch():
        values = data if isinstance(data, Tensor) else Tensor(data, x.dtype)
        _write(x, dense(values.astype(x.dtype).reshape(tuple(x._shape))))
    return x


def _copied_into(x: Any, values: Any, non_blocking: bool = False) -> Any:
    """Copy as `Tensor.copy_` does."""
    if _takes_writes(x):
        return Tensor.copy_(x, values, non_blocking)
    values = values.astype(x.dtype).broadcast_to(tuple(x.shape))
    if isinstance(values, InterceptedTensor):
        values = values.redistribute(placements=x.placements)
    return written(x, values)


def _write(x: Any, values: Any) -> None:
    """Write values of the shape and dtype of ``x``, without interception."""
    if is_dense(x):
        if 0 not in x._shape:
            Tensor.copy_(x, values)
    else:
        Tensor.assign_value(x, values)
        Tensor.copy_(x, x)  # which is counted


def assigned(original: Callable, primitive: Any, variable: Any, value: Any, sign: int = 0) -> Any:
    """Stands for the call of ``Assign``, ``AssignAdd`` or ``AssignSub``, which write uncounted and to no views.

    Args:
        original: MindSpore's.
        primitive: the primitive that is called.
        variable: a parameter, or a stand-in.
        value: a tensor or a number.
        sign: sign of a ``value`` that is added, 0 where it takes the place of the old one.
    """
    if not is_stand_in(variable):
        return original(primitive, variable, value)
    return written(variable, variable + value * sign if sign else value)


def _takes_writes(x: Any) -> bool:
    with NoDispatch():
        return is_dense(x)


def data_property(original: Any) -> property:
    """Wrap ``Tensor.data``: a stand-in that is assigned to is written to."""

    def replace(x: Any, value: Any) -> None:
        if is_stand_in(x):
            written(x, value)
        else:
            original.__set__(x, value)

    return property(original.__get__, replace)
