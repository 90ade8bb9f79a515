"""Checks of the calls of a model with sharded sequences. All ranks come to the same decision."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from hyper_parallel.core.communication.parts import numbers_of_ranks
from hyper_parallel.core.dtensor.plain_attention import ranges_on
from hyper_parallel.core.dtensor.sequence_batches import brings_positions
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.rules.sequence_cut import sizes_of
from hyper_parallel.core.tensor_parallel.program.expert_calls import values_of

__all__ = ["checked_call"]


def checked_call(
    given: dict[str, Any], mesh: DeviceMesh, balance: bool, name: str, compared: set[Any]
) -> dict[str, Any]:
    """Return the arguments of a call without the attention mask, after a check that the mask hides no token.

    Args:
        given: arguments of the base model, by name.
        mesh: mesh that shards sequences.
        balance: see `shard_sequence`.
        name: name of the model in messages.
        compared: shapes of the masks of calls that the ranks have compared; None for no mask. A new one is added.

    Raises:
        ValueError: on all ranks, for arguments that must cover the full sequence, or would give wrong results for a
            part.
    """
    platform = mesh.platform
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    kind = None if mask is None else tuple(getattr(mask, "shape", ()))
    same, whole, follows = False, True, True
    compares = kind not in compared or CHECKS or (mask is None and brings_positions(mesh))
    if positions is not None and compares and not platform.sends_nothing:
        mine = [zlib.crc32(platform.bytes_of(positions)), positions.shape[-1], 2 if kind is None else len(kind)]
        mine += [0, 0] if mask is None or mine[2] != 2 else [mask.shape[-1], zlib.crc32(platform.bytes_of(mask))]
        mine += _pieces(values_of(positions, platform).reshape(tuple(positions.shape)))
        rows = numbers_of_ranks(mine, mesh, f"a call of {name}")
        of_positions, parts, dims, lengths, of_masks, *_ = rows.T
        same = mesh.size() > 1 and len(set(of_positions.tolist())) == 1
        whole = set(dims.tolist()) == {2} and len(set(of_masks.tolist())) == 1
        whole = whole and set(lengths.tolist()) == {0 if mask is None else int(parts.sum())}
        follows = mask is not None or _follow(rows[:, 5:], parts, mesh, balance)
    if positions is None or same:
        raise ValueError(
            f"{name} takes shards of sequences on {mesh}, but "
            f"{'was called without position_ids' if positions is None else 'all ranks gave the same position_ids'}: "
            "shard the batch with shard_sequence, which makes position_ids, and pass position_ids to the model"
        )
    if not whole:
        raise ValueError(
            f"the attention_mask of {name} must cover the full sequence on all ranks, with the shape (samples, "
            f"length), got the shape {kind}: use the mask of shard_sequence, which does not shard it"
        )
    if not follows:
        raise ValueError(
            f"the position_ids of {name} do not count up by one over the sequence. In a single process, each token "
            "would attend to its own document alone, which is not supported for sharded sequences. Put one "
            f"document in a row, and use the position_ids of shard_sequence(balance={balance}). Or pass an "
            "attention_mask of ones: then each token attends to all documents before it"
        )
    compared.add(kind)
    # All ranks have compared a mask of this shape, so each has the same full mask and comes to the same decision.
    if mask is not None and platform.has_values(mask) and not bool(mask.all()):
        raise ValueError(
            f"the attention_mask of {name} hides tokens, which is not supported for sharded sequences. Pad at the end "
            "with ignored labels, and leave the mask out. Under a causal mask, no token attends to the padding after "
            "it"
        )
    return {**given, "attention_mask": None}


def _pieces(positions: np.ndarray) -> list[int]:
    """Return four numbers about the positions of a rank.

    The first number is 1 if the positions form one or two pieces of consecutive positions, and 0 otherwise. The others
    are the first position, the length of the first piece, and the first position of the second piece.
    """
    steps = np.diff(positions.reshape(-1, positions.shape[-1]))
    (ends,) = np.nonzero(steps[:1].ravel() != 1)
    if len(ends) > 1 or (steps != steps[:1]).any():
        return [0] * 4
    first, length = positions.ravel()[0], ends[0] + 1 if len(ends) else positions.shape[-1]
    return [1, int(first), int(length), int(positions.reshape(steps.shape[0], -1)[0, length % positions.shape[-1]])]


def _follow(pieces: np.ndarray, sizes: np.ndarray, mesh: DeviceMesh, balance: bool) -> bool:
    """Return whether positions count up by one over the full sequence.

    Args:
        pieces: numbers of `_pieces`, a row for each rank.
        sizes: number of positions of each rank.
        mesh: mesh that shards sequences.
        balance: see `shard_sequence`.
    """
    ranges = ranges_on(mesh, int(sizes.sum()), balance)
    if sizes_of(ranges) != tuple(sizes.tolist()):
        return True  # attention refuses shards of these sizes
    begin = pieces[0, 1]  # the first rank has the first position
    for (known, first, length, second), size, own in zip(pieces.tolist(), sizes.tolist(), ranges, strict=True):
        found = np.concatenate([np.arange(first, first + length), np.arange(second, second + size - length)])
        wanted = begin + np.concatenate([np.arange(start, start + n) for start, n in own])
        if not known or (found != wanted).any():
            return False
    return True
