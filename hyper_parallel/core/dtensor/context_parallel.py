"""Context parallelism for plain code: tensors are local shards of a sequence, and attention covers the full
sequence."""

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

#: Torch's names of the methods that exchange keys and values -> this library's names.
_ROTATIONS = {"allgather": "gather", "alltoall": "ring"}


def set_rotate_method(rotate_method: str | None) -> None:
    """Choose how attention over a sharded sequence gets the keys and values of the other ranks.

    Args:
        rotate_method: ``"allgather"`` for one all-gather, ``"alltoall"`` for a ring that passes the shards on. With
            None, the default, each call chooses by bytes and memory.

    Raises:
        ValueError: for another method.

    Source: ``torch.distributed.tensor.experimental._attention.set_rotate_method``.
    """
    if rotate_method is not None and rotate_method not in _ROTATIONS:
        raise ValueError(f"set_rotate_method takes one of {sorted(_ROTATIONS)} or None, got {rotate_method!r}")
    sequence_cut.DEFAULT_METHOD[0] = None if rotate_method is None else _ROTATIONS[rotate_method]


def check_mesh(mesh: Any, name: str) -> None:
    """Raise unless ``mesh`` is a 1-D mesh that contains this rank.

    Raises:
        TypeError: for an object other than a mesh. ValueError: for several dimensions, and on a rank outside the mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{name} takes a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"{name} takes a 1-D mesh, got {mesh}: pass a slice such as mesh['cp']")
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
    """Context manager in which plain tensors are this rank's shard of a sequence, and attention covers the full
    sequence.

    The buffers hold local shards inside, and are restored afterwards. Forward and backward must run inside.

    Two attention functions support it: torch's ``scaled_dot_product_attention``, and the function of
    `hyper_parallel.mindspore`. Other functions that mix positions, such as a convolution over time, see the local shard
    only.

    Args:
        mesh: a 1-D mesh.
        buffers: plain tensors with the full sequence: inputs, labels, positions, tables of rotary embeddings.
        buffer_seq_dims: the sequence dimension of each buffer.
        no_restore_buffers: buffers that are not restored, and stay sharded afterwards.
        length: length of the full sequence, if there are no buffers.
        method: ``"gather"``, ``"exchange"`` or ``"ring"``; by default each call chooses.
        balance: whether a rank holds a range from the start and a range from the end of the sequence. This balances the
            work under a causal mask. Otherwise each rank holds one consecutive range.

    Raises:
        TypeError: when ``mesh`` is not a mesh, or a buffer is not a plain tensor.
        ValueError: for buffers of different lengths, and one that is passed twice. Inside the context, for tensors of
            another length, a mask that does not cover the full sequence, and attention dropout. All ranks raise it,
            before any communication.

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
    parts = PartsInContext(mesh, ranges, method or sequence_cut.chosen_method())
    saved: list[Any] = []
    try:
        with platform.no_grad():
            for x, dim in zip(buffers, dims, strict=True):
                dim %= len(platform.shape_of(x))
                saved.append(None if any(x is one for one in kept) else platform.clone(x))
                platform.become(x, platform.clone(moved(x, dim, ((0, whole),), own, platform)))
        with (
            sequence_cut.sequence_order(mesh, ranges),
            nullcontext() if method is None else sequence_cut.attention_method(method),
            platform.attention_calls(parts, parts.mixes),
        ):
            yield
    finally:
        with platform.no_grad():
            for x, values in zip(buffers, saved, strict=False):  # fewer, after an error
                if values is not None:
                    platform.become(x, values)


def _length_of(buffers: list, dims: list, kept: list, length: int | None, platform: Any) -> int:
    """Return the length of the sequence from the buffers or ``length``. Raise if they are inconsistent."""
    if len(buffers) != len(dims):
        raise ValueError(
            f"context_parallel: got {len(buffers)} buffers and {len(dims)} buffer_seq_dims: pass one dimension for "
            "each buffer"
        )
    if len({id(x) for x in buffers}) != len(buffers):
        raise ValueError("context_parallel: a tensor is in buffers twice, and would be sharded twice: pass it once")
    if any(all(x is not one for one in buffers) for x in kept):
        raise ValueError(
            "context_parallel: no_restore_buffers contains a tensor that is not in buffers: pass a subset of buffers"
        )
    lengths = set() if length is None else {int(length)}
    for x, dim in zip(buffers, dims, strict=True):
        if not platform.is_tensor(x) or isinstance(x, (DTensor, platform.Parameter)):
            raise TypeError(f"context_parallel takes plain tensors as buffers, got {type(x).__name__}")
        if platform.accumulates_gradients and x.requires_grad:
            raise ValueError(
                "context_parallel: a buffer requires gradients, so its shape cannot be changed: pass x.detach()"
            )
        shape = platform.shape_of(x)
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"context_parallel: a buffer of shape {tuple(shape)} has no dimension {dim}")
        lengths.add(shape[dim])
    if len(lengths) != 1:
        raise ValueError(
            f"context_parallel: buffers and length= have different sequence lengths, {sorted(lengths)}: pass buffers "
            "with the full sequence on every rank, or length="
        )
    return lengths.pop()


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Any], seq_dims: Sequence[int], *, balance: bool = True
) -> list[Any]:
    """Return full sequences from local shards, such as outputs of a model that ran inside `context_parallel`.

    It is differentiable. The ranks exchange the lengths of their shards.

    Args:
        mesh: the mesh of `context_parallel`.
        buffers: plain tensors, this rank's shards.
        seq_dims: the sequence dimension of each buffer.
        balance: the argument of `context_parallel`.

    Returns:
        Plain tensors, in the order of the sequence.

    Raises:
        TypeError: when ``mesh`` is not a mesh.
        ValueError: on all ranks, for shards whose lengths are not those of `context_parallel`.

    Source: ``torch.distributed.tensor.experimental._attention.context_parallel_unshard``.
    """
    check_mesh(mesh, "context_parallel_unshard")
    platform = bind_platform(mesh.platform)
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"context_parallel_unshard: got {len(buffers)} buffers and {len(seq_dims)} seq_dims: pass one dimension "
            "for each buffer"
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
                f"context_parallel_unshard: the ranks passed {each} positions of buffer {i}, but context_parallel "
                f"shards {length} positions into {chunk_sizes(length, mesh.size())}: pass shards of these lengths"
            )
        layout = get_layout(mesh, (Shard(dim),), (*shape[:dim], length, *shape[dim + 1 :]))
        whole = DTensor._of_part(x, layout).full_tensor()
        order = tuple(piece for own in ranges_on(mesh, length, balance) for piece in own)
        found.append(moved(whole, dim, order, in_order(order), platform))
    return found
