"""Parameters and buffers that a plan leaves plain: one rank's values are broadcast, and `check_ranks` compares them."""

from __future__ import annotations

from typing import Any

import numpy as np

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Partial,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    check_ranks,
    distribute_tensor,
    get_platform,
    implicit_replication,
    loss_parallel,
    manual_seed,
    parallelize_module,
)
from hyper_parallel.core.dtensor import undistributed
from hyper_parallel.core.rules import random
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import compare, floats
from hyper_parallel.testing.conformance.test_distribute import parameters
from hyper_parallel.testing.conformance.test_rank_check import error_of
from hyper_parallel.testing.extent import on_ranks

PLAN = {"attention.w[qkv]": ColwiseParallel(), "attention.wo": RowwiseParallel()}
OUTSIDE = ["norm1", "norm2", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]


def block(seed: int) -> Any:
    """Return a Llama block with a buffer, whose values follow from the seed."""
    adapter = get_adapter()
    model = adapter.load(adapter.Block(24, 36, 2), np.random.default_rng(seed))
    model.further = adapter.load(adapter.Buffered(6), np.random.default_rng(seed + 100))
    get_platform().set_buffer(model.further, "scale", adapter.tensor(np.arange(6, dtype=np.float32) + seed))
    return model


def values(model: Any) -> dict[str, np.ndarray]:
    adapter = get_adapter()
    found = {name: adapter.numpy(p) for name, p in parameters(model).items()}
    for path, module in get_platform().named_modules(model):
        found |= {f"{path}.{name}": adapter.numpy(b) for name, b in get_platform().named_buffers(module)}
    return found


@spmd.on_mesh()
def whole_module(mesh: Any) -> None:
    adapter, rank, platform = get_adapter(), mesh.get_local_rank(), mesh.platform
    for source in range(mesh.size()):
        model = block(rank)
        adapter.freeze(model, "norm2.weight" if "norm2.weight" in parameters(model) else "norm2.gamma")
        before = {name: (p, p.requires_grad) for name, p in parameters(model).items()}
        buffer = dict(platform.named_buffers(model.further))["scale"]
        with CommDebugMode() as comm:
            parallelize_module(model, mesh, PLAN, src_data_rank=source)
        assert comm.get_comm_counts().get("broadcast", 0) in ((1, 5) if mesh.size() > 1 else (0,))
        for name, value in values(block(source)).items():
            np.testing.assert_array_equal(values(model)[name], value, name)
        for name, p in parameters(model).items():
            assert p is before[name][0] and p.requires_grad == before[name][1], name
            assert isinstance(p, DTensor) == name.startswith("attention."), name
        assert dict(platform.named_buffers(model.further))["scale"] is buffer
    model = block(rank)
    with CommDebugMode() as comm:
        parallelize_module(model, mesh, PLAN, src_data_rank=None)
    assert comm.get_total_counts() == 0
    np.testing.assert_array_equal(
        adapter.numpy(parameters(model)["feed_forward.w1.weight"]), values(block(rank))["feed_forward.w1.weight"]
    )


@on_ranks(1, 2, 3, 4)
def test_one_rank_counts_for_the_whole_module(pool: Any, world_size: int) -> None:
    pool.run(world_size, whole_module)


@spmd.on_mesh()
def trained_from_other_seeds(mesh: Any) -> Any:
    """Check that ranks with different initial parameters compute the results of rank 0, forward and backward."""
    adapter, rank = get_adapter(), mesh.get_local_rank()
    single, sharded = block(0), parallelize_module(block(rank), mesh, PLAN)

    def loss_of(model: Any) -> Any:
        def loss(x: Any) -> Any:
            y = adapter.call(model, x)
            return adapter.sum(adapter.square(y)), y

        return loss

    x = floats(2, 3, 24)
    wanted, wanted_x, wanted_grads = adapter.model_value_and_grads(single, loss_of(single), x)
    got, got_x, got_grads = adapter.model_value_and_grads(sharded, loss_of(sharded), x)
    np.testing.assert_allclose(adapter.numpy(got), adapter.numpy(wanted), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got_x, wanted_x, rtol=1e-3, atol=1e-3)
    for name, grad in wanted_grads.items():
        if grad is not None and not name.startswith("further"):
            np.testing.assert_allclose(
                adapter.numpy(got_grads[name]), adapter.numpy(grad), rtol=1e-3, atol=1e-3, err_msg=name
            )


@on_ranks(2, 3)
def test_training_from_other_seeds(pool: Any, world_size: int) -> None:
    pool.run(world_size, trained_from_other_seeds)


@spmd.on_mesh()
def kinds_of_tensors(mesh: Any) -> None:
    """Check one broadcast per dtype, views, empty and 0-d tensors, ties, and several calls."""
    adapter, rank, platform = get_adapter(), mesh.get_local_rank(), mesh.platform
    arrays = {
        "floats": np.arange(5, dtype=np.float32),
        "doubles": np.arange(5, dtype=np.float64),
        "integers": np.arange(6, dtype=np.int64).reshape(2, 3),
        "flags": np.arange(4) % 2 == 0,
        "complex": (np.arange(4) * 1j).astype(np.complex64),
        "number": np.array(3, np.int64),
        "empty": np.zeros((0, 3), np.float32),
    }

    def made(shift: int) -> dict[str, np.ndarray]:
        return {
            name: a ^ bool(shift % 2) if a.dtype == bool else (a + shift).astype(a.dtype) for name, a in arrays.items()
        }

    module = adapter.Buffered(4)
    for name, a in made(rank).items():
        module.register_buffer(name, adapter.tensor(a))
    module.register_buffer("column", adapter.tensor(np.arange(12, dtype=np.float32).reshape(3, 4) + rank)[:, 1])
    module.register_buffer("transposed", adapter.transpose(adapter.tensor(floats(3, 4) + rank), 0, 1))
    module.register_buffer("again", dict(platform.named_buffers(module))["floats"])
    with CommDebugMode() as comm:
        parallelize_module(module, mesh, {}, src_data_rank=mesh.size() - 1)
    assert comm.get_comm_counts() == ({"broadcast": 5} if mesh.size() > 1 else {})
    got, last = dict(platform.named_buffers(module)), mesh.size() - 1
    for name, a in made(last).items():
        np.testing.assert_array_equal(adapter.numpy(got[name]), a, name)
    np.testing.assert_array_equal(adapter.numpy(got["column"]), np.arange(1, 12, 4, dtype=np.float32) + last)
    np.testing.assert_array_equal(adapter.numpy(got["transposed"]), (floats(3, 4) + last).T)
    assert got["again"] is got["floats"]

    # A tensor larger than a bucket travels alone, smaller ones go together.
    whole, undistributed.BUCKET = undistributed.BUCKET, 30
    try:
        model = adapter.load(adapter.Mlp(6, 6), np.random.default_rng(rank))
        with CommDebugMode() as comm:
            parallelize_module(model, mesh, {})
    finally:
        undistributed.BUCKET = whole
    assert comm.get_comm_counts() == ({"broadcast": 4} if mesh.size() > 1 else {})
    # A second call on a part leaves distributed parameters alone.
    model = adapter.load(adapter.Mlp(6, 6), np.random.default_rng(rank))
    parallelize_module(model.up, mesh, ColwiseParallel())
    with CommDebugMode() as comm:
        parallelize_module(model, mesh, {})
    assert comm.get_comm_counts() == ({"broadcast": 1} if mesh.size() > 1 else {})
    tied = adapter.load(adapter.Tied(8, 4), np.random.default_rng(rank))
    with CommDebugMode() as comm:
        parallelize_module(tied, mesh, {})
    assert comm.get_comm_counts() == ({"broadcast": 1} if mesh.size() > 1 else {})
    assert parameters(tied)["head.weight"] is next(iter(parameters(tied.embedding).values()))


@on_ranks(1, 2, 3)
def test_kinds_of_tensors(pool: Any, world_size: int) -> None:
    pool.run(world_size, kinds_of_tensors)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def one_mesh_dimension(mesh: Any) -> None:
    """Check that only the ranks of the given mesh get equal values."""
    dp, tp = mesh.get_coordinate()
    model = parallelize_module(block(10 * dp + tp), mesh["tp"], PLAN)
    np.testing.assert_array_equal(
        values(model)["feed_forward.w1.weight"], values(block(10 * dp))["feed_forward.w1.weight"]
    )


def test_one_mesh_dimension(pool: Any) -> None:
    pool.run(4, one_mesh_dimension)


@spmd.on_mesh()
def different_values(mesh: Any) -> dict[str, tuple]:
    """Check cases in which the last rank has a different value."""
    adapter, rank, platform = get_adapter(), mesh.get_local_rank(), mesh.platform
    manual_seed(3, mesh)  # an earlier test may have drawn on a part of the ranks
    odd = rank == mesh.size() - 1
    x = adapter.tensor(floats(2, 3, 24))

    def applied(seed: int = 0, plan: dict = PLAN) -> Any:
        return parallelize_module(block(seed), mesh, plan, src_data_rank=None)

    def changed() -> Any:
        model = applied()
        buffer = dict(platform.named_buffers(model.further))["scale"]
        if odd:
            platform.write(buffer, adapter.tensor(np.zeros(6, np.float32)))
        return model

    def drawn() -> None:
        manual_seed(3, mesh)
        if odd:
            adapter.draw("rand", (3,))
        random.synchronize(mesh)

    def changed_inside(model: Any) -> None:
        adapter.call(model, x)
        if odd:
            with platform.no_grad():
                platform.write(parameters(model)["feed_forward.w1.weight"], adapter.tensor(floats(36, 24)))

    replicated = {"norm1": SequenceParallel(), **PLAN}
    inputs = adapter.tensor(floats(2, 3, 24) + odd)
    first, second, third = applied(), changed(), applied()
    up = parallelize_module(adapter.linear_module(24, 6), mesh, ColwiseParallel())
    probe = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()).apply(
        adapter.Probe(), mesh
    )
    logits = distribute_tensor(adapter.tensor(floats(4, 6)), mesh, [Shard(1)])
    target = np.arange(4).astype(adapter.TARGET_DTYPE)

    def loss() -> None:
        with loss_parallel():
            adapter.cross_entropy(logits, adapter.tensor(target[::-1] if odd else target))

    def mixed() -> None:
        with implicit_replication():
            distribute_tensor(x, mesh, [Replicate()]) + inputs

    return {
        "a plain parameter": error_of(mesh, lambda: applied(int(odd))),
        "a replicated one": error_of(
            mesh, lambda: parallelize_module(block(int(odd)), mesh, replicated, src_data_rank=None)
        ),
        "from one rank": error_of(mesh, lambda: parallelize_module(block(int(odd)), mesh, PLAN)),
        "a buffer, when called": error_of(mesh, lambda: adapter.call(second, x)),
        "at the end": error_of(mesh, lambda: changed_inside(third)),
        "an input of a style": error_of(mesh, lambda: adapter.call(up, inputs)),
        "an input that is prepared": error_of(mesh, lambda: adapter.call(probe, inputs)),
        "an input": error_of(mesh, lambda: DTensor.from_local(inputs, mesh)),
        "an operand": error_of(mesh, mixed),
        "a target": error_of(mesh, loss),
        "summands": error_of(mesh, lambda: DTensor.from_local(inputs, mesh, [Partial()])),
        "generators": error_of(mesh, drawn),
        "generators, when called": error_of(mesh, lambda: adapter.call(first, x)),
        "all equal": error_of(mesh, lambda: [manual_seed(3, mesh), *(adapter.call(first, x) for _ in range(2))]),
    }


def test_different_values_are_named(pool: Any) -> None:
    for world_size in (2, 3):
        results = pool.run(world_size, different_values)
        last = world_size - 1
        expected = {
            "a plain parameter": ["differ in the values of parameter 'norm1.", "src_data_rank=0"],
            "a replicated one": ["differ in the values of parameter 'norm1."],
            "a buffer, when called": ["differ in the values of buffer 'further.scale'"],
            "at the end": ["differ in the values of parameter 'feed_forward.w1.weight'", "a style"],
            "an input of a style": ["the input of ", "differ in the values of the local tensor", "input_layouts"],
            "an input that is prepared": ["input 0 of Probe", "differ in the values of"],
            "an input": ["the local tensor given to DTensor.from_local"],
            "an operand": ["the second operand", "a plain tensor.", "assumed to be the same"],
            "a target": ["a plain target or class weight of a loss"],
            "generators, when called": ["the state of the random number generator", "manual_seed"],
            "generators": ["the state of the random number generator", "manual_seed"],
        }
        for result in results:
            for case, words in expected.items():
                kind, message, ranks = result[case]
                assert (kind, ranks) == ("RankMismatchError", (last,)), f"{case}: {result[case]}"
                assert f"rank {last}" in message, message
                for word in words:
                    assert word in message, f"{case}: {message}"
            for case in ("from one rank", "summands", "all equal"):
                assert result[case] == ("nothing", "", ()), f"{case}: {result[case]}"


@spmd.on_mesh()
def same_numbers_inside(mesh: Any, plan: dict) -> Any:
    """Check that a step inside `check_ranks`, which compares plain inputs, equals the step outside."""
    manual_seed(3, mesh)
    with check_ranks(mesh):
        return compare(lambda adapter: adapter.Mlp(6, 7), plan, floats(2, 5, 6), mesh)


@on_ranks(1, 2, 4)
def test_a_step_inside(pool: Any, world_size: int) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for counts in pool.run(world_size, same_numbers_inside, plan):
        once = {"all_reduce": 1} if world_size > 1 else {}
        assert counts == {"forward": once, "backward": once}
