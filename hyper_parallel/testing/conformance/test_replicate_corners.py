"""`replicate`: rare cases, and cases that matter to few backends."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from hyper_parallel import DTensor, Shard, distribute_tensor, replicate
from hyper_parallel.core.data_parallel.reduction import Block, Bucket
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_fully_shard_corners import other
from hyper_parallel.testing.extent import on_ranks

ROWS = 3


def both(build: Any, mesh: Any, **options: Any) -> tuple[Any, Any]:
    """Return a module and its replicated copy."""
    single, copied = (get_adapter().load(build(), np.random.default_rng(5)) for _ in range(2))
    return single, replicate(copied, mesh, **options)


def compare(mesh: Any, single: Any, copied: Any, features: int, parts: Any = lambda module: module) -> None:
    """Compare gradients of a step in which ``parts(module)`` is called."""
    adapter, size, rank = get_adapter(), mesh.size(), mesh.get_local_rank(0)
    x = np.random.default_rng(1).standard_normal((size * ROWS, features)).astype(np.float32)

    def loss_of(module: Any) -> Any:
        return lambda x: (adapter.sum(adapter.square(adapter.call(parts(module), x))), None)

    _, _, grads = adapter.model_value_and_grads(single, loss_of(single), x)
    _, _, got = adapter.model_value_and_grads(copied, loss_of(copied), x[rank * ROWS : (rank + 1) * ROWS])
    for name, whole in grads.items():
        if whole is None:
            assert got[name] is None or not adapter.numpy(got[name]).any(), name
            continue
        same(adapter.numpy(got[name]) * size, adapter.numpy(whole), f"gradient of {name}", 1e-4)


@spmd.on_mesh()
def parts(mesh: Any) -> None:
    """Check a submodule that is called directly, a copy, and buffers that get the first rank's values."""
    adapter = get_adapter()
    single, copied = both(lambda: adapter.Mlp(6, 7), mesh)
    compare(mesh, single, copied, 6, lambda module: module.up)
    twin = copy.deepcopy(copied)
    compare(mesh, single, twin, 6)
    compare(mesh, single, copied, 6)
    single, buffered = both(lambda: adapter.Buffered(4), mesh, broadcast_buffers=True)
    with mesh.platform.no_dispatch(), mesh.platform.no_grad():
        mesh.platform.write(buffered.scale, buffered.scale * (1.0 + mesh.get_local_rank(0)))
    compare(mesh, single, buffered, 4)
    same(adapter.numpy(buffered.scale), np.arange(1, 5), "a buffer")


@spmd.on_mesh()
def several_dtypes(mesh: Any) -> None:
    """Check parameters in single and double precision, with one layer excluded."""
    adapter = get_adapter()

    def build() -> Any:
        mlp = adapter.Mlp(6, 7)
        adapter.load(mlp.up, np.random.default_rng(1))
        adapter.load(mlp.down, np.random.default_rng(2), np.float64)
        mesh.platform.replace_forward(mlp, lambda forward: lambda self, x: adapter.call(self.up, x))
        return mlp

    single, copied = build(), replicate(build(), mesh)
    for module in (single, copied):
        assert module.down.weight.dtype != module.up.weight.dtype
    rng = np.random.default_rng(3)
    values = rng.standard_normal((7, 6)).astype(np.float32), rng.standard_normal(7).astype(np.float32)
    for module in (single.up, copied.up):
        with mesh.platform.no_dispatch(), mesh.platform.no_grad():
            for name, value in zip(("weight", "bias"), values, strict=True):
                mesh.platform.write(getattr(module, name), adapter.tensor(value))
    compare(mesh, single, copied, 6)


@spmd.on_mesh()
def second_order(mesh: Any) -> None:
    """Check gradients of gradients of the input: right, or refused on all ranks, also for a distributed batch."""
    adapter = get_adapter()
    single, copied = both(lambda: adapter.Mlp(6, 7), mesh)
    x = np.random.default_rng(1).standard_normal((ROWS, 6)).astype(np.float32)

    def of(module: Any, shared: bool) -> Any:
        def loss(x: Any) -> Any:
            x = DTensor.from_local(x, mesh, [Shard(0)]) if shared else x
            y = adapter.sum(adapter.square(adapter.call(module, x)))
            return y.full_tensor() if shared else y

        return adapter.second_order(loss, lambda g: adapter.sum(adapter.square(g)), [x])[0]

    wanted = of(single, False)
    for shared in (False, True):
        try:
            got = of(copied, shared)
        except RuntimeError as error:
            assert not mesh.platform.tells_beginning
            assert "second-order gradients through replicate" in str(error)
        else:
            same(got, wanted, "gradient of a gradient", 1e-4)
        compare(mesh, single, copied, 6)
    compare(mesh, single, copied, 6)


@spmd.on_mesh()
def refused(mesh: Any) -> None:
    """Check that all ranks refuse before any communication."""
    adapter = get_adapter()
    _, copied = both(lambda: adapter.Mlp(6, 7), mesh)
    x = np.ones((2, 6), np.float32)
    with fails(TypeError, "takes True or False"):
        copied.set_requires_gradient_sync(1)
    with copied.no_sync():
        adapter.model_value_and_grads(copied, lambda x: (adapter.sum(adapter.call(copied, x)), None), x)
    whole = distribute_tensor(adapter.tensor(x), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(ValueError, match="has accumulated gradients of plain inputs that were not all-reduced"):
        adapter.model_value_and_grads(copied, lambda x: (adapter.sum(adapter.call(copied, whole)), None), x)
    _, other_one = both(lambda: adapter.Mlp(6, 7), mesh)
    mesh.platform.own_parameters(other_one.up)["weight"] = adapter.linear_module(6, 7).weight
    with fails(ValueError, "the parameter 'up.weight' was replaced", "replace modules before replicate"):
        adapter.call(other_one, adapter.tensor(x))


@spmd.on_mesh()
def unused_somewhere(mesh: Any) -> None:
    """Check that parameters used by no rank are distinguished from parameters used by some ranks. Flags are reduced
    with the gradients."""
    adapter, platform, size, rank = get_adapter(), mesh.platform, mesh.size(), mesh.get_local_rank(0)
    shapes = ((2, 3), (4,))
    every = [[np.full(shape, 1.0 + r, np.float32) for shape in shapes] for r in range(size)]
    parameters = [adapter.tensor(np.zeros(shape, np.float32)) for shape in shapes]
    for users in ((range(size), range(size)), (range(size), [size - 1]), ([size - 1], [])):
        with other(platform, tells_unused=True), platform.no_grad(), platform.no_dispatch():
            blocks = [Block(platform, shape, 0, 1, 0) for shape in shapes]
            bucket = Bucket(mesh, blocks, parameters[0].dtype, shards=False)
            given = [adapter.tensor(x) if rank in use else None for x, use in zip(every[rank], users, strict=True)]
            found = bucket.reduce(given, "sum").shards()
        for i, (use, got) in enumerate(zip(users, found, strict=True)):
            assert (got is None) == (not use), users
            if use:
                same(adapter.numpy(got), sum(every[r][i] for r in use), f"used by {users}")
    assert not isinstance(parameters[0], DTensor)


@pytest.mark.parametrize(
    "job", [parts, several_dtypes, second_order, refused, unused_somewhere], ids=lambda job: job.__name__
)
@on_ranks(1, 2, 3)
def test_rare(pool: Any, world_size: int, job: Any) -> None:
    pool.run(world_size, job)
