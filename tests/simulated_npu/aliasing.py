"""Host views of tensors on the simulated device, whose memory is the host's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

#: torch's name for the one custom device type, which is "npu" here.
NPU = torch._C._get_privateuse1_backend_name()

# Of plain tensors, so that a distributed tensor, which may come in here, gives its own local values.
_size, _stride, _offset = torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset
_storage = torch.Tensor.untyped_storage


@lru_cache(maxsize=4096)
def _host_storage(address: int, size: int) -> torch.UntypedStorage:
    """Storage over memory with another owner. It may be kept: it is nothing but an address and a size."""
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8).untyped_storage()


def host_alias(x: torch.Tensor) -> torch.Tensor:
    """A CPU tensor in the memory of ``x``, which is on the simulated device; valid as long as ``x`` is."""
    storage = _storage(x)
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(_size(x), _stride(x), dtype=x.dtype)
    alias = torch.empty(0, dtype=x.dtype).set_(
        _host_storage(storage.data_ptr(), size), _offset(x), _size(x), _stride(x)
    )
    if x.is_conj():
        alias = torch._conj(alias)
    return torch._neg_view(alias) if x.is_neg() else alias


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a CPU tensor on the simulated device, with the same strides."""
    spread = [d for d, (size, stride) in enumerate(zip(x.size(), x.stride(), strict=True)) if size > 1 and stride == 0]
    if spread:  # expanded: one element in many places
        narrow = x
        for d in spread:
            narrow = narrow.narrow(d, 0, 1)
        return to_device(narrow, device).expand(x.size())
    out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    host_alias(out).copy_(x.resolve_conj().resolve_neg())
    return out


def is_on_device(x: Any) -> bool:
    """Return whether ``x`` is a tensor on the simulated device."""
    return isinstance(x, torch.Tensor) and x.device.type == NPU


def on_each(function: Callable[[Any], Any], x: Any) -> Any:
    """``function`` of an operator's arguments or results, within lists and tuples of it too.

    `torch.utils._pytree.tree_map` does the same and takes 15 us, as long as small kernels.
    """
    return type(x)([on_each(function, y) for y in x]) if isinstance(x, (tuple, list)) else function(x)
