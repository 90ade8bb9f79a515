"""Lists as indices of DTensors: values, gradients and writes of one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import Tensor

from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor
from hyper_parallel.mindspore import grad
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import error_of, whole

ALL = slice(None)
INDICES: dict[str, Any] = {
    "rows": [0, 2],
    "columns": (ALL, [0, 2]),
    "from the end": (ALL, [-1, 0]),
    "elements": ([0, 2], [1, 3]),
    "after dots": (..., [0, 2]),
    "a new dimension": (None, [0, 2]),
    "rows of a slice": (slice(1, 3), [0, 2, 2]),
    "a row": (1, [0, 2]),
    "a column": ([0, 2], 1),
    "truth values": (ALL, [True, False, True, False, False, True]),
    "lists in a list": [[0, 1], [2, 3]],
    "lists of lists": (ALL, [[0, 1], [2, 3]]),
    "a tuple": (ALL, (0, 2)),
}


def assigned(x: Any, index: Any, placement: Any) -> np.ndarray | None:
    """The values after a write, None where core says that it does not fit the shards."""
    written = x * 1
    try:
        written[index] = 5.0
    except ValueError as error:
        if placement.is_shard() and str(error).startswith("setitem_ cannot write into a tensor placed"):
            return None
        raise
    return whole(written)


@on_mesh()
def problems(mesh: Any, rows: int) -> list[str]:
    values = np.random.default_rng(0).standard_normal((rows, 6)).astype(np.float32)
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(Tensor(values), mesh, [placement])
        for name, index in INDICES.items():
            results = []
            for given in (Tensor(values), x):
                written = assigned(given, index, placement)
                of_taken = grad(lambda x, index=index: (x[index] * x[index]).sum())(given)
                results.append([whole(given[index]), whole(of_taken), written])
            if results[1][2] is None:  # refused, as a write at the places that a tensor names
                results[0][2] = results[1][2] = np.zeros(0)
            if not all(a.shape == b.shape and np.allclose(a, b) for a, b in zip(*results, strict=True)):
                found.append(f"{name}, {placement}")
            if not isinstance(x[index], DTensor):
                found.append(f"{name}, {placement}: {type(x[index])}")
    return found


@pytest.mark.parametrize("rows", in_gate((4, 5), (5,)))
def test_lists(pool: Any, rows: int) -> None:
    for world in (2, 3):
        assert pool.run(world, problems, rows) == [[]] * world


@on_mesh()
def refused(mesh: Any) -> list[str]:
    x = distribute_tensor(Tensor(np.ones((4, 6), np.float32)), mesh, [Shard(0)])
    return [error_of(lambda index=index: x[index]) for index in ((ALL, []), [0.5], (ALL, np.array([0])))]


def test_refused(pool: Any) -> None:
    for said in pool.run(2, refused):
        assert all(each.startswith("TypeError: cannot index a distributed tensor with") for each in said), said
