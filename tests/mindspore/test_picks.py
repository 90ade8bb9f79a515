"""Operations whose results have sizes that the data say, and indices into sharded dimensions: values and gradients of
one device, by rules alone, also where a rank has nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hyper_parallel import CommDebugMode, DTensor, Shard, distribute_tensor, strict
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing import spmd

#: Calls of a tensor of floats ``x``, whole numbers ``i`` and a mask ``m`` of its shape, numbers ``s`` and places ``j``.
CALLS: dict[str, Callable[..., Any]] = {
    "masked_select": lambda x, m: ops.masked_select(x, m),
    "mask in brackets": lambda x, m: x[m],
    "masked_scatter": lambda x, m, s: x.masked_scatter(m, s),
    "nonzero": lambda i: mint.nonzero(i),
    "argwhere": lambda i: ops.argwhere(i),
    "consecutive": lambda i: ops.unique_consecutive(i, True, True),
    "consecutive, counts": lambda i: mint.unique_consecutive(i, return_counts=True),
    "consecutive columns": lambda i: mint.unique_consecutive(i[:1], return_inverse=True, dim=1),
    "gather": lambda x, j: ops.gather_elements(x, 0, j.reshape(1, 2)),
    "gather of truth values": lambda x, j: ops.gather_elements(x > 0, 0, j.reshape(1, 2)),
    "index_select": lambda x, j: ops.index_select(x, 1, j),
    "index_put": lambda x, j, s: x.index_put((j,), s[:6]),
    "index_put of elements": lambda x, j, s: x.index_put((j, -1 - j), s[:2]),
    "index_put that adds": lambda x, j, s: x.index_put((j * 0,), s[:6], True),
    "rows taken": lambda x, j: x[j],
    "columns taken, from the end": lambda x, j: x[:, j - 3],
    "elements taken": lambda x, j: x[j, -1 - j],
    "a row taken twice": lambda x, j: x[j * 0],
    "a row taken by a number": lambda x, j: x[j[1]] * 2.0,
    "whole numbers taken": lambda i, j: i[j],
    "truth values taken": lambda m, j: m[:, j],
    "columns at a mask": lambda x, m: x[:, m[0]],
    "elements at a mask and places": lambda x, m, j: x[m[:, 0], j[:1]],
    "a number at a mask": lambda x, m: assigned(x, m, 3.0),
    "a sum at a mask of rows": lambda x, m, s: assigned(x, m[:, 1], s.sum()),
    "rows at a mask": lambda x, m, s: assigned(x, m[:, 1], s[:6]),
    "numbers at a mask": lambda x, m, s: assigned(x, (slice(None), m[0]), s[:1]),
    "rows assigned": lambda x, j, s: assigned(x, j, s[:6]),
    "some assigned": lambda x, s: assigned(x, slice(0, 2), s[:6]),
}


def assigned(x: Any, index: Any, value: Any) -> Any:
    x = x * 1.0
    x[index] = value
    return x


def operands(rows: int) -> dict[str, np.ndarray]:
    whole = np.arange(rows * 6).reshape(rows, 6) * 7 % 5
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((rows, 6)).astype(np.float32),
        "i": whole % 3,
        "m": whole > 2,
        "s": rng.standard_normal(rows * 6).astype(np.float32),
        "j": np.array([1, 0]),
    }


def run(call: Callable[..., Any], given: dict[str, Any], differentiate: Callable[..., Any]) -> tuple[list, list]:
    """Results, and gradients of a weighted sum of the first one by all floats."""
    places = tuple(k for k, x in enumerate(given.values()) if x.dtype == ms.float32)

    def weighted(*tensors: Any) -> Any:
        found = call(*tensors)
        results = found if isinstance(found, tuple) else (found,)
        if results[0].dtype != ms.float32:
            return ops.zeros((), ms.float32), results
        shape = tuple(results[0].shape)
        weights = Tensor(np.linspace(-1, 2, int(np.prod(shape))).reshape(shape).astype(np.float32))
        if isinstance(results[0], DTensor):
            weights = distribute_tensor(weights, results[0].device_mesh)
        return (results[0] * results[0] * weights).sum(), results

    if not places:
        return list(weighted(*given.values())[1]), []
    (_, results), gradients = differentiate(weighted, places, has_aux=True)(*given.values())
    return list(results), list(gradients) if isinstance(gradients, tuple) else [gradients]


def whole(x: Any) -> np.ndarray:
    return (x.full_tensor() if isinstance(x, DTensor) else x).asnumpy()


def right() -> None:
    line, grid = spmd.device_mesh(4), spmd.device_mesh(2, 2)
    few = (
        "masked_select",
        "masked_scatter",
        "nonzero",
        "index_put of elements",
        "elements taken",
        "a number at a mask",
    )
    for mesh, placements, rows, called in ((line, (Shard(0),), 5, CALLS), (grid, (Shard(1), Shard(0)), 3, few)):
        for name in called:
            call = CALLS[name]
            names = call.__code__.co_varnames[: call.__code__.co_argcount]
            arrays = {n: operands(rows)[n] for n in names}
            wanted = run(call, {n: Tensor(x) for n, x in arrays.items()}, ms.value_and_grad)
            placed = {
                n: distribute_tensor(Tensor(x), mesh, placements if n in "xim" else None) for n, x in arrays.items()
            }
            with strict():
                got = run(call, placed, value_and_grad)
            for mine, theirs in zip((*got[0], *got[1]), (*wanted[0], *wanted[1]), strict=True):
                np.testing.assert_allclose(whole(mine), whole(theirs), rtol=1e-5, err_msg=f"{name}, {placements}")


def more() -> None:
    """Picks that one device cannot compute, or that need other operands."""
    mesh = spmd.device_mesh(4)
    numbers = np.array([3, 1, 1, 0, 3, 2, 7, 7, 1], np.int32)
    x = distribute_tensor(Tensor(numbers), mesh, [Shard(0)])
    two = distribute_tensor(Tensor(numbers[:2]), mesh, [Shard(0)])  # two ranks have nothing
    with strict(), CommDebugMode() as comm:
        for distributed, plain in ((x, numbers), (two, numbers[:2])):
            for mine, theirs in zip(ops.unique(distributed), ops.unique(Tensor(plain)), strict=True):
                assert whole(mine).tolist() == theirs.asnumpy().tolist(), (whole(mine), theirs, spmd.rank)
        for mine, theirs in zip(ops.unique_with_pad(x, -1), ops.unique_with_pad(Tensor(numbers), -1), strict=True):
            assert mine.dtype == theirs.dtype and whole(mine).tolist() == theirs.asnumpy().tolist(), whole(mine)
        columns = ops.nonzero(x.reshape(3, 3), as_tuple=True)
    assert [whole(c).tolist() for c in columns] == [c.tolist() for c in numbers.reshape(3, 3).nonzero()]
    assert comm.get_total_counts() <= 3 * 4 + 3
    mask = distribute_tensor(Tensor(numbers > 2), mesh, [Shard(0)])
    put = distribute_tensor(Tensor(numbers), mesh, [Shard(0)]).index_put(
        (mask,), distribute_tensor(Tensor([9], ms.int32), mesh)
    )
    assert whole(put).tolist() == np.where(numbers > 2, 9, numbers).tolist()
    place = distribute_tensor(Tensor([8, -9]), mesh)
    with strict(), CommDebugMode() as comm:
        taken = x[place]
        x[mask] = 9
    assert comm.get_total_counts() == 0 and whole(taken).tolist() == [1, 3]
    assert whole(x).tolist() == whole(put).tolist()
    for index in (place + 1, place - 1):
        with pytest.raises(RuntimeError, match="should be in the range"):
            x[index].to_local().asnumpy()
    with pytest.raises(ValueError, match="the mask selects 4 elements, but the source has 1"):
        x.masked_scatter(mask, distribute_tensor(Tensor([9], ms.int32), mesh))


@pytest.mark.parametrize("job", [right, more], ids=lambda job: job.__name__)
def test_on_four_ranks(pool: Any, job: Any) -> None:
    pool.run(4, job)
