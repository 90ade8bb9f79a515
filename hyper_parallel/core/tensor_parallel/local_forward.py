"""Parallel linear layers on plain tensors: the local operation and the collectives that the plan fixed, nothing else.

What a style does for a plain input and a local output needs no distributed tensor at run time: its parts are these.
Megatron's column- and row-parallel linear layers (Shoeybi et al. 2019), as functions of the module, so that a copy of
the module computes with its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.redistribute import linear_input_view
from hyper_parallel.core.dtensor.transitions import transitions_of

__all__ = ["column_forward", "row_forward"]


def column_forward(mesh: DeviceMesh) -> Callable[[Any, Any], Any]:
    """``local(module, x)``: x (..., in), the same on every rank -> this rank's features (..., out / ranks).

    The gradient of ``x`` is all-reduced, once for all such layers that read it.
    """
    platform = mesh.platform
    linear, no_dispatch, own_parameters = platform.linear, platform.no_dispatch, platform.own_parameters
    view = linear_input_view(mesh, (0,))

    def local(module: Any, x: Any) -> Any:
        weight, bias = _weight_and_bias(module, own_parameters(module))
        with no_dispatch():
            rows = view(x, weight)
            y = linear(rows, weight, bias)
            return y if rows.ndim == x.ndim else y.reshape((*x.shape[:-1], y.shape[-1]))

    return local


def row_forward(mesh: DeviceMesh) -> Callable[[Any, Any], Any]:
    """``local(module, x)``: x (..., in / ranks), this rank's features -> (..., out), the same on every rank, by one
    all-reduce; the bias is added afterwards, once."""
    platform = mesh.platform
    linear, no_dispatch, own_parameters = platform.linear, platform.no_dispatch, platform.own_parameters
    reduce = transitions_of(platform).sum_new(mesh, 0)

    def local(module: Any, x: Any) -> Any:
        weight, bias = _weight_and_bias(module, own_parameters(module))
        with no_dispatch():
            y = reduce(linear(x, weight, None))
            # Not the operator: Python would ask the class of the distributed bias first.
            return y if bias is None else y.add(bias)

    return local


def _weight_and_bias(module: Any, own: Mapping[str, Any]) -> tuple[Any, Any]:
    try:
        return own["weight"], own["bias"]
    except KeyError:  # something that computes them has taken their place
        return module.weight, module.bias
