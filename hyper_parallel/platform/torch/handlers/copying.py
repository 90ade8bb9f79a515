"""Copies of DTensors: deepcopy and pickle."""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State, is_dtensor, wrap
from hyper_parallel.platform.torch.handlers.gradients import FACTS
from hyper_parallel.platform.torch.op_table.binding import words

__all__ = ["copy_dtensor", "deepcopy_dtensor", "needed_to_load", "rebuild_dtensor", "reduce_dtensor"]


#: Attributes that belong to one object only: set by torch, by `wrap` and by core.
_OWN = (*FACTS, *words("_layout _is_param _writes _out_of_date"))


def deepcopy_dtensor(x: Any, memo: dict[int, Any]) -> Any:
    """Copy data, gradient and attributes; the layout is shared.

    Raises:
        RuntimeError: for a tensor that autograd computed, as in torch.
    """
    layout = x._layout  # waits for the values of a pending collective
    with no_dispatch():
        if not x.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
            )
        # With its strides, on which views of it depend.
        result = _copied(x.detach(), memo if getattr(x, "_is_param", False) else {})
        result.requires_grad_(x.requires_grad)
        if x.grad is not None:
            result.grad = x.grad.detach().clone().as_subclass(Tensor)
    wrap(result, layout)
    result._strides = x._strides
    if getattr(x, "_is_param", False):
        result._is_param = True
    memo[id(x)] = result
    for name, value in x.__dict__.items():
        if name not in _OWN:
            result.__dict__[name] = copy.deepcopy(value, memo)
    return result


def _copied(x: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of plain data. Copies of parameters with a common storage have a common storage, as with
    `Tensor.__deepcopy__`."""
    storage = x.untyped_storage()
    if x.is_meta or storage.nbytes() == x.nbytes:
        return x.clone()
    new = memo.get(storage._cdata)
    if new is None:
        new = memo[storage._cdata] = storage.clone()
        memo[id(new)] = storage  # keeps the storage, and so its address, alive as long as the memo
    return x.new_empty(0).set_(new, x.storage_offset(), x.size(), x.stride())


def copy_dtensor(x: Any) -> Any:
    """Return another DTensor object with the memory of ``x``, as `copy.copy` of a tensor does."""
    make, args = reduce_dtensor(x, None)
    result = make(*args)
    State.core.share_memory(x, result)
    return result


def reduce_dtensor(x: Any, protocol: Any) -> tuple:
    """Pickle the local tensor and the layout."""
    with no_dispatch():
        local = x.detach().as_subclass(Tensor)
        requires_grad = x.requires_grad
    layout, is_parameter = x._layout, getattr(x, "_is_param", False)
    coordinate = layout.mesh.get_coordinate()
    values = (local, requires_grad, is_parameter, x._strides)
    return State.core.restore, (rebuild_dtensor, layout, coordinate, *values)


def rebuild_dtensor(layout: Any, local: Tensor, requires_grad: bool, is_parameter: bool, strides: Any = None) -> Any:
    """Rebuild a DTensor from the values of `reduce_dtensor`. Core calls it.

    Raises:
        RuntimeError: when the tensor was saved on another mesh, so that it does not fit.
    """
    if tuple(local.shape) != tuple(layout.local_shape):
        raise RuntimeError(
            f"a distributed tensor was saved with a local shape of {tuple(local.shape)}, but on this rank its layout "
            f"has {tuple(layout.local_shape)}: load the file of this rank, on a mesh of the same shape"
        )
    own = layout.mesh.platform.device()
    with no_dispatch():
        local = local.detach() if not is_dtensor(local) else local
        if local.device.type == own.type:
            local = local.to(own)  # torch put it onto the device of the rank that pickled it
        local.requires_grad_(requires_grad)
    result = wrap(local, layout)
    if is_parameter:
        result._is_param = True
    if strides is not None:  # core compares the text for unknown strides by identity
        result._strides = sys.intern(strides) if isinstance(strides, str) else strides
    return result


def needed_to_load() -> tuple[Any, ...]:
    """Return the callables with which ``torch.load(weights_only=True)`` makes DTensors."""
    return (rebuild_dtensor, *State.core.unpickling)
