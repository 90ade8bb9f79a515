"""Load balance of experts over all tokens of a batch: `tokens_per_expert` and `balance_loss`.

A balance loss multiplies the fraction of tokens of an expert by its mean probability. A product of means is not the
mean of products, so ranks cannot average their losses. A router bias that follows the load of each expert needs global
counts too. So ranks sum their token counts first.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.expert_calls import evenly, values_of

__all__ = ["balance_loss", "tokens_per_expert"]


def tokens_per_expert(indices: Any, num_experts: int, mesh: DeviceMesh) -> Any:
    """Count the tokens of each expert over all ranks of a mesh.

    This takes one all-reduce of ``num_experts + 2`` integers.

    Args:
        indices: plain integer tensor with the experts of this rank's tokens: (T, k) or any other shape.
        num_experts: number of experts, the same on all ranks.
        mesh: mesh of all ranks with different tokens: its dimensions are those of data and sequence parallelism.

    Returns:
        A plain int64 tensor (num_experts,) on the device of this rank, the same on all ranks.

    Raises:
        TypeError: for anything but a plain integer tensor.
        ValueError: on all ranks, if an index is out of range on any rank.

    Example:
        >>> import torch
        >>> from hyper_parallel import init_device_mesh, tokens_per_expert
        >>> tokens_per_expert(torch.tensor([[0, 2], [2, 1]]), 4, init_device_mesh("cpu", (1,))).tolist()
        [1, 1, 2, 0]
    """
    return _counts(indices, num_experts, mesh)[0]


def balance_loss(probabilities: Any, indices: Any, mesh: DeviceMesh, *, losses: int | None = None) -> Any:
    """Return this rank's part of the load-balance loss of the global batch.

    For each of E experts, its fraction of the routes is multiplied by its mean probability. The global loss is E times
    the sum of these products, and is 1 if the load is even. It equals the sum of the ranks' results, divided by
    ``losses``. The same holds for the gradients. Ranks may have different numbers of tokens. Forward has one
    all-reduce, backward none.

    Args:
        probabilities: plain tensor (T, E) with the router's probabilities for this rank's tokens.
        indices: plain integer tensor (T, k) with the experts that these tokens are routed to.
        mesh: mesh of all ranks with different tokens, as for `tokens_per_expert`.
        losses: number of losses over which gradients are averaged; default: one for each rank of the mesh. Ranks that
            share a sequence share a loss: on the flattened ("dp", "tp") give the size of "dp".

    Raises:
        TypeError: for ``indices`` that are not a plain integer tensor.
        ValueError: for ``probabilities`` that are not a plain 2-D tensor. On all ranks, if an index is out of range on
            any rank.

    Example:
        >>> import torch
        >>> from hyper_parallel import balance_loss, init_device_mesh
        >>> indices = torch.tensor([[0], [1], [2], [3]])
        >>> balance_loss(torch.full((4, 4), 0.25), indices, init_device_mesh("cpu", (1,)))
        tensor(1.)

    Source: Switch Transformers (Fedus et al. 2021), equation 4.
    """
    platform = mesh.platform
    if isinstance(probabilities, DTensor) or not platform.is_tensor(probabilities) or len(probabilities.shape) != 2:
        raise ValueError(
            "balance_loss takes the probabilities of this rank's tokens as a plain tensor (tokens, experts), got "
            f"{type(probabilities).__name__} of shape {tuple(getattr(probabilities, 'shape', ()))}. For DTensors, "
            "which represent the full batch, use the formula of a single device"
        )
    tokens, experts = platform.shape_of(probabilities)
    _, counts, total = _counts(indices, experts, mesh, tokens)
    weight = (mesh.size() if losses is None else losses) * experts / max(total, 1)
    shares = platform.to_device(platform.host_tensor(counts * (weight / max(counts.sum(), 1))))
    weighted = probabilities * platform.to_dtype(shares, probabilities.dtype)
    return platform.sum_along(weighted.reshape((-1,)), 0).reshape(())


def _counts(indices: Any, num_experts: int, mesh: DeviceMesh, tokens: int = 0) -> tuple[Any, np.ndarray, int]:
    """Return the global numbers of routes to each expert (as a tensor and as an array) and of tokens."""
    platform = mesh.platform
    if isinstance(indices, DTensor) or not platform.is_tensor(indices) or platform.is_floating_point(indices):
        raise TypeError(
            "the indices of experts must be a plain tensor of integers, for this rank's tokens, got "
            f"{type(indices).__name__}. For a DTensor, count indices.full_tensor() with the framework's bincount"
        )
    if platform.sends_nothing:  # a dry run has no values
        numbers = np.append(evenly(math.prod(platform.shape_of(indices)), num_experts), (0, tokens))
    else:
        found = values_of(indices, platform)
        inside = found[(found >= 0) & (found < num_experts)]
        numbers = np.append(np.bincount(inside, minlength=num_experts), (len(found) - len(inside), tokens))
    with platform.no_dispatch(), platform.no_grad():
        mine = platform.to_device(platform.host_tensor(numbers.astype(np.int64)))
        everywhere = collectives.all_reduce_over(mine, mesh, range(mesh.ndim))
        counted = numbers if platform.sends_nothing else values_of(everywhere, platform)
        if counted[-2]:
            raise ValueError(
                f"{counted[-2]} indices on the ranks of {mesh} are outside of 0 to num_experts - 1, for {num_experts} "
                "experts"
            )
        return platform.narrow(everywhere, 0, 0, num_experts), counted[:-2], int(counted[-1])
