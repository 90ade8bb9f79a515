"""Norms of distributed tensors from those of the parts that ranks hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from hyper_parallel.core.dtensor.communication import collectives
from hyper_parallel.platform.torch.tensor import layout_of

__all__ = ["combined", "neutral", "reduced"]

_SHORT = (torch.float16, torch.bfloat16)


def reduced(x: Any) -> Any:
    """``x``; if it is distributed and a partial sum, the sum. Interception is on."""
    layout = layout_of(x)
    if layout is None or layout.cotangent is layout:
        return x
    return x.redistribute(placements=list(layout.cotangent.placements))


def neutral(order: float) -> float:
    """The element that does not count in a norm of this order."""
    return math.inf if order < 0 else 0.0


def combined(norms: torch.Tensor, mesh: Any, mesh_dims: Iterable[int], order: float) -> torch.Tensor:
    """Norms of whole tensors, by one all-reduce for each of the mesh dimensions. Interception is off.

    Args:
        norms: norms of what this rank holds, of any shape; may be overwritten.
        mesh: over which the tensors are distributed.
        mesh_dims: dimensions of it along which ranks hold different parts.
        order: any that `torch.linalg.vector_norm` has for vectors. Of order 0 are numbers of elements.
    """
    dtype = norms.dtype
    # In 16 bits, squares overflow early.
    values = norms.float() if dtype in _SHORT else norms
    if math.isinf(order):
        return _extreme(values, mesh, mesh_dims, 1 if order > 0 else -1).to(dtype)
    is_sum = order in (0, 1)
    powers = values if is_sum else values.pow(order)
    for mesh_dim in mesh_dims:
        powers = collectives.all_reduce(powers, mesh, mesh_dim, "sum")
    return (powers if is_sum else powers.pow(1.0 / order)).to(dtype)


def _extreme(values: torch.Tensor, mesh: Any, mesh_dims: Iterable[int], sign: int) -> torch.Tensor:
    """The largest or smallest, and NaN where some rank has NaN: which one a maximum of NaN and a number is, backends do
    not agree on."""
    is_nan = values.isnan()
    both = torch.stack([(values * sign).masked_fill(is_nan, -math.inf), is_nan.to(values.dtype)])
    for mesh_dim in mesh_dims:
        both = collectives.all_reduce(both, mesh, mesh_dim, "max")
    return (both[0] * sign).masked_fill(both[1] > 0, math.nan)
