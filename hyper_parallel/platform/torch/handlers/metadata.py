"""Properties that are the same for the local and the distributed tensor, and sizes, which are not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.op_table.binding import words
from hyper_parallel.platform.torch.tensor import handles, is_dtensor, layout_of

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
is_contiguous is_floating_point is_inference is_neg is_non_overlapping_and_dense is_pinned is_shared is_signed
ndimension register_post_accumulate_grad_hook retain_grad storage storage_offset untyped_storage
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
    """The local tensor's answer is the distributed tensor's. A hook after accumulation gets the DTensor itself."""
    with no_dispatch():
        return func(*args, **kwargs)


@handles(Tensor.data_ptr)
def data_ptr(func: Any, args: tuple, kwargs: dict) -> int:
    """Address of the data, if this rank holds all of it: callers read as much memory as the global shape says."""
    layout = layout_of(args[0])
    if tuple(layout.local_shape) != tuple(layout.shape):
        raise RuntimeError(
            f"data_ptr() of a DTensor of shape {tuple(layout.shape)} placed {list(layout.placements)}, of which this "
            f"rank holds {tuple(layout.local_shape)}: use full_tensor() to save or pass on all of it, to_local() for "
            "this rank's part"
        )
    with no_dispatch():
        return func(*args, **kwargs)


@handles(Tensor.requires_grad_, Tensor.detach_, Tensor.share_memory_)
def on_local_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """Change a flag of the local tensor, which is the distributed one."""
    with no_dispatch():
        func(*args, **kwargs)
    return args[0]


@handles(Tensor.size)
def size(func: Any, args: tuple, kwargs: dict) -> Any:
    """Global size."""
    shape = layout_of(args[0]).shape
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


@handles(Tensor.numel, Tensor.nelement, torch.numel)
def numel(func: Any, args: tuple, kwargs: dict) -> int:
    """Global number of elements."""
    return math.prod(layout_of(args[0] if args else kwargs["input"]).shape)


@handles(Tensor.nbytes.__get__)
def nbytes(func: Any, args: tuple, kwargs: dict) -> int:
    """Global number of bytes."""
    return math.prod(layout_of(args[0]).shape) * args[0].element_size()


@handles(Tensor.__len__)
def length(func: Any, args: tuple, kwargs: dict) -> int:
    """Global size of the first dimension."""
    shape = layout_of(args[0]).shape
    if not shape:
        raise TypeError("len() of a 0-d tensor")
    return shape[0]


@handles(Tensor.stride)
def stride(func: Any, args: tuple, kwargs: dict) -> Any:
    """Strides that the global tensor would have with the local one's order of dimensions."""
    shape = layout_of(args[0]).shape
    with no_dispatch():
        local = Tensor.stride(args[0])
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (local[d], -d)):
        if local[dim]:
            strides[dim] = step
            step *= max(shape[dim], 1)
    asked = args[1] if len(args) > 1 else kwargs.get("dim")
    return tuple(strides) if asked is None else strides[asked]


@handles(Tensor.is_same_size, torch.is_same_size)
def is_same_size(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether the global sizes agree."""
    return tuple(args[0].shape) == tuple(args[1].shape)


@handles(Tensor.__format__)
def format_tensor(func: Any, args: tuple, kwargs: dict) -> str:
    """As torch: a tensor of one number as the number, others by their repr."""
    x, spec = args
    if is_dtensor(x) and not layout_of(x).shape:
        return format(x.item(), spec)
    return object.__format__(x, spec)


@handles(Tensor.__contains__)
def contains(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an element equals."""
    return bool((args[0] == args[1]).any().item())


@handles(Tensor.__reversed__)
def reversed_tensor(func: Any, args: tuple, kwargs: dict) -> Any:
    """As `torch.Tensor.__reversed__`."""
    return args[0].flip(0) if args[0].dim() else args[0]
