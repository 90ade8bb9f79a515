"""Tokens of each rank's own for a module of experts, and how results are put together.

They are parts of DTensors, or of plain tensors that ranks hold in common. Ranks among which each expert is cut need
the same tokens instead, and add up their results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.program.distributed_batches import SUMMED_OVER
from hyper_parallel.core.tensor_parallel.program.expert_calls import like, values_of

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["Inputs", "parts_of_batch", "parts_of_whole", "whole_for_summands"]


class Inputs(NamedTuple):
    """Arguments with which a module of experts is called.

    Attributes:
        args, kwargs: the arguments, plain.
        back: function of the plain result for these, which gives that for the caller.
        mesh: of the DTensors or plain tensors that they were made of.
    """

    args: tuple
    kwargs: dict
    back: Callable[[Any], Any]
    mesh: DeviceMesh


def parts_of_batch(
    args: tuple, kwargs: dict, mesh: DeviceMesh, tp: DeviceMesh | None, count: int, name: str
) -> Inputs | None:
    """This rank's parts of arguments that are DTensors; None where all are plain.

    Along dimensions of data parallelism and of the experts each rank gets a part of the tokens. Along others its tokens
    are those of its neighbours.

    Args:
        args, kwargs: the arguments, of which the tokens come first.
        mesh: of the style.
        tp: of tensor parallelism, where the style has that.
        count: number of experts.
        name: names the module in messages.

    Raises:
        ValueError: for plain tensors and DTensors at once, and DTensors of several meshes, or of one over whose other
            ranks no unit sums gradients.
    """
    tensors = [x for x in (*args, *kwargs.values()) if mesh.platform.is_tensor(x)]
    layouts = [x._layout for x in tensors if isinstance(x, DTensor)]
    if not layouts:
        return None
    batch: DeviceMesh = layouts[0].mesh
    both = batch if tp is None else batch.slices.union([tp]) or batch
    if (
        len(layouts) != len(tensors)
        or not set(both.ranks.ravel().tolist()).issuperset(mesh.ranks_along(0))
        or any(layout.mesh is not batch for layout in layouts)
    ):
        lie = [f"{list(x.placements)} on {x.device_mesh}" if isinstance(x, DTensor) else "plain" for x in tensors]
        raise ValueError(
            f"{name} is called with tensors that lie as {lie}: give plain tensors, or DTensors of one mesh with the "
            f"ranks of {mesh}"
        )
    wanted = tuple(_placement(batch.slices.at((mesh_dim,)), mesh, name) for mesh_dim in range(batch.ndim))
    return _cut(args, kwargs, get_layout(batch, wanted, layouts[0].shape), count)


def parts_of_whole(args: tuple, kwargs: dict, mesh: DeviceMesh, count: int) -> Inputs:
    """This rank's parts of plain arguments that are the same on all ranks, as the result is to be.

    Args:
        args, kwargs: the arguments, of which the tokens come first.
        mesh: of these ranks.
        count: number of experts.
    """

    def known(x: Any) -> Any:
        return DTensor.from_local(x, mesh, (Replicate(),)) if mesh.platform.is_tensor(x) else x

    args, kwargs = tuple(map(known, args)), {key: known(x) for key, x in kwargs.items()}
    first = next(x for x in (*args, *kwargs.values()) if isinstance(x, DTensor))
    parts = _cut(args, kwargs, get_layout(mesh, (Shard(0),), first._layout.shape), count)

    def whole(y: Any) -> Any:
        return parts.back(y).redistribute(placements=(Replicate(),)).to_local()

    return parts._replace(back=whole)


def whole_for_summands(args: tuple, kwargs: dict, mesh: DeviceMesh) -> Inputs:
    """Plain arguments that are the same on all ranks, each of which computes a summand of the result.

    Args:
        args, kwargs: the arguments.
        mesh: of these ranks.
    """
    platform = mesh.platform

    def read(x: Any) -> Any:
        if not platform.is_tensor(x) or not platform.is_floating_point(x):
            return x
        return DTensor.from_local(x, mesh, (Replicate(),)).to_local(grad_placements=(Partial(),))

    def summed(y: Any) -> Any:
        return DTensor.from_local(y, mesh, (Partial(),)).redistribute(placements=(Replicate(),)).to_local()

    return Inputs(tuple(map(read, args)), {key: read(x) for key, x in kwargs.items()}, summed, mesh)


def _cut(args: tuple, kwargs: dict, tokens: Layout, count: int) -> Inputs:
    """This rank's parts of DTensors, as the ``tokens`` are to lie, and the function that makes a DTensor of parts."""
    placements, everywhere = tokens.placements, [Replicate()] * tokens.mesh.ndim

    def part(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        if x._layout.shape == (count,):
            return _own_counts(x.redistribute(placements=everywhere).to_local(), tokens)
        return x.redistribute(placements=placements).to_local()

    def joined(y: Any) -> Any:
        return DTensor._of_part(y, get_layout(tokens.mesh, placements, (tokens.shape[0], *y.shape[1:])))

    return Inputs(tuple(map(part, args)), {key: part(x) for key, x in kwargs.items()}, joined, tokens.mesh)


def _placement(dim: DeviceMesh, mesh: DeviceMesh, name: str) -> Placement:
    """How tokens are to lie along a dimension of the mesh of a batch.

    Args:
        dim: the dimension, a mesh.
        mesh: of the style, over which gradients of experts are summed.
        name: names the module in messages.
    """
    summed = SUMMED_OVER.get()
    over = [mesh] if summed is None else [mesh, summed, mesh.slices.union([summed])]
    if any(one is not None and one.spans(dim) for one in over):
        return Shard(0)
    if all(one is None or dim.is_beside(one) for one in over):
        return Replicate()
    raise ValueError(
        f"{name} is called with DTensors on {dim}, and gradients of its experts, on {mesh}, are not summed over all of "
        "these ranks: apply fully_shard or replicate to it over the others, or give DTensors of its mesh"
    )


def _own_counts(counts: Any, tokens: Layout) -> Any:
    """How many of this rank's rows go to each expert.

    Args:
        counts: plain tensor of the numbers of all rows, which lie in the order of the experts.
        tokens: how the rows lie.
    """
    platform = tokens.mesh.platform
    if platform.sends_nothing:
        return counts
    numbers = values_of(counts, platform)
    if (numbers < 0).any():
        return counts  # which is refused
    ends = np.cumsum(numbers)
    first = tokens.local_offset[0]
    last = first + tokens.local_shape[0]
    return like(np.clip(np.minimum(ends, last) - np.maximum(ends - numbers, first), 0, None), counts, platform)
