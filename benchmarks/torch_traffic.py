"""Counting collectives below all libraries, so that every version is counted in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.torch_versions import Version
from benchmarks.traffic import Traffic

__all__ = ["count_collectives", "count_passes"]

#: Names of the native collectives in tables, by the beginning of the native name.
_NAMES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "send": "send",
}
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
#: The argument that holds this rank's operand.
_GIVEN = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors")
_BACKEND_METHODS = {
    # name -> position of the argument that holds this rank's operand
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "_allgather_base": 1,
    "allgather": 1,
    "allgather_into_tensor_coalesced": 1,
    "_reduce_scatter_base": 1,
    "reduce_scatter": 1,
    "reduce_scatter_tensor_coalesced": 1,
    "alltoall_base": 1,
    "alltoall": 1,
    "broadcast": 0,
    "scatter": 1,
    "send": 0,
}


def _record(traffic: Traffic, native: str, given: Any) -> None:
    """Count one collective; those without a name here (barriers) do not count."""
    name = next((name for start, name in _NAMES.items() if native.startswith(start)), None)
    if name is not None:
        traffic.record(name, _bytes(given))


def _bytes(given: Any) -> int:
    if isinstance(given, (list, tuple)):
        return sum(_bytes(x) for x in given)
    with torch._C.DisableTorchFunctionSubclass():
        return given.numel() * given.element_size()


class _Watch(TorchDispatchMode):
    """Sees all calls through torch's dispatcher: functions and process groups, called from wherever."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, TorchDTensor) for t in types):
            return NotImplemented  # its operation comes back with local tensors
        if func.namespace in _NAMESPACES:
            for i, argument in enumerate(func._schema.arguments):
                if argument.name in _GIVEN:
                    _record(self.traffic, func.__name__, args[i])
                    break
        return func(*args, **(kwargs or {}))


@contextmanager
def _watch_backends(traffic: Traffic) -> Iterator[None]:
    """See calls of a backend object's methods, which do not go through the dispatcher."""
    backend = torch._C._distributed_c10d.Backend
    originals = {name: getattr(backend, name) for name in _BACKEND_METHODS if hasattr(backend, name)}

    def watched(name: str, original: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            _record(traffic, name, args[position])
            return original(self, *args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(backend, name, watched(name, original, _BACKEND_METHODS[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(backend, name, original)


@contextmanager
def count_collectives() -> Iterator[Traffic]:
    """Count the collectives that this rank issues inside. Models must not keep methods of a backend that they looked up
    before."""
    traffic = Traffic()
    with _watch_backends(traffic), _Watch(traffic):
        yield traffic


def count_passes(version: Version) -> tuple[Traffic, Traffic]:
    """Collectives in forward, and in forward and backward."""
    with count_collectives() as forward:
        version.forward()
    with count_collectives() as both:
        version.forward_and_backward()
    version.clear()
    return forward, both
