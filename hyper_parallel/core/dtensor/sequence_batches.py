"""Batches whose sequences are sharded over ranks: `shard_sequence` for inputs, `token_mean` for the loss."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.collectives import all_reduce_over
from hyper_parallel.core.communication.parts import numbers_of_ranks
from hyper_parallel.core.communication.rank_check import check_of
from hyper_parallel.core.dtensor.context_parallel import check_mesh
from hyper_parallel.core.dtensor.plain_attention import ranges_on
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.rules.sequence_cut import moved
from hyper_parallel.core.weak_table import WeakTable
from hyper_parallel.platform.contract.autograd import named

__all__ = ["brings_positions", "shard_sequence", "token_mean"]

#: Name of an input of Hugging Face models -> its sequence dimension, or None if the tensor is not sharded.
_DIMS: Mapping[str, int | None] = {"attention_mask": None, "position_ids": -1}
#: mesh -> True once its ranks have compared a batch.
_COMPARED = WeakTable()
#: mesh -> True once a batch has brought positions of its own.
_BROUGHT = WeakTable()
#: mesh -> True once its ranks have compared losses of `token_mean`.
_COMPARED_LOSSES = WeakTable()


def shard_sequence(
    batch: Mapping[str, Any],
    mesh: DeviceMesh,
    *,
    seq_dims: Mapping[str, int | None] | None = None,
    labels: str | None = "labels",
    positions: str | None = "position_ids",
    ignore_index: int = -100,
    balance: bool = True,
) -> dict[str, Any]:
    """Shard the sequences of a batch over the ranks of a mesh, for code inside `context_parallel`.

    Labels are shifted over the full sequence before sharding. Each position gets the label of the next token, even if
    another rank holds that token. The last position gets ``ignore_index``.

    Args:
        batch: tensors by name, with the same full sequences on all ranks of the mesh. Other values are returned
            unchanged.
        mesh: a 1-D mesh.
        seq_dims: the sequence dimension of each tensor by name, or None if the tensor is not sharded. Defaults: None
            for ``attention_mask``, -1 for ``position_ids``, and 1 for other names.
        labels: name of the labels to shift; None for no shift.
        positions: name of the positions that are added if the batch has none, of shape (1, local length). None adds no
            positions.
        ignore_index: label of ignored positions.
        balance: the argument of `context_parallel`.

    Returns:
        A new dict with this rank's shards.

    Raises:
        TypeError: when ``mesh`` is not a mesh, or a tensor is distributed.
        ValueError: for tensors of different sequence lengths, a batch without a sequence, and a length that leaves a
            rank empty.
        RankMismatchError: in the first call, when ranks passed different batches.

    Example:
        >>> import torch
        >>> from hyper_parallel import init_device_mesh, shard_sequence
        >>> ids = torch.arange(4).reshape(1, 4)
        >>> shard_sequence({"input_ids": ids, "labels": ids}, init_device_mesh("cpu", (1,)))["labels"]
        tensor([[   1,    2,    3, -100]])
    """
    check_mesh(mesh, "shard_sequence")
    platform = bind_platform(mesh.platform)
    dims = _dims_of(batch, {**_DIMS, **(seq_dims or {})}, platform)
    length = _length_of(batch, dims, mesh)
    _compare(batch, mesh, platform)
    mesh._has_uneven_shards |= length % mesh.size() != 0
    if positions in batch:
        _BROUGHT.set(mesh, True)
    whole, own = ((0, length),), ranges_on(mesh, length, balance)[mesh.get_local_rank(0)]
    found = dict(batch)
    with platform.no_dispatch():
        for name, dim in dims.items():
            x = batch[name]
            if name == labels:
                last = [*platform.shape_of(x)]
                last[dim] = 1
                nothing = platform.full(last, ignore_index, x)
                x = platform.cat([platform.narrow(x, dim, 1, length - 1), nothing], dim)
            found[name] = platform.contiguous(moved(x, dim, whole, own, platform))
        if positions is not None and positions not in batch:
            like = batch[next(iter(dims))]
            places = np.concatenate([np.arange(start, start + n) for start, n in own])
            found[positions] = platform.places(places, like).reshape((1, len(places)))
    return found


def brings_positions(mesh: DeviceMesh) -> bool:
    """Return whether `shard_sequence` has sharded a batch with positions of its own. All ranks of the mesh agree."""
    return _BROUGHT.get(mesh) is not None


def _dims_of(batch: Mapping[str, Any], wanted: Mapping[str, int | None], platform: Any) -> dict[str, int]:
    """Return the sequence dimension of each tensor to shard."""
    found = {}
    for name, x in batch.items():
        dim = wanted.get(name, 1)
        if not platform.is_tensor(x) or dim is None:
            continue
        if isinstance(x, DTensor):
            raise TypeError(
                f"shard_sequence takes plain tensors, but {name!r} is a DTensor: call shard_sequence before "
                "distribute_tensor"
            )
        shape = tuple(platform.shape_of(x))
        if not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"shard_sequence: {name!r} has shape {shape} and no dimension {dim}: name the sequence dimension with "
                f"seq_dims={{{name!r}: ...}}, or None to keep the tensor unsharded"
            )
        found[name] = dim % len(shape)
    return found


def _length_of(batch: Mapping[str, Any], dims: Mapping[str, int], mesh: DeviceMesh) -> int:
    """Return the length of the sequence. Raise unless all tensors have one length and every rank gets positions."""
    lengths = {name: int(mesh.platform.shape_of(batch[name])[dim]) for name, dim in dims.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"shard_sequence: all tensors must have one sequence length, got {lengths}: name the sequence dimensions "
            "with seq_dims, or None to keep a tensor unsharded"
        )
    (length,) = set(lengths.values())
    sizes = chunk_sizes(length, mesh.size())
    if 0 in sizes:
        raise ValueError(
            f"shard_sequence: {length} positions over {mesh.size()} ranks give shards of {list(sizes)} positions, but "
            "plain layers need at least one position on each rank. Pad the sequences to a multiple of the number of "
            "ranks, with ignored labels"
        )
    return length


def _compare(batch: Mapping[str, Any], mesh: DeviceMesh, platform: Any) -> None:
    """Compare the batches of all ranks, in the first call and inside `check_ranks`."""
    if mesh.size() == 1 or (_COMPARED.get(mesh) is not None and not CHECKS):
        return
    facts = {}
    for name, x in batch.items():
        if platform.is_tensor(x):
            facts[f"the shape of {name!r}"] = f"{tuple(platform.shape_of(x))} of {x.dtype}"
            if platform.has_values(x):
                facts[f"the values of {name!r}"] = f"digest {hashlib.sha256(platform.bytes_of(x)).hexdigest()[:12]}"
    check_of(mesh).agree(
        "a call of shard_sequence",
        row=mesh.ranks_along(0),
        row_facts=facts,
        remedy=f"the ranks of {mesh} shard one batch: pass the same sequences on all these ranks. Pass the size and "
        "rank of the data-parallel mesh to the sampler, never those of the world",
    )
    _COMPARED.set(mesh, True)


def token_mean(losses: Any, labels: Any, mesh: DeviceMesh, *, ignore_index: int = -100, averaged: bool = True) -> Any:
    """Return the mean loss over all tokens of all ranks, without ignored tokens, as a single device computes it.

    Forward does one all-reduce of two numbers along each dimension of the mesh, and backward does not communicate.

    Args:
        losses: one loss for each label, and zero for ignored labels, as cross entropy with ``reduction="none"``
            returns. A plain tensor, or a DTensor on mesh dimensions outside ``mesh``, as from tensor-parallel logits.
        labels: this rank's labels, plain.
        mesh: mesh of all ranks that hold different tokens: ``mesh["dp", "cp"]``.
        ignore_index: label of ignored positions.
        averaged: whether data parallelism averages parameter gradients over the ranks of ``mesh``, as `replicate` and
            `fully_shard` do for plain batches. Otherwise gradients must be summed.

    Returns:
        A plain 0-d tensor, equal on all ranks of ``mesh``, at least in float32.

    Raises:
        TypeError: for distributed labels, and when ``mesh`` is not a mesh.
        ValueError: on all ranks, when the losses do not match the labels; for losses that are distributed over ranks of
            ``mesh``.

    Example:
        >>> import torch
        >>> from hyper_parallel import init_device_mesh, token_mean
        >>> token_mean(torch.tensor([1.0, 3.0, 0.0]), torch.tensor([5, 6, -100]), init_device_mesh("cpu", (1,)))
        tensor(2.)
    """
    mesh = resolve_mesh(mesh, "token_mean")
    mesh.require_member("token_mean")
    platform = bind_platform(mesh.platform)
    if isinstance(labels, DTensor):
        raise TypeError("token_mean takes the plain labels of this rank, got a DTensor: pass labels.to_local()")
    if isinstance(losses, DTensor):
        if not losses.device_mesh.is_beside(mesh):
            raise ValueError(
                f"token_mean sums losses over {mesh}, but the losses are distributed over {losses.device_mesh}: use "
                "the framework's mean of DTensors, or pass losses.to_local()"
            )
        losses = losses.full_tensor()
    with platform.no_dispatch():
        _check_losses(losses, labels, mesh)
        (mean,) = _MEANS[platform].apply((labels, mesh, ignore_index, averaged), losses)
    return mean.reshape(())


def _check_losses(losses: Any, labels: Any, mesh: DeviceMesh) -> None:
    """Raise ValueError unless there is one loss for each label.

    A rank without labels cannot detect wrong shapes. So all ranks compare, in the first call and inside `check_ranks`.
    In later calls, a rank with wrong shapes raises, and the other ranks get a NaN mean.
    """
    platform = mesh.platform
    shape, wanted = (tuple(platform.shape_of(x)) for x in (losses, labels))
    wrong = shape not in (wanted, (math.prod(wanted),))
    if _COMPARED_LOSSES.get(mesh) is None or CHECKS:
        wrong = bool(numbers_of_ranks((wrong,), mesh, "token_mean").any())
    elif wrong:
        all_reduce_over(platform.full((2,), math.nan, _wide(losses, platform)), mesh, range(mesh.ndim))
    if wrong:
        raise ValueError(
            "token_mean takes one loss for each label, but the shapes differ on some rank. This rank has losses of "
            f"shape {shape} and labels of shape {wanted}. Compute cross entropy of these labels with reduction='none'"
        )
    _COMPARED_LOSSES.set(mesh, True)


def _wide(x: Any, platform: Any) -> Any:
    """Return ``x``, at least in float32, outside autograd."""
    x = platform.detach(x)
    return platform.to_dtype(x, platform.dtypes["float32"]) if x.itemsize < 4 else x


class _TokenMean:
    """Autograd function of `token_mean` for one platform."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform
        self.apply = platform.joint_function(named("TokenMean", self._forward), self._backward)

    def _forward(self, ctx: Any, call: Any, losses: Any) -> tuple[Any]:
        platform, (labels, mesh, ignore_index, averaged) = self.platform, call
        ctx.shape, count = platform.shape_of(losses), math.prod(platform.shape_of(labels))
        wide = _wide(losses, platform).reshape((count,))
        counted = platform.ones((count,), wide)
        if count:
            counted = platform.masked_fill(counted, labels.reshape((count,)) == ignore_index, 0.0)
        sums = [platform.sum_along(x, 0) for x in (wide, counted)]
        sums = all_reduce_over(platform.cat(sums, 0), mesh, range(mesh.ndim))
        total, tokens = platform.chunk(sums, 2, 0)
        ctx.factor, ctx.dtype = (mesh.size() if averaged else 1) / tokens, losses.dtype
        return (total / tokens,)

    def _backward(self, ctx: Any, g: Any) -> tuple[Any]:
        platform = self.platform
        each = platform.to_dtype(g * ctx.factor, ctx.dtype)
        return (platform.zeros(ctx.shape, each) + each,)


_MEANS: Table = Table(_TokenMean)
