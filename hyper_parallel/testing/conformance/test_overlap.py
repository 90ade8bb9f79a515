"""Core's calls of `Fast.linear_with_collective`, and core's use of the results.

A function made of core's own steps replaces the backend's verb, so that every backend runs these tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Replicate,
    RowwiseParallel,
    Shard,
    get_platform,
    overlap_collectives,
    parallelize_module,
)
from hyper_parallel.core.communication.redistribute import redistribution_steps
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.layouts.placement_types import Partial
from hyper_parallel.platform.contract import LinearCollective
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import compare, floats, same
from hyper_parallel.testing.extent import on_ranks

R = Replicate()


@pytest.fixture(autouse=True)
def a_platform_that_can() -> None:
    """Skip a test on a platform without `Platform.fast`."""
    if get_platform().fast is None:
        pytest.skip("this platform has no short ways")


@contextmanager
def answering(mesh: Any, answer: Callable[..., Any]) -> Iterator[list[tuple]]:
    """Replace `Fast.linear_with_collective` by ``answer`` in a block. Yield the list of its calls: (collective, dim,
    chunks)."""
    fast, asked = mesh.platform.fast, []

    def verb(x: Any, weight: Any, how: LinearCollective) -> Any:
        asked.append((how.collective, how.dim, how.chunks))
        return answer(how.collective, x, weight, how.dim, how.record)

    fast.linear_with_collective = verb
    try:
        yield asked
    finally:
        del fast.linear_with_collective


def by_steps(mesh: Any) -> Callable[..., Any]:
    """Compute `Fast.linear_with_collective` by core's own steps."""
    adapter = get_adapter()

    def answer(collective: str, x: Any, weight: Any, dim: int, record: Any) -> Any:
        record(collective, x)
        shape = list(x.shape)
        if collective == "all_gather":
            shape[dim] *= mesh.size()
            shards = get_layout(mesh, (Shard(dim),), shape)
            (step,) = redistribution_steps(shards, shards.with_placements([R]))
            return adapter.linear(step.for_parts(x), weight)
        y = adapter.linear(x, weight)
        summands = get_layout(mesh, (Partial(),), tuple(y.shape))
        target = summands.with_placements([R if collective == "all_reduce" else Shard(dim)])
        (step,) = redistribution_steps(summands, target)
        return step(y)

    return answer


#: name -> (style, whether the backend answers for it, placement of the input, of the output)
STYLES: dict[str, tuple[Any, str, Any, Any]] = {
    "all-reduce": (RowwiseParallel(), "all_reduce", Shard(-1), R),
    "reduce-scatter": (RowwiseParallel(output_layouts=Shard(0)), "reduce_scatter", Shard(-1), Shard(0)),
    "all-gather": (ColwiseParallel(input_layouts=Shard(0)), "all_gather", Shard(0), Shard(-1)),
    "all-gather, from the end": (ColwiseParallel(input_layouts=Shard(-2)), "all_gather", Shard(0), Shard(-1)),
}


@spmd.on_mesh()
def through_the_verb(mesh: Any, name: str, bias: bool, distributed_input: bool) -> list[tuple]:
    style, _, takes, gives = STYLES[name]
    with answering(mesh, by_steps(mesh)) as asked, overlap_collectives(chunks=3, least=0):
        compare(
            lambda adapter: adapter.linear_module(12, 24, bias),
            style,
            floats(12, 12),
            mesh,
            takes=takes,
            gives=gives,
            distributed_input=distributed_input,
        )
    return asked


@pytest.mark.parametrize("name", STYLES)
@on_ranks(1, 2, 3)
def test_what_the_backend_answers(pool: Any, world_size: int, name: str) -> None:
    for bias in (False, True):
        for distributed_input in (False, True):
            for asked in pool.run(world_size, through_the_verb, name, bias, distributed_input):
                assert asked == ([(STYLES[name][1], 0, 3)] if world_size > 1 else [])


@spmd.on_mesh()
def distributed_output(mesh: Any, name: str) -> None:
    adapter = get_adapter()
    style, _, takes, gives = STYLES[name]
    single, sharded = (adapter.load(adapter.linear_module(12, 24), np.random.default_rng(5)) for _ in range(2))
    kind = {"input_layouts": style.input_layouts[0], "output_layouts": style.output_layouts[0]}
    parallelize_module(sharded, mesh, type(style)(**kind, use_local_output=False))
    x = floats(12, 12)
    mine = adapter.tensor(x[get_layout(mesh, (takes,), x.shape).local_index()])
    with answering(mesh, by_steps(mesh)) as asked, overlap_collectives(chunks=2, least=0):
        y = adapter.call(sharded, mine)
    assert len(asked) == (mesh.size() > 1)
    assert isinstance(y, DTensor) and y.placements == get_layout(mesh, (gives,), tuple(y.shape)).placements
    same(adapter.numpy(y), adapter.numpy(adapter.call(single, adapter.tensor(x))), "output")


@pytest.mark.parametrize("name", STYLES)
def test_distributed_output(pool: Any, name: str) -> None:
    pool.run(2, distributed_output, name)


@spmd.on_mesh()
def left_alone(mesh: Any) -> None:
    """Check that core's own collective runs if the backend is not asked, or declines."""
    adapter = get_adapter()

    def counts(style: Any, sizes: tuple[int, int], x: Any, least: int = 0) -> tuple[dict[str, int], list[tuple]]:
        module = adapter.load(adapter.linear_module(*sizes), np.random.default_rng(5))
        parallelize_module(module, mesh, style)
        no = answering(mesh, lambda *args: None)
        with no as asked, overlap_collectives(chunks=2, least=least), CommDebugMode() as comm:
            adapter.call(module, x)
        return comm.get_comm_counts(), asked

    row, part = RowwiseParallel(), adapter.tensor(floats(4, 6))
    assert counts(row, (12, 8), part) == ({"all_reduce": 1}, [("all_reduce", 0, 2)])
    assert counts(row, (12, 8), part, least=33) == ({"all_reduce": 1}, [("all_reduce", 0, 1)])
    scattered = RowwiseParallel(output_layouts=Shard(0))
    assert counts(scattered, (12, 8), adapter.tensor(floats(4, 6))) == (
        {"reduce_scatter": 1},
        [("reduce_scatter", 0, 2)],
    )
    # Rows that do not divide, features as the dimension that moves, parts of the weight that differ.
    assert counts(scattered, (12, 8), adapter.tensor(floats(3, 6))) == ({"reduce_scatter": 1}, [])
    by_features = ColwiseParallel(input_layouts=Shard(-1))
    assert counts(by_features, (12, 8), adapter.tensor(floats(4, 6))) == ({"all_gather": 1}, [])
    gathered = ColwiseParallel(input_layouts=Shard(0))
    assert counts(gathered, (12, 7), adapter.tensor(floats(4, 12))) == ({"all_gather": 1}, [])
    assert counts(gathered, (12, 8), adapter.tensor(floats(4, 12))) == ({"all_gather": 1}, [("all_gather", 0, 2)])
    # Another placement than the one that moves.
    whole = DTensor.from_local(adapter.tensor(floats(4, 12)), mesh, [R])
    assert counts(gathered, (12, 8), whole) == ({}, [])
    # Without the switch it is not asked, unless the backend has a native operation and is told to use it.
    module = parallelize_module(adapter.load(adapter.linear_module(12, 8), np.random.default_rng(5)), mesh, row)
    with answering(mesh, lambda *args: None) as asked:
        adapter.call(module, part)
        assert not asked
        mesh.platform.fast.fuses_linear = True
        try:
            adapter.call(module, part)
        finally:
            mesh.platform.fast.fuses_linear = False
        assert asked == [("all_reduce", 0, 1)]


def test_left_alone(pool: Any) -> None:
    pool.run(2, left_alone)


@spmd.on_mesh()
def failing(mesh: Any) -> None:
    adapter = get_adapter()
    module = parallelize_module(adapter.linear_module(12, 8), mesh, RowwiseParallel())

    def fail(*args: Any) -> Any:
        raise RuntimeError("out of order")

    with answering(mesh, fail), overlap_collectives(least=0), pytest.raises(RuntimeError, match="out of order"):
        adapter.call(module, adapter.tensor(floats(4, 6)))


def test_failing(pool: Any) -> None:
    pool.run(2, failing)


@spmd.on_mesh()
def parameters_elsewhere(mesh: Any) -> None:
    """Check a parameter that was replaced, as parametrizations do."""
    adapter = get_adapter()
    plan = {
        "linear_module": (lambda: adapter.linear_module(12, 8), [ColwiseParallel(), RowwiseParallel(input_layouts=R)]),
        "embedding_module": (lambda: adapter.embedding_module(12, 8), [ColwiseParallel()]),
    }
    for kind, (make, styles) in plan.items():
        x = adapter.tensor(floats(4, 12) if kind == "linear_module" else np.arange(4, dtype=np.int64))
        for style in styles:
            module = parallelize_module(adapter.load(make(), np.random.default_rng(5)), mesh, style)
            wanted = adapter.numpy(adapter.call(module, x))
            name = mesh.platform.kind_of(module).weight
            parameter = dict(mesh.platform.named_parameters(module))[name]
            del mesh.platform.own_parameters(module)[name]
            object.__setattr__(module, name, parameter)
            for given in (x, DTensor.from_local(x, mesh, [R])):
                same(adapter.numpy(adapter.call(module, given)), wanted, kind)
                with answering(mesh, lambda *args: None), overlap_collectives(least=0):
                    same(adapter.numpy(adapter.call(module, given)), wanted, kind)


def test_parameters_elsewhere(pool: Any) -> None:
    pool.run(2, parameters_elsewhere)


def test_what_is_large_enough() -> None:
    """Check the default minimum: 4 Mi elements, as documented."""
    assert inspect.signature(overlap_collectives).parameters["least"].default == 4_194_304


@pytest.mark.parametrize("wrong", [{"chunks": 1}, {"least": -1}])
def test_wrong_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))), overlap_collectives(**wrong):
        pass
