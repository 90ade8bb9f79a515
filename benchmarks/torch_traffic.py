"""Counting collectives below all libraries, so that every version is counted in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Traffic", "count_collectives"]

#: What the native names are called in tables, by what they begin with.
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
}
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
#: The argument that holds what this rank gives.
_GIVEN = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors")
_BACKEND_METHODS = {
    # name -> position of the argument that holds what this rank gives
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
}


@dataclass
class Traffic:
    """Collectives that one rank issued.

    Attributes:
        counts: name -> how many.
        sizes: name -> bytes of the tensors that this rank gave to them.
    """

    counts: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> tuple[int, int]:
        """Number of all, and bytes given to all."""
        return sum(self.counts.values()), sum(self.sizes.values())

    def __str__(self) -> str:
        return ", ".join(f"{n} {name} ({self.sizes[name]} B)" for name, n in sorted(self.counts.items())) or "none"

    def record(self, native: str, given: Any) -> None:
        """Count one collective; those without a name here (barriers) do not count."""
        name = next((name for start, name in _NAMES.items() if native.startswith(start)), None)
        if name is not None:
            self.counts[name] = self.counts.get(name, 0) + 1
            self.sizes[name] = self.sizes.get(name, 0) + _bytes(given)


def _bytes(given: Any) -> int:
    if isinstance(given, (list, tuple)):
        return sum(_bytes(x) for x in given)
    with torch._C.DisableTorchFunctionSubclass():
        return given.numel() * given.element_size()


class _Watch(TorchDispatchMode):
    """Sees what goes through torch's dispatcher: functions and process groups, called from wherever."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, TorchDTensor) for t in types):
            return NotImplemented  # its operation comes back with local tensors
        if func.namespace in _NAMESPACES:
            for i, argument in enumerate(func._schema.arguments):
                if argument.name in _GIVEN:
                    self.traffic.record(func.__name__, args[i])
                    break
        return func(*args, **(kwargs or {}))


@contextmanager
def _watch_backends(traffic: Traffic) -> Iterator[None]:
    """See calls of a backend object's methods, which do not go through the dispatcher."""
    backend = torch._C._distributed_c10d.Backend
    originals = {name: getattr(backend, name) for name in _BACKEND_METHODS if hasattr(backend, name)}

    def watched(name: str, original: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            traffic.record(name, args[position])
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
    """Count what this rank issues inside. Models must not keep methods of a backend that they looked up before."""
    traffic = Traffic()
    with _watch_backends(traffic), _Watch(traffic):
        yield traffic
