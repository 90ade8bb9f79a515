"""Parallel linear layers on plain tensors: the local operation and the collectives that the plan fixed, nothing else.

What a style does for a plain input and a local output needs no distributed tensor at run time: its parts are these.
Megatron's column- and row-parallel linear layers (Shoeybi et al. 2019), as functions of the module, so that a copy of
the module computes with its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate
from hyper_parallel.core.dtensor.redistribute import plain_partial_grad_view
from hyper_parallel.core.dtensor.transitions import Step, transitions_of

__all__ = ["column_forward", "row_forward"]


def column_forward(mesh: DeviceMesh) -> Callable[[Any, Any], Any]:
    """``local(module, x)``: x (..., in), the same on every rank -> this rank's features (..., out / ranks).

    The gradient of ``x`` is all-reduced, once for all such layers that read it.
    """
    platform, dims = mesh.platform, (0,)
    linear, no_dispatch = platform.linear, platform.no_dispatch

    def local(module: Any, x: Any) -> Any:
        with no_dispatch():
            return linear(plain_partial_grad_view(x, mesh, dims), module.weight, module.bias)

    return local


def row_forward(mesh: DeviceMesh) -> Callable[[Any, Any], Any]:
    """``local(module, x)``: x (..., in / ranks), this rank's features -> (..., out), the same on every rank, by one
    all-reduce; the bias is added afterwards, once."""
    platform = mesh.platform
    linear, no_dispatch = platform.linear, platform.no_dispatch
    run = transitions_of(platform).run
    reduce = Step(mesh, 0, Partial(), Replicate(), (), (), None)

    def local(module: Any, x: Any) -> Any:
        with no_dispatch():
            y = run(linear(x, module.weight, None), reduce)
            bias = module.bias
            # Not the operator: Python would ask the class of the distributed bias first.
            return y if bias is None else y.add(bias)

    return local
