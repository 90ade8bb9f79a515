"""Stand-ins for parameters that data parallelism has replaced: tensors with the writing methods of parameters.

An unsharded parameter of a unit is a tensor, often a view of a buffer. MindSpore writes to no view: `copy_` into a view
has no effect on CPU, and the primitive ``Assign`` rejects it. So a write to such a stand-in gives it new memory, which
the unit finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.mindspore.processes.collectives import dense, is_dense
from hyper_parallel.platform.mindspore.tensors.parameter import local_value
from hyper_parallel.platform.mindspore.tensors.tensor import WRITE_FIRST_OPERAND, InterceptedTensor, NoDispatch

__all__ = [
    "WRITING",
    "assigned",
    "with_seen_writes",
    "data_property",
    "is_stand_in",
    "seen_writes",
    "stand_for",
    "written",
]

#: Attribute of a stand-in that an operation has written to without a count.
_SEEN = "_hp_written"
#: Primitive that writes into the memory of operands -> the places of these operands.
WRITING: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(sorted(WRITE_FIRST_OPERAND), (0,)),
    "IndexAdd": (0,),
    "BatchNorm": (3, 4),  # the running statistics, in training
}


def stand_for(xs: Sequence[Any], parameters: Sequence[Any]) -> None:
    """Give tensors the attributes and methods of the parameters that they replace."""
    for x, p in zip(xs, parameters, strict=True):
        own = x.__dict__
        own.update(inited_param=None, name=p.name, requires_grad=p.requires_grad)
        own.update(set_data=partial(written, x), copy_=partial(_copied_into, x))


def is_stand_in(x: Any) -> bool:
    """Return whether ``x`` replaces a parameter."""
    return "set_data" in getattr(x, "__dict__", ())


def written(x: Any, data: Any, slice_shape: bool = False) -> Any:
    """Write new values: `Parameter.set_data` of a stand-in.

    Args:
        x: the stand-in.
        data: a tensor or a number. For a distributed ``x`` it is the full tensor, or a DTensor with the placements of
            ``x``.
        slice_shape: whether ``data`` is this rank's shard of a distributed ``x``.

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
    """Copy values into ``x`` as `Tensor.copy_` does."""
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
        Tensor.copy_(x, x)  # a write that is counted


def assigned(original: Callable, primitive: Any, variable: Any, value: Any, sign: int = 0) -> Any:
    """Replace the call of ``Assign``, ``AssignAdd`` or ``AssignSub``, which do not count writes and reject views.

    Args:
        original: MindSpore's function.
        primitive: the primitive that is called.
        variable: a parameter, or a stand-in.
        value: a tensor or a number.
        sign: sign of a ``value`` that is added, 0 if it replaces the old value.
    """
    if not is_stand_in(variable):
        return original(primitive, variable, value)
    return written(variable, variable + value * sign if sign else value)


def with_seen_writes(original: Callable, primitive: Any, *operands: Any, places: Sequence[int]) -> Any:
    """Replace the call of a primitive of `WRITING`: note the stand-ins that it writes to, for `seen_writes`.

    MindSpore does not count these writes. A count would fail the backward of a primitive that has saved the operand.
    """
    output = original(primitive, *operands)
    if getattr(primitive, "is_training", True):
        for place in places:
            if len(operands) > place and is_stand_in(operands[place]):
                operands[place].__dict__[_SEEN] = True
    return output


def seen_writes(xs: Sequence[Any]) -> list[int]:
    """Return the indices of the tensors that primitives of `WRITING` have written to since the last call."""
    return [i for i, x in enumerate(xs) if x.__dict__.pop(_SEEN, False)]


def _takes_writes(x: Any) -> bool:
    with NoDispatch():
        return is_dense(x)


def data_property(original: Any) -> property:
    """Wrap ``Tensor.data``: an assignment to a stand-in writes into it."""

    def replace(x: Any, value: Any) -> None:
        if is_stand_in(x):
            written(x, value)
        else:
            original.__set__(x, value)

    return property(original.__get__, replace)
