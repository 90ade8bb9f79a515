"""`platform.contract.counter` in operations of torch: on any device, and traceable by a compiler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.contract.counter import BITS, CHUNK, MULTIPLIER, ROUNDS, WEYL, blocks

__all__ = ["numbers"]

_WORD = 0xFFFFFFFF
_BITS = {getattr(torch, name): bits for name, bits in BITS.items()}


def numbers(
    kind: str, key: Tensor, shape: Sequence[int], ranges: Sequence[Sequence[tuple[int, int]]], dtype: torch.dtype
) -> Tensor:
    """Return a shard of random numbers from the counter-based generator; see `Platform.numbers_by_counter`."""
    if dtype not in _BITS:
        raise TypeError(
            f"parallel_rng='counter' draws no numbers of {dtype}: draw floating point numbers, and convert them"
        )
    dtype = key.to(dtype).dtype  # an NPU converts to float32 in place of float64
    halves = (key * 65536).long()
    key, salt = halves[0] << 16 | halves[1], halves[2] << 16 | halves[3]
    rows, columns = _offsets(shape, ranges, key.device)
    local = [sum(length for _, length in pieces) for pieces in ranges]
    if rows.numel() * columns.numel() <= CHUNK or torch.compiler.is_compiling():
        # A compiler fuses all operations into one loop without intermediate tensors.
        return _block(kind, rows[:, None] + columns, key, salt, dtype).reshape(local)
    found = torch.empty((rows.numel(), columns.numel()), dtype=dtype, device=key.device)
    for high, wide in blocks(*found.shape):
        found[high, wide] = _block(kind, rows[high, None] + columns[wide], key, salt, dtype)
    return found.reshape(local)


def _offsets(shape: Sequence[int], ranges: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    parts = [torch.zeros(1, dtype=torch.int64, device=device)]
    for dim, pieces in enumerate(ranges):
        index = [torch.arange(start, start + length, device=device) for start, length in pieces or ((0, 0),)]
        parts.append(torch.cat(index) * math.prod(shape[dim + 1 :]))
    rows = parts[0]
    for part in parts[1:-1]:
        rows = (rows[:, None] + part).reshape(-1)
    return rows, parts[-1]


def _block(kind: str, places: Tensor, key: Tensor, salt: Tensor, dtype: torch.dtype) -> Tensor:
    first, second = _philox(places, key, salt)
    if kind == "normal":
        # CPU kernels compute the last elements of a block differently, which can change the last bit.
        exact = torch.float64 if dtype == torch.float64 or places.device.type == "cpu" else torch.float32
        radius = ((first + 1).to(exact) * 2.0**-32).log().mul(-2).sqrt()
        return (radius * (second.to(exact) * (2 * math.pi * 2.0**-32)).cos()).to(dtype)
    bits = _BITS[dtype]
    if bits <= 32:
        return (first >> (32 - bits)).to(torch.float32).mul(2.0**-bits).to(dtype)
    return ((first >> 5) * (1 << 26) + (second >> 6)).to(dtype) * 2.0**-53


def _philox(places: Tensor, key: Tensor, salt: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the Philox words of 32 bits in int64. The products overflow, but only in bits that are masked anyway."""
    first, second = places & _WORD, (places >> 32) ^ salt
    for _ in range(ROUNDS):
        product = first * MULTIPLIER
        first = (product >> 32).bitwise_and_(_WORD).bitwise_xor_(second).bitwise_xor_(key)
        second = product.bitwise_and_(_WORD)
        key = (key + WEYL) & _WORD
    return first, second
