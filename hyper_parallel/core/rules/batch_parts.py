"""Random numbers inside of modules that get this rank's part of a distributed batch: they are drawn for all of it.

On the mesh ("dp", "tp"), a module whose style works on ``mesh["tp"]`` gets this rank's part of the batch. That batch is
distributed over ``mesh["dp"]``. Its tensors have layouts on ``mesh["tp"]`` alone. Each data-parallel rank draws the
numbers of the whole batch, and takes those of its samples.
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
        mesh: of the style whose module runs on them.
        dim: the dimension of the samples.
        samples: how many the module gets: at least 1, one of zeros where the rank has none.
        start: the first of them in the whole batch.
        whole: how many the batch has.
    """

    mesh: DeviceMesh
    dim: int
    samples: int
    start: int
    whole: int


class Place(NamedTuple):
    """The place of the local part of a tensor in the tensor that numbers are drawn for.

    Attributes:
        shape: of that tensor.
        ranges: for each dimension the (start, length) of the pieces.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]


#: The part of a batch that the module which runs has; None outside of such modules.
BATCH_PART: ContextVar[BatchPart | None] = ContextVar("hyper_parallel_batch_part", default=None)

#: Meshes on which a forward drew last for a part of a batch.
_DRAWN: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def own_place(layout: Layout) -> Place:
    """The place of the local part in the tensor of ``layout`` itself."""
    return Place(tuple(layout.shape), layout.local_ranges())


def place_of(layout: Layout, name: str) -> Place:
    """The place of a tensor's local part in the numbers that are drawn for it.

    Args:
        layout: of the tensor, inside of the module that runs.
        name: of the operation, for errors.

    Raises:
        ValueError: for a tensor that may or may not be of the batch, and where the module that has the part of the
            batch is not known any more.
    """
    (shape, ranges), mesh = own_place(layout), layout.mesh
    part = BATCH_PART.get()
    if part is None or part.mesh is not mesh:
        if mesh in _DRAWN:
            if mesh.platform.in_backward():
                raise ValueError(
                    f"{name} of a part of a batch is computed again in backward, which does not know the place of "
                    "the part in the batch: let the whole module that the plan names be computed again, or a module "
                    "around it, and not something inside of it"
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
    """The error for numbers that cannot be drawn for the whole batch."""
    return ValueError(
        f"{name} of {what} is inside of a module of the plan that gets this rank's part of a distributed batch, and "
        "other data-parallel ranks would draw the same numbers for their samples: give the dropout a style of its own, "
        "as SequenceParallel(), or none, or call the model with plain tensors"
    )
