"""torch on the CPU, for a communication library that knows one collective: all-gather.

Everything about tensors, modules and autograd is inherited; a backend for another device of torch differs in its
collectives, and in what `hyper_parallel/platform/torch/cuda.py` differs in besides. What `supports` denies here, core
emulates, in one place, for every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.platform.torch.cpu import TorchCpuPlatform

__all__ = ["TorchGatherOnlyPlatform"]


class TorchGatherOnlyPlatform(TorchCpuPlatform):
    """`torch-gather-only`. Core must have `all_gather` of every backend; the other collectives may be missing,
    and are: a call of one of them would be a defect of core."""

    name = "torch-gather-only"

    def supports(self, collective: str, op: str, local: torch.Tensor) -> bool:
        """See `Platform.supports`."""
        return collective == "all_gather"

    def all_reduce(self, local: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        """See `Platform.all_reduce`; denied by `supports`."""
        raise _denied("all_reduce")

    def reduce_scatter(self, local: torch.Tensor, op: str, group: Any, size: int) -> torch.Tensor:
        """See `Platform.reduce_scatter`; denied by `supports`."""
        raise _denied("reduce_scatter")

    def all_to_all(self, local: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        """See `Platform.all_to_all`; denied by `supports`."""
        raise _denied("all_to_all")

    def broadcast(self, local: torch.Tensor, src: int, group: Any) -> torch.Tensor:
        """See `Platform.broadcast`; denied by `supports`."""
        raise _denied("broadcast")

    def scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor] | None, src: int, group: Any) -> torch.Tensor:
        """See `Platform.scatter`; denied by `supports`."""
        raise _denied("scatter")


def _denied(verb: str) -> RuntimeError:
    return RuntimeError(f"core called {verb}, which this backend says it does not support")
