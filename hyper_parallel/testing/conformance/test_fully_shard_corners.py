"""`fully_shard`: rare cases, and cases that matter to few backends."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    CommDebugMode,
    DTensor,
    MixedPrecisionPolicy,
    Replicate,
    Shard,
    distribute_tensor,
    fully_shard,
    replicate,
)
from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.data_parallel.fully_shard import buffers_of
from hyper_parallel.core.data_parallel.reduction import Block
from hyper_parallel.core.tensor_parallel.program.planned_parameters import UNIT
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_fully_shard_units import ROWS, Trained, block_of, parameters, shard_block
from hyper_parallel.testing.extent import on_ranks

SIZES = (6, 5)


@contextlib.contextmanager
def other(platform: Any, **facts: Any) -> Iterator[None]:
    """Change facts about the platform inside this context, as if it were another backend or device."""
    before = {name: getattr(platform, name) for name in facts}
    try:
        for name, value in facts.items():
            setattr(platform, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(platform, name, value)


def changed(mesh: Any, make: Any) -> Any:
    """Return a linear module with another forward."""
    adapter = get_adapter()
    module = adapter.load(adapter.linear_module(*SIZES), np.random.default_rng(5))
    mesh.platform.replace_forward(module, make)
    return module


@spmd.on_mesh()
def called_with(mesh: Any) -> None:
    """Check batches that follow other arguments, or are nested in a container."""
    adapter, size, rank = get_adapter(), mesh.size(), mesh.get_local_rank(0)
    x = np.random.default_rng(1).standard_normal((size * ROWS, SIZES[0])).astype(np.float32)
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    for make, call in (
        (lambda forward: lambda self, n, x: forward(self, x) * n, lambda module, x: adapter.call(module, 3, x)),
        (lambda forward: lambda self, xs: forward(self, xs["x"]), lambda module, x: adapter.call(module, {"x": x})),
    ):
        single, sharded = changed(mesh, make), fully_shard(changed(mesh, make), mesh=mesh)

        def loss_of(module: Any, call: Any) -> Any:
            def loss(x: Any) -> Any:
                y = call(module, x)
                return adapter.sum(adapter.square(y)), y

            return loss

        _, grad_x, grads = adapter.model_value_and_grads(single, loss_of(single, call), x)
        _, got_grad_x, got = adapter.model_value_and_grads(sharded, loss_of(sharded, call), x[mine])
        same(got_grad_x, grad_x[mine], "gradient of the batch", 1e-4)
        for name, whole in grads.items():
            same(adapter.numpy(got[name]) * size, adapter.numpy(whole), f"gradient of {name}", 1e-4)


@spmd.on_mesh()
def without_freeing(mesh: Any) -> Any:
    """Check that unsharded parameters are kept until backward on a device whose storage cannot be freed."""
    with other(mesh.platform, frees_storage=False):
        trained = Trained(mesh, lambda: block_of((6, 7)), lambda b: shard_block(b, mesh), (2, 6))
        for step in range(2):
            trained.step(step)
        trained.step(2, calls=2)
        trained.check()
    return trained.counts


@spmd.on_mesh()
def gathered_for_nothing(mesh: Any) -> None:
    """Check a unit that was prefetched, but does not run again in this forward."""
    trained = Trained(mesh, lambda: block_of((6, 7)), lambda b: shard_block(b, mesh), (2, 6))
    trained.sharded.feed_forward.set_modules_to_forward_prefetch([trained.sharded.attention])
    for step in range(2):
        trained.step(step)
    trained.check()
    assert trained.counts[-1]["forward"] == ({"all_gather": 4} if mesh.size() > 1 else {})


@spmd.on_mesh()
def after_a_failure(mesh: Any) -> None:
    """Check gradients of gradients: right, or refused in the middle of backward. The next step is right in both
    cases."""
    adapter = get_adapter()
    trained = Trained(mesh, lambda: block_of((6, 7)), lambda b: shard_block(b, mesh), (2, 6))
    trained.step(0)
    x = np.ones((2, 2, 6), np.float32)

    for of_sum in (False, True):

        def second_order(module: Any, of_sum: bool = of_sum) -> Any:
            def function(x: Any) -> Any:
                y = adapter.call(module, x)
                return adapter.sum(y if of_sum else adapter.square(y))

            return adapter.second_order(function, lambda g: adapter.sum(adapter.square(g)), [x])

        if mesh.platform.tells_beginning:
            same(second_order(trained.sharded)[0], second_order(trained.single)[0], "gradient of a gradient", 1e-4)
        else:
            with pytest.raises(RuntimeError, match="second-order gradients through fully_shard"):
                second_order(trained.sharded)
            trained.sharded.reset_iter_state()
    trained.step(1)
    trained.check()


@spmd.on_mesh()
def after_an_error(mesh: Any) -> None:
    """Check an error on all ranks in backward, at the input of a unit or in its gather. After the error no unit stays
    unsharded. A separate call of another unit is right, and the next step is right."""
    adapter, platform = get_adapter(), mesh.platform
    trained = Trained(mesh, lambda: block_of((6, 7)), lambda b: shard_block(b, mesh), (2, 6))
    trained.step(0)
    single, sharded = trained.single, trained.sharded
    (buffer,) = buffers_of(sharded.attention)
    start, fails_at = buffer.start, ""

    def fail(ctx: Any, cotangent: Any) -> Any:
        raise RuntimeError("something else")

    failing = platform.autograd_function(lambda ctx, x: platform.detach(x), fail)

    def before(module: Any, args: tuple) -> tuple:
        with platform.no_dispatch():
            return (failing(args[0]) if fails_at == "input" else args[0], *args[1:])

    def gather(parameters: Any, again: bool) -> None:
        if again:
            fail(None, None)
        start(parameters, again)

    def loss(x: Any) -> Any:
        return adapter.sum(adapter.square(adapter.call(sharded, x))), None

    platform.register_forward_pre_hook(sharded.feed_forward, before)
    x = np.random.default_rng(1).standard_normal((2, 2, 6)).astype(np.float32)
    for step, fails_at in enumerate(("input", "gather") if platform.frees_storage else ("input",), 1):
        if fails_at == "gather":
            buffer.start = gather
        with pytest.raises(RuntimeError, match="something else"):
            adapter.model_value_and_grads(sharded, loss, x)
        buffer.start, here, fails_at = start, fails_at, ""
        for name, p in parameters(sharded, mesh).items():
            assert isinstance(p, DTensor), (name, here)
        trained.step(step)
        got, wanted = (adapter.call(b.feed_forward, adapter.tensor(x)) for b in (sharded, single))
        same(adapter.numpy(got), adapter.numpy(wanted), f"unit alone after an error at its {here}", 1e-4)
    trained.check()


@spmd.on_mesh()
def other_batches_between(mesh: Any) -> None:
    """Check backward of a distributed batch after a forward without gradients of a plain batch, and vice versa."""
    adapter, platform, size, rank = get_adapter(), mesh.platform, mesh.size(), mesh.get_local_rank(0)
    x = np.random.default_rng(1).standard_normal((size * ROWS, 2, 6)).astype(np.float32)
    mine = x[rank * ROWS : (rank + 1) * ROWS]

    def loss_of(y: Any) -> Any:
        return adapter.sum(adapter.square(y))

    single, sharded = (adapter.load(block_of((6, 7)), np.random.default_rng(5)) for _ in range(2))
    shard_block(sharded, mesh)
    _, _, grads = adapter.model_value_and_grads(single, lambda x: (loss_of(adapter.call(single, x)), None), x)

    def distributed(x: Any) -> Any:
        y = adapter.call(sharded, distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None))
        with platform.no_grad():
            adapter.call(sharded, adapter.tensor(mine))
            adapter.call(sharded.feed_forward, adapter.tensor(mine))
        return loss_of(y).redistribute(placements=[Replicate()]), None

    def plain(x: Any) -> Any:
        y = adapter.call(sharded, x)
        with platform.no_grad():
            adapter.call(sharded, distribute_tensor(x, mesh, [Replicate()], src_data_rank=None))
        return loss_of(y), None

    for function, batch, factor in ((distributed, x, 1), (plain, mine, size)):
        _, _, got = adapter.model_value_and_grads(sharded, function, batch)
        for name, g in grads.items():
            same(adapter.numpy(got[name]) * factor, adapter.numpy(g), f"{function.__name__}: gradient of {name}", 3e-4)


@spmd.on_mesh()
def other_dtype_of_gradients(mesh: Any) -> None:
    """Check gradients that are reduced in half precision and stored in the dtype of the parameters."""
    adapter, size, rank = get_adapter(), mesh.size(), mesh.get_local_rank(0)
    half, whole = (adapter.tensor(np.ones(1, dtype)).dtype for dtype in (np.float16, np.float32))
    single, sharded = (adapter.load(adapter.linear_module(*SIZES), np.random.default_rng(5)) for _ in range(2))
    fully_shard(sharded, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=half))
    x = np.random.default_rng(1).standard_normal((size * ROWS, SIZES[0])).astype(np.float32)
    mine = slice(rank * ROWS, (rank + 1) * ROWS)

    def loss_of(module: Any) -> Any:
        return lambda x: (adapter.mean(adapter.square(adapter.call(module, x))), None)

    _, _, grads = adapter.model_value_and_grads(single, loss_of(single), x)
    _, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded), x[mine])
    for name, g in grads.items():
        assert got[name].dtype == whole
        same(adapter.numpy(got[name]), adapter.numpy(g), f"gradient of {name}", 2e-3)


@spmd.on_mesh()
def rarely_called(mesh: Any) -> None:
    """Check rarely called methods, copies and pickles."""
    adapter = get_adapter()
    block = shard_block(adapter.load(block_of((6, 7)), np.random.default_rng(3)), mesh)
    block.reset_iter_state()
    block.set_reduce_scatter_divide_factor(2.0)
    block.set_requires_gradient_sync(False, recurse=False)
    block.set_reshard_after_forward(False)
    x = adapter.tensor(np.ones((2, 2, 6), np.float32))
    with CommDebugMode() as comm:
        handle = block.attention.unshard(async_op=True)
        block.attention.unshard()
        block.attention.unshard()
        handle.wait()
        handle.wait()
    assert comm.get_comm_counts() == ({"all_gather": 1} if mesh.size() > 1 else {})
    block.attention.reshard()
    adapter.call(block, x)
    plan = vars(block)[UNIT]
    assert copy.copy(plan) is plan and copy.deepcopy(plan) is plan
    with pytest.raises(TypeError, match=r"save module\.state_dict"):
        pickle.dumps(plan)
    spread = fully_shard(
        changed(mesh, lambda forward: lambda self, x: distribute_tensor(forward(self, x), mesh, [Replicate()])),
        mesh=mesh,
    )
    rows = np.ones((2, SIZES[0]), np.float32)
    with pytest.raises(ValueError, match=r"returns a DTensor of shape .* return plain tensors"):
        adapter.model_value_and_grads(spread, lambda x: (adapter.call(spread, x), None), rows)
    with fails(ValueError, "set_modules_to_backward_prefetch"):
        block.set_modules_to_backward_prefetch([x])


@spmd.on_mesh()
def unused_somewhere(mesh: Any) -> None:
    """Check that parameters used by no rank are distinguished from parameters used by some ranks. Flags are reduced
    with the gradients."""
    adapter, platform, size, rank = get_adapter(), mesh.platform, mesh.size(), mesh.get_local_rank(0)
    linear = fully_shard(adapter.load(adapter.linear_module(*SIZES), np.random.default_rng(5)), mesh=mesh)
    adapter.call(linear, adapter.tensor(np.ones((2, SIZES[0]), np.float32)))
    (buffer,) = buffers_of(linear)
    shapes = [block.shape for block in buffer.blocks]
    like = np.random.default_rng(2)
    every = [[like.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(size)]
    # One that all ranks use; then one that the last alone uses; then none.
    for users in ((range(size), range(size)), (range(size), [size - 1]), ([size - 1], []), ([], [])):
        with other(platform, tells_unused=True), platform.no_grad(), platform.no_dispatch():
            given = [adapter.tensor(x) if rank in use else None for x, use in zip(every[rank], users, strict=True)]
            found = buffer.reduce([0, 1], given, "sum").shards(2.0)
        for i, (use, block, got) in enumerate(zip(users, buffer.blocks, found, strict=True)):
            if not use:
                assert got is None, users
                continue
            total = sum(every[r][i] for r in use) * 0.5
            rows = -(-total.shape[0] // size)
            wanted = total[rank * rows : (rank + 1) * rows]
            assert tuple(platform.shape_of(got)) == wanted.shape == tuple(block.local_shape)
            same(adapter.numpy(got), wanted, f"used by {users}", 1e-4)


@spmd.on_mesh()
def added(mesh: Any) -> None:
    """Check parameters that are added later: refused where they are trained, at any depth, and right elsewhere."""
    adapter, platform = get_adapter(), mesh.platform
    x = np.random.default_rng(1).standard_normal((ROWS, 6)).astype(np.float32)

    def step(module: Any) -> Any:
        def loss(x: Any) -> Any:
            y = adapter.call(module, x)
            return adapter.sum(adapter.square(y)), y

        return adapter.model_value_and_grads(module, loss, x)

    def build(apply: Any, *ignored: str) -> Any:
        block = adapter.load(block_of((6, 7)), np.random.default_rng(3))
        leaves_out = [getattr(block.attention, name) for name in ignored]
        if apply is replicate:
            return replicate(block, mesh, ignored_modules=leaves_out)
        keeps = [p for m in leaves_out for _, p in platform.named_parameters(m)]
        fully_shard(block.attention, mesh=mesh, ignored_params=keeps)
        return fully_shard(block, mesh=mesh)

    single = adapter.load(block_of((6, 7)), np.random.default_rng(3))
    x = x.reshape(ROWS, 1, 6)
    wanted, _, grads = step(single)
    for apply in (fully_shard, replicate):
        for called in range(3):
            for holder in ("attention", "feed_forward", ""):
                model = build(apply)
                for _ in range(called if holder == "attention" else 0):
                    step(model)
                (getattr(model, holder) if holder else model).more = adapter.linear_module(6, 6)
                if called == 2 and holder == "attention":
                    step(model)  # it looks for them in two calls
                    continue
                says = rf"more\.weight' was added after {apply.__name__}.*add parameters before {apply.__name__}"
                with pytest.raises(ValueError, match=says):
                    step(model)
        with platform.no_grad():
            y = adapter.call(model, adapter.tensor(x))
        same(adapter.numpy(y), adapter.numpy(wanted), "without gradients", 1e-4)
        for name in ("weight", "bias"):
            adapter.freeze(model, f"more.{name}")
        y, _, got = step(model)
        same(adapter.numpy(y), adapter.numpy(wanted), "with frozen ones", 1e-4)
        for name in ("attention.wq.weight", "feed_forward.w1.weight"):
            same(adapter.numpy(got[name]), adapter.numpy(grads[name]), name, 1e-4)
        for twin in (build(apply, "wq"), copy.deepcopy(build(apply, "wq"))):
            step(twin)
            assert isinstance(twin.attention.wk.weight, DTensor) and not isinstance(twin.attention.wq.weight, DTensor)


JOBS = (
    added,
    called_with,
    gathered_for_nothing,
    after_a_failure,
    after_an_error,
    other_batches_between,
    other_dtype_of_gradients,
    rarely_called,
    unused_somewhere,
)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@on_ranks(1, 2, 3)
def test_rare(pool: Any, world_size: int, job: Any) -> None:
    pool.run(world_size, job)


@on_ranks(2, 4)
def test_without_freeing(pool: Any, world_size: int) -> None:
    for counts in pool.run(world_size, without_freeing):
        for step, calls in zip(counts, (1, 1, 2), strict=True):
            assert step["forward"] == {"all_gather": 3 * calls}
            assert step["backward"] == {"reduce_scatter": 3 * calls}


@spmd.on_mesh(2, 2, names=("dp_replicate", "dp_shard"))
def reduced_in_parts(mesh: Any) -> None:
    """Check gradients that are first reduced over shards only.

    The next batch reduces the accumulated sum over replicas too.
    """
    adapter, rank = get_adapter(), mesh.get_rank()
    single = adapter.load(block_of((6, 7)), np.random.default_rng(5))
    sharded = shard_block(adapter.load(block_of((6, 7)), np.random.default_rng(5)), mesh)
    batches = np.random.default_rng(4).standard_normal((2, 4 * ROWS, 2, 6)).astype(np.float32)

    def loss_of(module: Any) -> Any:
        return lambda x: (adapter.sum(adapter.square(adapter.call(module, x))), None)

    wanted: dict[str, Any] = {}
    total: dict[str, Any] = {}
    for i, batch in enumerate(batches):
        _, _, grads = adapter.model_value_and_grads(single, loss_of(single), batch)
        sharded.set_requires_all_reduce(i == 1)
        with CommDebugMode() as comm:
            _, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded), batch[rank * ROWS : (rank + 1) * ROWS])
        assert comm.get_comm_counts()["reduce_scatter"] == 3
        assert comm.get_comm_counts().get("all_reduce", 0) == 3 * i
        for name, g in grads.items():
            wanted[name] = wanted.get(name, 0) + adapter.numpy(g)
            if got[name] is not None:
                total[name] = total.get(name, 0) + adapter.numpy(got[name])
    for name, g in wanted.items():
        same(total[name], g / 4, f"gradient of {name}", 2e-4)


def test_reduced_in_parts(pool: Any) -> None:
    pool.run(4, reduced_in_parts)


@spmd.on_mesh()
def numbers(mesh: Any, seeds: int) -> list[float]:
    """Check the gradients of 0-d parameters, which every rank has in full."""
    adapter, platform, rank = get_adapter(), mesh.platform, mesh.get_local_rank()
    block = Block(platform, (), None, mesh.size(), rank)
    found = []
    for seed in range(seeds):
        each = np.random.default_rng(seed).standard_normal(mesh.size()).astype(np.float32)
        mine = adapter.tensor(each[rank : rank + 1])
        rows = platform.cat([block.rows_of(mine.reshape(())), platform.zeros((mesh.size(), 3), mine)], 1).reshape((-1,))
        out = platform.zeros((block.reduced + 3,), mine)
        asynchronous.start("reduce_scatter", out, rows, mesh, 0, "sum").wait()
        number = adapter.numpy(block.shard_from(platform.narrow(out, 0, 0, block.reduced)))
        same(number, each.sum(), f"sum of seed {seed}", 1e-5)
        found.append(float(number))
    return found


@on_ranks(1, 2, 3, 4, gate=(4,))
def test_numbers_have_the_same_bits_on_all_ranks(pool: Any, world_size: int) -> None:
    """Check that all ranks have the same bits, even if a backend adds in another order on each rank."""
    first, *others = pool.run(world_size, numbers, 20)
    assert len(set(first)) == 20 and all(found == first for found in others)
