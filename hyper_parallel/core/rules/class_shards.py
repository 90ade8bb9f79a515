"""The classes that a rank holds of plain logits, and a check that the classes of all ranks fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from hyper_parallel.core.communication.rank_check import check_of
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.mesh.slices import MESHES
from hyper_parallel.core.rules.labels import axis, without
from hyper_parallel.core.rules.loss import class_dim
from hyper_parallel.platform.contract import ClassShards

#: Functions that compute a loss of class-sharded plain logits, and the watchers that are called with each.
_LOSSES: list[Callable[..., Any]] = []
_WATCHERS: list[Callable[[Callable[..., Any]], None]] = []

#: mesh -> compared cases: (dim, vocab_size, local number of classes if vocab_size is None).
_COMPARED: WeakKeyDictionary[DeviceMesh, set[tuple[int, int | None, int]]] = WeakKeyDictionary()


def loss_of_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register the decorated function, which computes a loss of class-sharded plain logits."""
    _LOSSES.append(function)
    for watcher in _WATCHERS:
        watcher(function)
    return function


def watch_losses_of_shards(watcher: Callable[[Callable[..., Any]], None]) -> None:
    """Call ``watcher`` with each loss function of `loss_of_shards`, present or future (see
    `platform.contract.CompiledLosses`).

    Modules of losses are imported on demand, before or after the DTensor class is created.
    """
    _WATCHERS.append(watcher)
    for function in _LOSSES:
        watcher(function)


def layout_of_logits(
    local: tuple[int, ...], mesh: DeviceMesh, dim: int | None, vocab_size: int | None
) -> tuple[Layout, int]:
    """Return the layout of logits with local shape ``local`` on this rank, and their class dimension."""
    if not local:
        raise ValueError("local_logits need a dimension of classes, got a tensor without dimensions")
    shape, dim = list(local), class_dim(local) if dim is None else axis(dim, len(local))
    rank, size = mesh.get_local_rank(0), mesh.shape[0]
    compared = _COMPARED.setdefault(mesh, set())
    key = (dim, vocab_size, shape[dim] if vocab_size is None else 0)
    total = shape[dim] * size if vocab_size is None else vocab_size
    part, misfit = chunk_sizes(total, size)[rank], ""
    if shape[dim] != part:
        misfit = (
            f"rank {rank} of {size} holds {part} of {total} classes, but its local_logits of shape {tuple(shape)} "
            f"have {shape[dim]} in dimension {dim}. Pass vocab_size= for unequal shards, and dim=-1 for classes in "
            "the last dimension"
        )
    if key not in compared:
        # Only the rank that differs would detect the mismatch, and other ranks would wait for it. Compared once,
        # because it costs a collective.
        facts = {
            "the samples of local_logits": f"{without(shape, (dim,))} outside of dim={dim}",
            "the number of classes: pass vocab_size= for unequal shards": str(total),
            "the problem found": misfit or "nothing",
        }
        check_of(mesh).agree("vocab_parallel_cross_entropy", facts)
    if misfit:
        raise ValueError(misfit)
    compared.add(key)  # only after success, because keys of ranks differ if the shards do not fit
    shape[dim] = total
    return get_layout(mesh, (Shard(dim),), shape), dim


def mesh_with_id(number: int) -> DeviceMesh | None:
    """Return the mesh whose `id` is ``number``, or None."""
    return next((mesh for mesh in MESHES.values() if id(mesh) == number), None)


def class_shards(
    mesh: DeviceMesh, own: int, dim: int | None = None, vocab_size: int | None = None
) -> ClassShards | None:
    """Return the classes of this rank for compiled losses, with a function that compares all ranks. Return None if
    compiled losses do not support them."""
    if mesh.ndim != 1 or mesh.get_coordinate() is None:
        return None
    ranks, rank = mesh.size(), mesh.get_local_rank(0)
    total = own * ranks if vocab_size is None else vocab_size
    sizes = chunk_sizes(total, ranks)
    if 0 in sizes:
        return None

    def compare(_: str, shape: tuple[int, ...]) -> None:
        layout_of_logits(shape, mesh, dim, vocab_size)

    # If this rank's shard does not fit, which the others cannot know, the comparison raises on all ranks.
    offset = sum(sizes[:rank]) if sizes[rank] == own else 0
    return ClassShards(mesh.platform_group(0), ranks, total, offset, own, compare)
