"""`fully_shard`: results and dtypes of units, and methods that change a unit between steps."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, DTensor, FSDPModule, MixedPrecisionPolicy, fully_shard
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_fully_shard_units import ROWS, Trained, block_of, shard_block
from hyper_parallel.testing.extent import on_ranks

SIZES = (6, 5)


@dataclasses.dataclass
class Output:
    """Output class of some models."""

    y: Any
    weight: Any = None


class Unknown:
    """Container in which the library does not search for tensors."""

    def __init__(self, y: Any) -> None:
        self.y = y


#: The return value of a linear module in place of y -> the parts of it to compare.
NESTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], list[Any]]]] = {
    "tuple": (lambda y, w: (y, None, 3), lambda out: [out[0]]),
    "dict": (lambda y, w: {"y": y, "more": [y * 2.0]}, lambda out: [out["y"], out["more"][0]]),
    "dataclass": (Output, lambda out: [out.y]),
    "a parameter": (lambda y, w: (y, w), lambda out: [out[0], out[1]]),
}


def returning(mesh: Any, wrap: Callable[[Any, Any], Any]) -> Any:
    """Return a linear module that returns ``wrap(y, weight)``."""
    adapter = get_adapter()
    module = adapter.load(adapter.linear_module(*SIZES), np.random.default_rng(5))

    def make(forward: Any) -> Any:
        return lambda self, x: wrap(forward(self, x), self.weight)

    mesh.platform.replace_forward(module, make)
    return module


@spmd.on_mesh()
def nests(mesh: Any) -> None:
    """Check values and gradients of nested results. A result that is a parameter stays valid after its module has
    run."""
    adapter, size, rank = get_adapter(), mesh.size(), mesh.get_local_rank(0)
    x = np.random.default_rng(1).standard_normal((size * ROWS, SIZES[0])).astype(np.float32)
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    for kind, (wrap, parts) in NESTS.items():
        single, sharded = returning(mesh, wrap), fully_shard(returning(mesh, wrap), mesh=mesh)

        def loss_of(module: Any, parts: Any, scale: float) -> Any:
            def loss(x: Any) -> Any:
                found = parts(adapter.call(module, x))
                total = sum(adapter.sum(adapter.square(part)) for part in found)
                return total * scale, found[0]

            return loss

        # A parameter is in each rank's loss: averages are as if there were one.
        rows_alone = kind != "a parameter"
        y, _, grads = adapter.model_value_and_grads(single, loss_of(single, parts, 1.0), x)
        got_y, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded, parts, 1.0), x[mine])
        same(adapter.numpy(got_y), adapter.numpy(y)[mine], f"output in a {kind}", 1e-4)
        if rows_alone:
            for name, whole in grads.items():
                same(adapter.numpy(got[name]) * size, adapter.numpy(whole), f"{kind}: gradient of {name}", 1e-4)
        else:
            weight = adapter.numpy(single.weight)
            rows = adapter.numpy(grads["weight"]) - 2 * weight
            same(adapter.numpy(got["weight"]), rows / size + 2 * weight, "gradient of a result", 1e-4)
            out = adapter.call(sharded, adapter.tensor(x[mine]))
            same(adapter.numpy(out[1]), weight, "a parameter that was returned")


@on_ranks(1, 2, 3)
def test_results_in_nests(pool: Any, world_size: int) -> None:
    pool.run(world_size, nests)


@spmd.on_mesh()
def refused(mesh: Any) -> None:
    adapter = get_adapter()
    x = np.ones((2, SIZES[0]), np.float32)
    single = returning(mesh, lambda y, w: y)
    sharded = fully_shard(returning(mesh, lambda y, w: Unknown(y)), mesh=mesh, reshard_after_forward=True)

    def loss(x: Any) -> Any:
        return adapter.sum(adapter.square(adapter.call(sharded, x).y)), None

    if mesh.platform.frees_storage and not mesh.platform.tells_beginning:
        with pytest.raises(TypeError, match=r"Unknown.*return tensors"):
            adapter.model_value_and_grads(sharded, loss, x)
    elif mesh.platform.tells_beginning:
        _, _, got = adapter.model_value_and_grads(sharded, loss, x)
        _, _, grads = adapter.model_value_and_grads(
            single, lambda x: (adapter.sum(adapter.square(adapter.call(single, x))), None), x
        )
        for name, whole in grads.items():
            same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name} through an object", 1e-4)
    block = shard_block(adapter.load(block_of((8, 12)), np.random.default_rng(3)), mesh)
    with fails(RuntimeError, "set_is_last_backward", "after the first forward"):
        block.set_is_last_backward(True)
    taken = fully_shard(adapter.load(adapter.linear_module(*SIZES), np.random.default_rng(5)), mesh=mesh)
    other = adapter.linear_module(*SIZES)
    mesh.platform.own_parameters(taken)["weight"] = other.weight
    with fails(ValueError, "was replaced", "weight"):
        adapter.call(taken, adapter.tensor(x))
    mlp = fully_shard(adapter.Mlp(SIZES[0], 4), mesh=mesh)
    adapter.call(mlp, adapter.tensor(x))
    mlp.down = adapter.linear_module(4, SIZES[0])
    gc.collect()  # the module that was there is gone
    with fails(ValueError, "the parameter 'down.weight' was replaced", "replace modules before fully_shard"):
        adapter.call(mlp, adapter.tensor(x))


@on_ranks(1, 2)
def test_refusals(pool: Any, world_size: int) -> None:
    pool.run(world_size, refused)


@spmd.on_mesh()
def dtypes(mesh: Any) -> None:
    """Check that `output_dtype` converts the outputs, and `cast_forward_inputs` the inputs."""
    adapter = get_adapter()
    single, sharded = (adapter.load(adapter.linear_module(*SIZES), np.random.default_rng(5)) for _ in range(2))
    half, whole = (adapter.tensor(np.ones(1, dtype)).dtype for dtype in (np.float16, np.float32))
    fully_shard(sharded, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=whole, output_dtype=half))
    x = np.random.default_rng(1).standard_normal((ROWS, SIZES[0])).astype(np.float16)
    y = adapter.call(sharded, adapter.tensor(x))
    assert y.dtype == half
    wanted = adapter.numpy(adapter.call(single, adapter.tensor(x.astype(np.float32))))
    same(adapter.numpy(y).astype(np.float32), wanted, "output in half precision", 2e-3)


@on_ranks(1, 2, 3)
def test_dtypes(pool: Any, world_size: int) -> None:
    pool.run(world_size, dtypes)


@spmd.on_mesh()
def switched(mesh: Any) -> Any:
    """Check that training is exact under each setting. Return the collectives of a step under some of the settings."""
    trained = Trained(mesh, lambda: block_of((8, 12)), lambda b: shard_block(b, mesh), (2, 8), 0.001)
    block: Any = trained.sharded
    trained.step(0)
    block.attention.set_modules_to_backward_prefetch([block])
    block.feed_forward.set_modules_to_backward_prefetch([block.attention])
    block.set_requires_gradient_sync(True)
    block.set_requires_all_reduce(True)
    block.set_is_last_backward(True)
    trained.step(1)
    block.set_reshard_after_backward(False)
    trained.step(2)
    for module in (block, block.attention, block.feed_forward):
        module.reshard()
    block.set_reshard_after_backward(True)
    block.reset_iter_state()
    trained.step(3)
    trained.check()
    twin = copy.deepcopy(block)
    assert isinstance(twin, FSDPModule) and isinstance(twin.attention.wq.weight, DTensor)
    adapter = get_adapter()
    x = adapter.tensor(np.random.default_rng(2).standard_normal((2, 2, 8)).astype(np.float32))
    with CommDebugMode() as comm:
        same(adapter.numpy(adapter.call(twin, x)), adapter.numpy(adapter.call(trained.single, x)), "a copy", 1e-4)
    return comm.get_comm_counts()


@on_ranks(1, 2, 3)
def test_methods_in_training(pool: Any, world_size: int) -> None:
    for counts in pool.run(world_size, switched):
        assert counts == ({"all_gather": 3} if world_size > 1 else {})
