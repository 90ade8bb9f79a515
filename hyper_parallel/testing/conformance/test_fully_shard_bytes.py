"""Number and bytes of the collectives of `fully_shard`, as in the table of docs/data_parallel.md."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    MixedPrecisionPolicy,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.conformance.test_fully_shard_units import ROWS, block_of

PLAN = {
    "attention.w[qkv]": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.w[13]": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
}
#: Bytes of an element.
HALF, SINGLE = 2, 4


def shapes_of(module: Any, mesh: Any, without: tuple[Any, ...] = ()) -> list[tuple[int, ...]]:
    """Return the shapes of this rank's tensor-parallel shards of a module's parameters."""
    platform = mesh.platform
    left = {id(sub) for one in without for _, sub in platform.named_modules(one)}
    return [
        tuple(platform.shape_of(p))
        for _, sub in platform.named_modules(module)
        if id(sub) not in left
        for _, p in platform.named_parameters(sub)
    ]


def wanted_bytes(shapes: list[tuple[int, ...]], ranks: int, read: int, reduced: int, flags: bool) -> tuple[int, int]:
    """Return the expected operand bytes of a unit's all-gather and reduce-scatter."""
    row = sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)
    return row * read, ranks * (row + len(shapes) * flags) * reduced


@spmd.on_mesh()
def one_dimension(mesh: Any, sizes: tuple[int, int], reshard: bool | None) -> None:
    check(mesh, mesh, None, sizes, reshard)


@spmd.on_mesh(2, 2, names=("dp_replicate", "dp_shard"))
def hybrid(mesh: Any, sizes: tuple[int, int], reshard: bool | None) -> None:
    check(mesh, mesh, None, sizes, reshard)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def beside_tp(mesh: Any, sizes: tuple[int, int], reshard: bool | None) -> None:
    check(mesh, mesh["dp"], mesh["tp"], sizes, reshard)


@spmd.on_mesh()
def mixed(mesh: Any, sizes: tuple[int, int], reshard: bool | None) -> None:
    half, single = (get_adapter().tensor(np.ones(1, dtype)).dtype for dtype in (np.float16, np.float32))
    for read, reduced in ((half, None), (half, half), (None, half)):
        policy = MixedPrecisionPolicy(param_dtype=read, reduce_dtype=reduced, output_dtype=single)
        check(mesh, mesh, None, sizes, reshard, policy)


def check(
    mesh: Any,
    dp: Any,
    tp: Any,
    sizes: tuple[int, int],
    reshard: bool | None,
    policy: MixedPrecisionPolicy | None = None,
) -> None:
    adapter, platform, ranks = get_adapter(), mesh.platform, dp.shape[-1]
    policy = policy or MixedPrecisionPolicy()
    block = adapter.load(block_of(sizes), np.random.default_rng(5))
    if tp is not None:
        parallelize_module(block, tp, PLAN)
    inner = (block.attention, block.feed_forward)
    shapes = [shapes_of(block, mesh, inner), *(shapes_of(one, mesh) for one in inner)]
    for one in inner:
        of_inner = replace(policy, output_dtype=None)
        fully_shard(one, mesh=dp, reshard_after_forward=reshard, mp_policy=of_inner)
    fully_shard(block, mesh=dp, reshard_after_forward=reshard, mp_policy=policy)
    forward: list[Any] = []

    def loss(x: Any) -> Any:
        with CommDebugMode() as comm:
            y = adapter.call(block, x)
        forward[:] = sent(comm, dp)
        return adapter.sum(adapter.square(y)), None

    x = np.random.default_rng(1).standard_normal((ROWS, 2, sizes[0])).astype(np.float32)
    for step in range(2):
        with CommDebugMode() as comm:
            adapter.model_value_and_grads(block, loss, x)
        backward = sent(comm, dp)[len(forward) :]
        if ranks == 1:
            assert not forward and not backward
            continue
        read = SINGLE if policy.param_dtype is None else HALF
        reduced = SINGLE if policy.reduce_dtype is None else HALF
        numbers = [wanted_bytes(unit, ranks, read, reduced, platform.tells_unused) for unit in shapes]
        last = dp.ndim - 1
        gathers = [("all_gather", last, of_unit) for of_unit, _ in numbers]
        assert forward == gathers, (step, forward, gathers)
        # In backward the feed forward comes first, and the outermost unit was left whole if nothing is said.
        again = {None: (gathers[2], gathers[1]), True: (gathers[0], gathers[2], gathers[1]), False: ()}[reshard]
        again = again if platform.frees_storage else ()
        assert sorted(e for e in backward if e[0] == "all_gather") == sorted(again), (step, backward)
        reductions = [("reduce_scatter", last, numbers[i][1]) for i in (2, 1, 0)]
        if dp.ndim > 1:
            sums = [("all_reduce", 0, count // ranks) for _, _, count in reductions]
            reductions = [e for pair in zip(reductions, sums, strict=True) for e in pair]
        assert [e for e in backward if e[0] != "all_gather"] == reductions, (step, backward, reductions)


def sent(comm: Any, dp: Any) -> list[tuple[str, int, int]]:
    """Return kind, mesh dimension and bytes of each collective of data parallelism."""
    return [(e.kind, e.mesh_dim, e.bytes) for e in comm.events if e.mesh is dp]


EVEN, UNEVEN = (8, 12), (6, 7)


@pytest.mark.parametrize(
    ("world_size", "job", "sizes", "reshard"),
    [
        (1, one_dimension, EVEN, None),
        (2, one_dimension, EVEN, True),
        (2, one_dimension, EVEN, False),
        (2, one_dimension, UNEVEN, None),
        (3, one_dimension, UNEVEN, True),
        (4, hybrid, EVEN, None),
        (4, hybrid, UNEVEN, True),
        (4, beside_tp, EVEN, None),
        (4, beside_tp, (12, 14), True),
        (2, mixed, EVEN, None),
        (2, mixed, UNEVEN, True),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_bytes(pool: Any, world_size: int, job: Any, sizes: tuple[int, int], reshard: bool | None) -> None:
    pool.run(world_size, job, sizes, reshard)
