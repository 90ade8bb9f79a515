"""Balance of experts over all tokens of a batch: `tokens_per_expert` and `balance_loss`.

A loss of balance is no mean of the losses of the ranks. It multiplies the share of an expert in all tokens by its mean
probability. A product of means is no mean of products. Signs, by which a bias follows the shares, are no sums over
ranks either. So ranks first add up their numbers.
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
    """Count the tokens of each expert over the ranks of a mesh, by one all-reduce of ``num_experts + 2`` integers.

    Args:
        indices: plain integer tensor with the experts of this rank's tokens, (T, k) or of any other shape.
        num_experts: number of experts, the same on all ranks.
        mesh: over all ranks that have tokens of their own: of data parallelism, and of sequence parallelism.

    Returns:
        A plain int64 tensor (num_experts,) on this rank's device, the same on all ranks.

    Raises:
        TypeError: for a tensor that is no plain one of integers.
        ValueError: on all ranks, for an index outside on any of them.

    Example:
        >>> import torch
        >>> from hyper_parallel import init_device_mesh, tokens_per_expert
        >>> tokens_per_expert(torch.tensor([[0, 2], [2, 1]]), 4, init_device_mesh("cpu", (1,))).tolist()
        [1, 1, 2, 0]
    """
    return _counts(indices, num_experts, mesh)[0]


def balance_loss(probabilities: Any, indices: Any, mesh: DeviceMesh, *, losses: int | None = None) -> Any:
    """This rank's share in the loss of balance of the whole batch. That is E times the sum over the experts of their
    share of the routes times their mean probability: 1 where all is even.

    The gradients of all ranks together are those of the single device, whatever the numbers of their tokens. The value
    is that of the single device in the mean over ranks. One all-reduce, and none in backward.

    Args:
        probabilities: plain tensor (T, E) of the router for this rank's tokens.
        indices: plain integer tensor (T, k) with the experts that they go to.
        mesh: as for `tokens_per_expert`.
        losses: of how many losses of ranks the gradients are averages: by default one for each rank of the mesh.
            Ranks that share a sequence share a loss. So over the flattened ("dp", "tp") give the size of "dp".

    Raises:
        TypeError, ValueError: as `tokens_per_expert`. ValueError also for other shapes.

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
            f"{type(probabilities).__name__} of shape {tuple(getattr(probabilities, 'shape', ()))}. DTensors are of "
            "the whole batch: the formula of a single device is right for them"
        )
    tokens, experts = platform.shape_of(probabilities)
    _, counts, total = _counts(indices, experts, mesh, tokens)
    weight = (mesh.size() if losses is None else losses) * experts / max(total, 1)
    shares = platform.to_device(platform.host_tensor(counts * (weight / max(counts.sum(), 1))))
    weighted = probabilities * platform.to_dtype(shares, probabilities.dtype)
    return platform.sum_along(weighted.reshape((-1,)), 0).reshape(())


def _counts(indices: Any, num_experts: int, mesh: DeviceMesh, tokens: int = 0) -> tuple[Any, np.ndarray, int]:
    """The routes to each expert, as a tensor and on the host, and the tokens, of all ranks."""
    platform = mesh.platform
    if isinstance(indices, DTensor) or not platform.is_tensor(indices) or platform.is_floating_point(indices):
        raise TypeError(
            f"the experts of this rank's tokens are a plain tensor of integers, got {type(indices).__name__}: of a "
            "DTensor, of the whole batch, count those of indices.full_tensor() with the framework's bincount"
        )
    if platform.sends_nothing:  # and has no values
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
            raise ValueError(f"{counted[-2]} indices on the ranks of {mesh} are of none of {num_experts} experts")
        return platform.narrow(everywhere, 0, 0, num_experts), counted[:-2], int(counted[-1])
