"""Plain tensors combined with DTensors, where MindSpore would fail without an explanation or use this rank's shard.

If a plain tensor comes first, as in ``plain.mul(distributed)``, MindSpore sees a tensor of another class. It then reads
``__fallback__`` of the plain tensor, which the descriptor `Fallback` supplies. Parameters must not have the attribute:
MindSpore would then treat them as tensors of another class in every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from mindspore import Tensor
from mindspore.common.initializer import initializer
from mindspore.nn import Cell

from hyper_parallel.platform.mindspore.tensors.stand_ins import is_stand_in, written
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, distributed_in, is_dispatching

__all__ = ["Fallback", "checked_assign", "checked_init", "checked_update", "whole_values"]


def checked_init(original: Callable, tensor: Any, input_data: Any = None, *args: Any, **kwargs: Any) -> None:
    """Replace ``Tensor.__init__``: reject DTensors."""
    _refuse(tensor, input_data, "Tensor() of")
    original(tensor, input_data, *args, **kwargs)


def checked_assign(original: Callable, target: Any, value: Any) -> Any:
    """Replace ``Tensor.assign_value``, which `Parameter.set_data` and `load_param_into_net` call: reject DTensors for
    plain tensors."""
    if is_stand_in(target) and is_dispatching():
        return written(target, value)
    _refuse(target, value, f"the value of the plain {type(target).__name__} set to")
    return original(target, value)


def checked_update(original: Callable, param: Any, new_param: Any, strict_load: bool) -> None:
    """Replace the function by which ``load_param_into_net`` sets a parameter. A distributed parameter takes full
    values. A plain parameter rejects shards."""
    if isinstance(param, InterceptedTensor) and is_dispatching():
        distributed = isinstance(new_param, InterceptedTensor)
        original(_Whole(param), SimpleNamespace(data=new_param) if distributed else new_param, strict_load)
        return
    _refuse(param, new_param, f"load_param_into_net: the plain parameter {param.name!r} set to")
    original(param, new_param, strict_load)


class _Whole:
    """Stand-in for a parameter that MindSpore loads: it has the attributes of the single device's parameter."""

    sliced = False

    def __init__(self, parameter: Any) -> None:
        self.name, self.parameter = parameter.name, parameter
        # a lazy tensor with a shape and a dtype, but no memory
        self.data = initializer("zeros", parameter.shape, parameter.dtype)

    def set_data(self, data: Tensor, slice_shape: bool = False) -> None:
        # MindSpore allows values with additional dimensions of size 1.
        self.parameter.set_data(data if data.ndim == self.data.ndim else data.reshape(self.data.shape))


def whole_values(original: Callable, save_obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the function that collects the entries of ``save_checkpoint``. The replacement gathers the full values of
    distributed parameters, one parameter at a time. All ranks of the meshes must make this call."""
    entries = original(save_obj, *args, **kwargs)
    if not is_dispatching():
        return entries
    own = {p.name: p for p in save_obj.get_parameters()} if isinstance(save_obj, Cell) else {}
    for entry in entries:
        x = own.get(entry["name"], entry.get("data"))
        if isinstance(x, InterceptedTensor):
            entry["data"] = x.full_tensor()
    return entries


def _refuse(target: Any, value: Any, what: str) -> None:
    """Raise TypeError when a DTensor is about to be copied into a plain tensor."""
    if isinstance(value, InterceptedTensor) and not isinstance(target, InterceptedTensor) and is_dispatching():
        raise TypeError(
            f"{what} a DTensor, global shape {tuple(value.shape)}, placements {list(value._layout.placements)}, would "
            "become this rank's shard: use x.full_tensor() for the full tensor, x.to_local() for the shard, or "
            "x.copy() for a copy as a DTensor"
        )


class Fallback:
    """Descriptor ``__fallback__`` of plain tensors."""

    def __get__(self, tensor: Any, owner: type | None = None) -> Any:
        if tensor is None:
            return self  # MindSpore lists the attributes of the class, to compile from bytecode
        if type(tensor) is not Tensor:
            raise AttributeError("__fallback__")
        return _of_distributed


def _of_distributed(func: Any, args: Sequence[Any], kwargs: dict | None = None) -> Any:
    """Call the handler of the first DTensor among the operands: core reports that plain and distributed tensors do not
    mix."""
    found = next(distributed_in((args, kwargs or {})))
    return found.__fallback__(func, args, kwargs)
