"""Random numbers in modules that receive this rank's shard of a distributed batch: draws cover the full batch.

On the mesh ("dp", "tp"), a module with a style on ``mesh["tp"]`` receives this rank's shard of the batch. The batch is
distributed over ``mesh["dp"]``, but its tensors have layouts on ``mesh["tp"]`` only. Each data-parallel rank draws the
numbers of the full batch, and takes those of its samples.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import NamedTuple

from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["BATCH_PART", "BatchPart", "Place", "own_place", "place_of", "refuse_part"]


class BatchPart(NamedTuple):
    """This rank's samples of a batch.

    Attributes:
        mesh: mesh of the style of the module that receives them.
        dim: the batch dimension.
        samples: number of samples that the module receives. It is at least 1: a rank without samples gets one of zeros.
        start: index of the first sample in the full batch.
        whole: number of samples in the full batch.
    """

    mesh: DeviceMesh
    dim: int
    samples: int
    start: int
    whole: int


class Place(NamedTuple):
    """The position of a local shard in the tensor for which random numbers are drawn.

    Attributes:
        shape: shape of that tensor.
        ranges: (start, length) ranges of the shard, for each dimension.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]


#: The samples of the running module; None outside modules that receive a shard of a batch.
BATCH_PART: ContextVar[BatchPart | None] = ContextVar("hyper_parallel_batch_part", default=None)

#: Meshes whose last forward drew numbers for a shard of a batch.
_DRAWN: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def own_place(layout: Layout) -> Place:
    """Return the position of the local shard in the tensor of ``layout`` itself."""
    return Place(tuple(layout.shape), layout.local_ranges())


def place_of(layout: Layout, name: str) -> Place:
    """Return the position of a tensor's local shard in the tensor for which random numbers are drawn. Under data
    parallelism, that is the tensor of the full batch.

    Args:
        layout: layout of the tensor inside the running module.
        name: name of the operation, for errors.

    Raises:
        ValueError: for a tensor without the batch dimension, and when the module of the batch is not known any more.
    """
    (shape, ranges), mesh = own_place(layout), layout.mesh
    part = BATCH_PART.get()
    if part is None or part.mesh is not mesh:
        if mesh in _DRAWN:
            if mesh.platform.in_backward():
                raise ValueError(
                    f"{name} of a shard of a batch is recomputed in backward, where the position of the shard is "
                    "unknown. Recompute the whole module that the plan names, or a module around it, and not a module "
                    "inside"
                )
            _DRAWN.discard(mesh)
        return Place(shape, ranges)
    _DRAWN.add(mesh)
    dim = part.dim
    if len(shape) <= dim or shape[dim] != part.samples:
        raise refuse_part(name, f"a tensor of shape {shape}, which has no dimension {dim} of {part.samples} samples,")
    moved = tuple((start + part.start, length) for start, length in ranges[dim])
    return Place((*shape[:dim], part.whole, *shape[dim + 1 :]), (*ranges[:dim], moved, *ranges[dim + 1 :]))


def refuse_part(name: str, what: str) -> ValueError:
    """Return the error for numbers that cannot be drawn for the full batch."""
    return ValueError(
        f"{name} of {what} is inside a module of the plan, which gets this rank's shard of a distributed batch. Other "
        "data-parallel ranks would draw the same numbers for other samples. Add a style for the dropout itself, such "
        "as SequenceParallel(), or remove the style around it, or call the model with plain tensors"
    )
