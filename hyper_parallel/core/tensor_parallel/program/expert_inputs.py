"""Conversion of an expert module's arguments to tokens that differ between ranks, and of its results back.

The tokens are shards of DTensors, or of replicated plain tensors. If each expert is itself sharded over some ranks,
these ranks need the same tokens, and sum their partial results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.modes import SUMMED_OVER
from hyper_parallel.core.tensor_parallel.program.expert_calls import like, values_of

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["Inputs", "parts_of_batch", "parts_of_whole", "whole_for_summands"]


class Inputs(NamedTuple):
    """Plain arguments of an expert module after a conversion, and the function that converts its result back.

    Attributes:
        args, kwargs: the arguments.
        back: function from the module's plain result to the result before the conversion.
        mesh: mesh of the tensors that were converted.
    """

    args: tuple
    kwargs: dict
    back: Callable[[Any], Any]
    mesh: DeviceMesh


def parts_of_batch(
    args: tuple, kwargs: dict, mesh: DeviceMesh, tp: DeviceMesh | None, count: int, name: str
) -> Inputs | None:
    """Return this rank's shards of arguments that are DTensors, or None if all arguments are plain.

    Tokens are sharded along the dimensions of data parallelism and of the experts. They are replicated along other mesh
    dimensions.

    Args:
        args, kwargs: the arguments; the first is the tokens.
        mesh: mesh of the style.
        tp: tensor-parallel mesh of the style, or None.
        count: global number of experts.
        name: name of the module in messages.

    Raises:
        ValueError: for a mix of plain tensors and DTensors, DTensors on several meshes, or DTensors on ranks over which
            no data-parallel unit sums gradients.
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
            f"{name} is called with tensors of different placements, {lie}: pass plain tensors, or DTensors on one "
            f"mesh with the ranks of {mesh}"
        )
    wanted = tuple(_placement(batch.slices.at((mesh_dim,)), mesh, name) for mesh_dim in range(batch.ndim))
    return _cut(args, kwargs, get_layout(batch, wanted, layouts[0].shape), count)


def parts_of_whole(args: tuple, kwargs: dict, mesh: DeviceMesh, count: int) -> Inputs:
    """Return this rank's shards of replicated plain arguments. The converted result is replicated too.

    Args:
        args, kwargs: the arguments; the first is the tokens.
        mesh: mesh over which the arguments are replicated.
        count: global number of experts.
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
    """Return replicated plain arguments for ranks that each compute a partial result.

    Results are all-reduced in forward, and gradients of the arguments in backward.

    Args:
        args, kwargs: the arguments.
        mesh: mesh over which the arguments are replicated.
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
    """Return this rank's shards of DTensors in the placements of ``tokens``; ``back`` makes a DTensor of shards."""
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
    """Return the placement of tokens along one dimension of the batch's mesh.

    Args:
        dim: 1-D mesh of the dimension.
        mesh: mesh of the style, over which gradients of experts are summed.
        name: name of the module in messages.
    """
    summed = SUMMED_OVER.get()
    over = [mesh] if summed is None else [mesh, summed, mesh.slices.union([summed])]
    if any(one is not None and one.spans(dim) for one in over):
        return Shard(0)
    if all(one is None or dim.is_beside(one) for one in over):
        return Replicate()
    raise ValueError(
        f"{name} is called with DTensors on {dim}, but its experts are on {mesh}, so their gradients would not be "
        f"summed over all ranks of the input. Apply fully_shard or replicate to {name} over the dimensions that "
        f"{mesh} lacks, or pass DTensors on {mesh}"
    )


def _own_counts(counts: Any, tokens: Layout) -> Any:
    """Return the number of this rank's rows of each expert.

    Args:
        counts: plain tensor with the global number of rows of each expert. Rows are sorted by expert.
        tokens: layout of the rows.
    """
    platform = tokens.mesh.platform
    if platform.sends_nothing:
        return counts
    numbers = values_of(counts, platform)
    if (numbers < 0).any():
        return counts  # `read_call` refuses negative counts
    ends = np.cumsum(numbers)
    first = tokens.local_offset[0]
    last = first + tokens.local_shape[0]
    return like(np.clip(np.minimum(ends, last) - np.maximum(ends - numbers, first), 0, None), counts, platform)
