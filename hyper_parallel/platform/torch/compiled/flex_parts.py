"""Functions and masks of `flex_attention` for a rank with a shard of the samples and heads. The program's functions and
masks get the indices of samples and heads in the full tensor. Torch's compiler traces this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Pieces", "own_part_of_mask", "seeing_whole"]

#: The (start, length) of each piece of the batch that a rank has, and of each piece of the heads.
Pieces = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]

#: Attributes of a mask. Versions of torch differ in them.
_PARTS = ("seq_lengths", "BLOCK_SIZE", "mask_mod", "dq_kv_order_spt")
_TENSORS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
    *("dq_write_order", "dq_write_order_full", "dq_kv_order"),
)


def seeing_whole(function: Callable[..., Any], pieces: Pieces, whole: tuple[int, int], device: Any) -> Any:
    """Return ``function`` for local batch and head indices, which are translated to indices of the full tensor.

    Args:
        function: a ``score_mod``, called with a score and indices of batch element, head, query and key.
        pieces: this rank's pieces.
        whole: full number of batch elements and of heads.
        device: device of index tables, which packed shards need.
    """
    batch, heads = (_shift(pieces[i], whole[i], device) for i in range(2))
    if batch is None and heads is None:
        return function

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return function(score, _moved(b, batch), _moved(h, heads), q, kv)

    return score_mod


def _shift(pieces: Any, size: int, device: Any) -> Any:
    """Return how local indices become indices of the full tensor: None for no change, an offset to add, or a table."""
    if len(pieces) == 1:
        return None if pieces[0] == (0, size) else pieces[0][0]
    return torch.tensor([i for start, length in pieces for i in range(start, start + length)], device=device)


def _moved(number: Any, by: Any) -> Any:
    if by is None:
        return number
    return number + by if isinstance(by, int) else by[number]


def own_part_of_mask(mask: Any, pieces: Pieces, whole: tuple[int, int]) -> Any:
    """Return this rank's part of a `BlockMask`, whose batch and head dimensions have full size or 1."""
    function, device = mask.mask_mod, mask.kv_num_blocks.device
    batch, heads = (_shift(pieces[i], whole[i], device) for i in range(2))
    if batch is None and heads is None:
        return mask

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return function(_moved(b, batch), _moved(h, heads), q, kv)

    parts = {name: getattr(mask, name) for name in _PARTS if hasattr(mask, name)}
    for name in _TENSORS:
        if hasattr(mask, name):
            parts[name] = _own_part(getattr(mask, name), pieces, whole)
    parts["mask_mod"] = mask_mod
    return type(mask)(**parts)


def _own_part(x: Any, pieces: Pieces, whole: tuple[int, int]) -> Any:
    """Return this rank's shard of a tensor of the mask. The first two dimensions are batch and heads, or have size
    1."""
    if x is None:
        return None
    for dim in (0, 1):
        own = pieces[dim]
        if x.shape[dim] == 1 or (len(own) == 1 and own[0] == (0, whole[dim])):
            continue
        parts = [x.narrow(dim, start, length) for start, length in own]
        x = (parts[0] if len(parts) == 1 else torch.cat(parts, dim)).contiguous()
    return x
