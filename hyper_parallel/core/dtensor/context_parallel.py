"""Sequences that are cut in plain code: what a rank has are plain tensors, and attention knows of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from hyper_parallel.core.communication.parts import numbers_of_ranks
from hyper_parallel.core.dtensor.plain_attention import PartsInContext, ranges_on
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.rules import sequence_cut
from hyper_parallel.core.rules.sequence_cut import in_order, moved

__all__ = ["context_parallel", "context_parallel_unshard", "set_rotate_method"]

#: Torch's names of the ways in which keys and values get around.
_ROTATIONS = {"allgather": "gather", "alltoall": "ring"}


def set_rotate_method(rotate_method: str | None) -> None:
    """Choose how attention over a sequence that is cut gets the keys and values of the other ranks.

    Args:
        rotate_method: ``"allgather"`` for all at once, ``"alltoall"`` for one rank's after the other, in a ring. None,
            as it is at first, lets each call choose by bytes and memory.

    Raises:
        ValueError: for another method.

    Source: ``torch.distributed.tensor.experimental._attention.set_rotate_method``.
    """
    if rotate_method is not None and rotate_method not in _ROTATIONS:
        raise ValueError(f"set_rotate_method takes one of {sorted(_ROTATIONS)} or None, got {rotate_method!r}")
    sequence_cut.DEFAULT_METHOD[0] = None if rotate_method is None else _ROTATIONS[rotate_method]


def check_mesh(mesh: Any, name: str) -> None:
    """Refuse all but a mesh of one dimension that has this rank.

    Raises:
        TypeError: for no mesh. ValueError: for several dimensions.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{name} takes a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"{name} takes a mesh of one dimension, got {mesh}: take a slice, as mesh['cp']")
    mesh.require_member(name)


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Any] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Any] | None = None,
    length: int | None = None,
    method: str | None = None,
    balance: bool = True,
) -> Iterator[None]:
    """Inside, plain tensors are a rank's part of a sequence, and attention is over the whole of it.

    The buffers hold their part of the sequence inside, and all of it again afterwards. Forward and backward run inside.
    The functions of attention that are told of the sequence are torch's ``scaled_dot_product_attention``, and the one
    of `hyper_parallel.mindspore`. What else mixes positions, as a convolution over time, sees the part alone.

    Args:
        mesh: of one dimension.
        buffers: plain tensors with the whole sequence: inputs, labels, positions, tables of rotary embeddings.
        buffer_seq_dims: the dimension of the sequence in each.
        no_restore_buffers: those of the buffers that keep their part afterwards.
        length: of the whole sequence, where there are no buffers to tell.
        method: ``"gather"``, ``"exchange"`` or ``"ring"``; by default each call chooses.
        balance: whether a rank holds a piece of the beginning and one of the end, so that all ranks have as much to do
            under a causal mask. Otherwise parts are consecutive.

    Raises:
        TypeError: when ``mesh`` is no mesh, or a buffer no plain tensor.
        ValueError: for buffers that do not fit each other; inside, for tensors of another length, a mask that is not of
            the whole sequence, and dropout of weights. On all ranks, before anything is sent.

    Example:
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from hyper_parallel import init_device_mesh
        >>> from hyper_parallel.experimental import context_parallel
        >>> x = torch.rand(2, 4, 8, 16)
        >>> with context_parallel(init_device_mesh("cpu", (1,)), buffers=[x], buffer_seq_dims=[2]):
        ...     F.scaled_dot_product_attention(x, x, x, is_causal=True).shape
        torch.Size([2, 4, 8, 16])

    Source: ``torch.distributed.tensor.experimental.context_parallel``.
    """
    check_mesh(mesh, "context_parallel")
    platform = bind_platform(mesh.platform)
    if method is not None and method not in sequence_cut.METHODS:
        raise ValueError(f"context_parallel(method=...) takes one of {sequence_cut.METHODS} or None, got {method!r}")
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = [*(no_restore_buffers or ())]
    whole = _length_of(buffers, dims, kept, length, platform)
    ranges = ranges_on(mesh, whole, balance)
    own = ranges[mesh.get_local_rank(0)]
    saved = []
    with platform.no_grad():
        for x, dim in zip(buffers, dims, strict=True):
            saved.append(None if any(x is one for one in kept) else platform.clone(x))
            platform.become(x, platform.clone(moved(x, dim % len(platform.shape_of(x)), ((0, whole),), own, platform)))
    parts = PartsInContext(mesh, ranges, method or sequence_cut.chosen_method())
    try:
        with (
            sequence_cut.sequence_order(mesh, ranges),
            nullcontext() if method is None else sequence_cut.attention_method(method),
            platform.attention_calls(parts, parts.mixes),
        ):
            yield
    finally:
        with platform.no_grad():
            for x, values in zip(buffers, saved, strict=True):
                if values is not None:
                    platform.become(x, values)


def _length_of(buffers: list, dims: list, kept: list, length: int | None, platform: Any) -> int:
    """How long the sequence is."""
    if len(buffers) != len(dims):
        raise ValueError(f"context_parallel: {len(buffers)} buffers and {len(dims)} buffer_seq_dims: give one for each")
    if any(all(x is not one for one in buffers) for x in kept):
        raise ValueError(
            "context_parallel: no_restore_buffers has a tensor that buffers lacks: give a subset of buffers"
        )
    lengths = set() if length is None else {int(length)}
    for x, dim in zip(buffers, dims, strict=True):
        if not platform.is_tensor(x) or isinstance(x, (DTensor, platform.Parameter)):
            raise TypeError(f"context_parallel takes plain tensors as buffers, got {type(x).__name__}")
        if platform.accumulates_gradients and x.requires_grad:
            raise ValueError("context_parallel: a buffer requires gradients, and cannot change its shape: detach it")
        shape = platform.shape_of(x)
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"context_parallel: a buffer of shape {tuple(shape)} has no dimension {dim}")
        lengths.add(shape[dim])
    if len(lengths) != 1:
        raise ValueError(
            f"context_parallel: buffers and length= give the sequence lengths {sorted(lengths)}, and must give one: "
            "pass the whole sequence on every rank as buffers, or length="
        )
    return lengths.pop()


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Any], seq_dims: Sequence[int], *, balance: bool = True
) -> list[Any]:
    """The whole sequences of which ranks have parts: outputs of a model that ran inside of `context_parallel`.

    Differentiable. The ranks tell each other how long their parts are.

    Args:
        mesh: the mesh of `context_parallel`.
        buffers: plain tensors, this rank's parts.
        seq_dims: the dimension of the sequence in each.
        balance: as for `context_parallel`.

    Returns:
        Plain tensors, in the order of the sequence.

    Raises:
        TypeError: when ``mesh`` is no mesh.
        ValueError: for parts that are none of `context_parallel`. On all ranks.

    Source: ``torch.distributed.tensor.experimental._attention.context_parallel_unshard``.
    """
    check_mesh(mesh, "context_parallel_unshard")
    platform = bind_platform(mesh.platform)
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"context_parallel_unshard: {len(buffers)} buffers and {len(seq_dims)} seq_dims: give one for each"
        )
    shapes = [tuple(platform.shape_of(x)) for x in buffers]
    dims = [dim % len(shape) for dim, shape in zip(seq_dims, shapes, strict=True)]
    mine = [shape[dim] for shape, dim in zip(shapes, dims, strict=True)]
    sizes = numbers_of_ranks(mine, mesh, "context_parallel_unshard").reshape(mesh.size(), len(mine))
    found = []
    for i, (x, shape, dim) in enumerate(zip(buffers, shapes, dims, strict=True)):
        each = tuple(int(n) for n in sizes[:, i])
        length = sum(each)
        if each != chunk_sizes(length, mesh.size()):
            raise ValueError(
                f"context_parallel_unshard: the ranks have {each} positions of buffer {i}, and context_parallel gives "
                f"them {chunk_sizes(length, mesh.size())}"
            )
        layout = get_layout(mesh, (Shard(dim),), (*shape[:dim], length, *shape[dim + 1 :]))
        whole = DTensor._of_part(x, layout).full_tensor()
        order = tuple(piece for own in ranges_on(mesh, length, balance) for piece in own)
        found.append(moved(whole, dim, order, in_order(order), platform))
    return found
