"""Dtypes that MindSpore's collectives do not know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, ops

from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor
from hyper_parallel.testing.spmd import on_mesh

DTYPES = ["complex64", "complex128", "uint16", "uint32", "uint64"]


def values(dtype: str) -> np.ndarray:
    numbers = np.arange(30).reshape(5, 6)
    return (numbers + 1j * (7 - numbers) if dtype.startswith("complex") else numbers).astype(dtype)


@on_mesh()
def moved(mesh: Any, dtype: str) -> list[bool]:
    """Redistributions to whole tensors, between dimensions and between dtypes, with an empty shard."""
    x, found = values(dtype), []
    for dim in (0, 1):
        sharded = distribute_tensor(Tensor(x), mesh, [Shard(dim)])
        assert sharded.to_local().shape[dim] < x.shape[dim]
        other = sharded.redistribute(placements=[Shard(1 - dim)])
        for y in (sharded, other, other.redistribute(placements=[Replicate()]), sharded[1:]):
            wanted = x if y.shape == x.shape else x[1:]
            got = y.full_tensor().asnumpy()
            found.append(got.dtype == x.dtype and np.array_equal(got, wanted))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_are_gathered(pool: Any, dtype: str) -> None:
    assert pool.run(4, moved, dtype) == [[True] * 8] * 4


@on_mesh()
def parts_of_complex(mesh: Any) -> list[bool]:
    """MindSpore has no real or imaginary part of nothing."""
    x, found = values("complex64"), []
    for name in ("real", "imag", "conj"):
        y = getattr(ops, name)(distribute_tensor(Tensor(x), mesh, [Shard(0)]))
        assert isinstance(y, DTensor)
        found.append(np.array_equal(y.full_tensor().asnumpy(), getattr(np, name)(x)))
    return found


def test_parts_of_complex_numbers(pool: Any) -> None:
    assert pool.run(4, parts_of_complex) == [[True] * 3] * 4
