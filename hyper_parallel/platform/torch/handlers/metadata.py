"""Properties that are equal for the local tensor and the DTensor, and sizes, which differ."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State, handles, is_dtensor, layout_of, replaces
from hyper_parallel.platform.torch.op_table.binding import words

__all__: list[str] = []


_PROPERTIES = words(
    """
_backward_hooks _base _grad_fn _post_accumulate_grad_hooks _version device dtype grad_dtype grad_fn is_cpu is_cuda
is_inference is_ipu is_leaf is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr
is_vulkan is_xla is_xpu is_npu itemsize layout name names ndim output_nr requires_grad retains_grad
"""
)

_METHODS = words(
    """
__dir__ _is_all_true _is_view _is_zerotensor _typed_storage dim element_size get_device is_complex is_conj
is_floating_point is_inference is_neg is_pinned is_shared is_signed
ndimension storage storage_offset untyped_storage
"""
)

_SETTERS = ["requires_grad", "names", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "grad_dtype"]


def _functions() -> list[Any]:
    accessors = {"__get__": _PROPERTIES, "__set__": _SETTERS, "__delete__": ("grad", "_grad")}
    found = [
        getattr(getattr(Tensor, name, None), accessor, None) for accessor, names in accessors.items() for name in names
    ]
    for name in _METHODS:
        found += [getattr(Tensor, name, None), getattr(torch, name, None) if name.startswith("is_") else None]
    found.append(getattr(torch, "_has_compatible_shallow_copy_type", None))
    return [*found, torch.result_type, torch.promote_types, torch.can_cast]


@handles(*_functions())
def on_local(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the value of a property or method that is equal for the DTensor and its local tensor."""
    with no_dispatch():
        return func(*args, **kwargs)


@replaces(Tensor.data_ptr)
def data_ptr(x: Any) -> int:
    """Return the address of the data, if this rank holds all of it. Callers read as many bytes as the global shape
    implies."""
    layout = layout_of(x)
    if tuple(layout.local_shape) != tuple(layout.shape):
        raise RuntimeError(
            f"data_ptr() of a DTensor of shape {tuple(layout.shape)} placed {list(layout.placements)}, would address "
            f"this rank's shard of shape {tuple(layout.local_shape)}: use full_tensor() for the full tensor, "
            "to_local() for this rank's shard"
        )
    with no_dispatch():
        return x.data_ptr()


@handles(Tensor.requires_grad_, Tensor.detach_, Tensor.share_memory_)
def on_local_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """Change a flag of the local tensor, which is the same object as the DTensor."""
    with no_dispatch():
        func(*args, **kwargs)
        if func is Tensor.detach_:
            State.core.forget_history(args[0])
    return args[0]


@replaces(Tensor.size)
def size(x: Any, dim: int | None = None) -> Any:
    """Return the global size."""
    shape = layout_of(x).shape
    return shape if dim is None else shape[dim]


@replaces(Tensor.numel, Tensor.nelement, torch.numel)
def numel(input: Any) -> int:
    """Return the global number of elements."""
    return math.prod(layout_of(input).shape)


@replaces(Tensor.nbytes.__get__)
def nbytes(x: Any) -> int:
    """Return the global number of bytes."""
    return numel(x) * x.element_size()


@replaces(Tensor.__len__)
def length(x: Any) -> int:
    """Return the global size of the first dimension."""
    shape = layout_of(x).shape
    if not shape:
        raise TypeError("len() of a 0-d tensor")
    return shape[0]


@replaces(Tensor.stride)
def stride(x: Any, dim: int | None = None) -> Any:
    """Return the strides of the single device's tensor, or contiguous ones if these are unknown."""
    strides = State.core.strides_of_whole(x)
    return strides if dim is None else strides[dim]


@replaces(Tensor.is_contiguous)
def is_contiguous(x: Any, *, memory_format: Any = torch.contiguous_format) -> bool:
    """Return whether the single device's tensor is contiguous; False if its strides are unknown.

    A rank with a small shard may have a contiguous one where other ranks have not.
    """
    if memory_format is torch.contiguous_format:
        return State.core.is_contiguous(x)
    whole = torch.empty_strided(layout_of(x).shape, State.core.strides_of_whole(x), device="meta")
    return whole.is_contiguous(memory_format=memory_format)


@replaces(Tensor.is_same_size, torch.is_same_size)
def is_same_size(input: Any, other: Any) -> bool:
    """Return whether the global sizes agree."""
    return tuple(input.shape) == tuple(other.shape)


@replaces(Tensor.__format__)
def format_tensor(x: Any, spec: str) -> str:
    """Format a tensor as torch does: a tensor of one number as the number, any other tensor by its repr."""
    if is_dtensor(x) and not x.dim():
        return format(x.item(), spec)
    return object.__format__(x, spec)


@replaces(Tensor.__contains__)
def contains(x: Any, element: Any) -> bool:
    """Return whether some element of ``x`` equals ``element``."""
    return bool((x == element).any().item())


@replaces(Tensor.__reversed__)
def reversed_tensor(x: Any) -> Any:
    """Reverse the first dimension, as `torch.Tensor.__reversed__` does."""
    return x.flip(0) if x.dim() else x
