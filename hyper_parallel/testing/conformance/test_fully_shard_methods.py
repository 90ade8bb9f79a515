"""`fully_shard`: rarely used methods."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    CommDebugMode,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from hyper_parallel.core.data_parallel.fully_shard import buffers_of
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_fully_shard import held_bytes
from hyper_parallel.testing.conformance.test_fully_shard_corners import changed
from hyper_parallel.testing.conformance.test_fully_shard_units import ROWS, Trained, block_of, shard_block
from hyper_parallel.testing.extent import on_ranks

FEATURES = 6


def batches(mesh: Any, count: int) -> list[tuple[Any, Any]]:
    """Return global batches, each with this rank's shard of it."""
    rank = mesh.get_local_rank(0)
    xs = np.random.default_rng(1).standard_normal((count, mesh.size() * ROWS, FEATURES)).astype(np.float32)
    return [(x, x[rank * ROWS : (rank + 1) * ROWS]) for x in xs]


@spmd.on_mesh()
def other_methods(mesh: Any) -> None:
    """Check that registered methods compute with unsharded parameters, also on a copy and for functions set on the
    object."""
    adapter = get_adapter()

    def build() -> Any:
        mlp = adapter.load(adapter.Mlp(FEATURES, 7), np.random.default_rng(5))
        object.__setattr__(mlp, "raised", MethodType(lambda self, x, by: adapter.call(self.up, x) + by, mlp))
        object.__setattr__(mlp, "raise_more", lambda x: mlp.raised(x, by=2.0))
        return mlp

    single, sharded = build(), fully_shard(build(), mesh=mesh)
    register_fsdp_forward_method(single, "no matter which: fully_shard was not applied")
    for name in ("raised", "raise_more"):
        register_fsdp_forward_method(sharded, name)
    with fails(ValueError, "has no method 'lowered'"):
        register_fsdp_forward_method(sharded, "lowered")
    twin = copy.deepcopy(sharded)
    ((x, mine),) = batches(mesh, 1)

    def loss_of(module: Any, name: str, **options: Any) -> Any:
        return lambda x: (adapter.sum(adapter.square(getattr(module, name)(x, **options))), None)

    for module, name, options in (
        (sharded, "raised", {"by": 2.0}),
        (sharded, "raise_more", {}),
        (twin, "raised", {"by": 2.0}),
    ):
        _, _, grads = adapter.model_value_and_grads(single, loss_of(single, "raised", by=2.0), x)
        _, _, got = adapter.model_value_and_grads(module, loss_of(module, name, **options), mine)
        for key in ("up.weight", "up.bias"):
            same(adapter.numpy(got[key]) * mesh.size(), adapter.numpy(grads[key]), f"gradient of {key}, {name}", 1e-4)
    share_comm_ctx([sharded, twin])
    with fails(ValueError, "share_comm_ctx takes modules to which fully_shard was applied"):
        share_comm_ctx([sharded, single])


@spmd.on_mesh()
def kept_storage(mesh: Any) -> None:
    """Check unsharded parameters that keep their addresses, and several pending reductions."""
    trained = Trained(mesh, lambda: block_of((6, 7)), lambda b: shard_block(b, mesh), (2, 6))
    block = trained.sharded
    block.set_keep_unsharded_storage(True)
    block.set_reduce_scatter_max_input_buffers(2)
    found = []
    for step in range(2):
        trained.step(step)
        buffers = [b for m in (block, block.attention) for b in buffers_of(m)]
        found.append([b.whole.untyped_storage().data_ptr() for b in buffers if b.whole is not None])
        assert not mesh.platform.frees_storage or held_bytes(block.attention) > 0
    assert found[0] == found[1]
    block.set_keep_unsharded_storage(False)
    trained.step(2)
    assert not mesh.platform.frees_storage or held_bytes(block) == held_bytes(block.attention) == 0
    trained.check()


@spmd.on_mesh()
def not_in_backward(mesh: Any) -> None:
    """Check that parameters are not gathered for a backward that does not read them."""
    adapter = get_adapter()

    def build() -> Any:
        mlp = adapter.load(adapter.Mlp(FEATURES, FEATURES), np.random.default_rng(5))
        mesh.platform.replace_forward(mlp.up, lambda forward: lambda self, x: x + self.bias)
        return mlp

    single, sharded = build(), build()
    for one in (sharded.up, sharded.down):
        fully_shard(one, mesh=mesh, reshard_after_forward=True)
    fully_shard(sharded, mesh=mesh)
    sharded.up.set_unshard_in_backward(False)
    ((x, mine),) = batches(mesh, 1)

    def loss_of(module: Any) -> Any:
        return lambda x: (adapter.sum(adapter.square(adapter.call(module, x))), None)

    _, _, grads = adapter.model_value_and_grads(single, loss_of(single), x)
    for _ in range(2):
        with CommDebugMode() as comm:
            _, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded), mine)
        again = 1 if mesh.platform.frees_storage else 0
        assert comm.get_comm_counts() == ({"all_gather": 2 + again, "reduce_scatter": 2} if mesh.size() > 1 else {})
        for name in ("up.bias", "down.weight", "down.bias"):
            same(adapter.numpy(got[name]) * mesh.size(), adapter.numpy(grads[name]), f"gradient of {name}", 1e-4)


@spmd.on_mesh()
def finalized_by_hand(mesh: Any) -> None:
    """Check that gradients of two backward passes are complete after `finalize_backward`."""
    adapter, platform, size = get_adapter(), mesh.platform, mesh.size()
    single = adapter.load(block_of((FEATURES, 7)), np.random.default_rng(5))
    sharded = shard_block(adapter.load(block_of((FEATURES, 7)), np.random.default_rng(5)), mesh)
    sharded.set_manual_backward_finalization(True)
    assert sharded.finalize_backward() is None
    sharded.finalize_backward(async_op=True).wait()

    def loss_of(module: Any) -> Any:
        return lambda x: (
            adapter.sum(adapter.square(adapter.call(module, adapter.reshape(x, (-1, 1, FEATURES))))),
            None,
        )

    # Where backward returns gradients there is nothing to be said.
    for async_op in (False, True) if platform.accumulates_gradients else ():
        wanted: dict[str, Any] = {}
        with CommDebugMode() as comm:
            for i, (x, mine) in enumerate(batches(mesh, 2)):
                _, _, grads = adapter.model_value_and_grads(single, loss_of(single), x)
                for name, g in grads.items():
                    wanted[name] = wanted.get(name, 0) + adapter.numpy(g)
                sharded.set_requires_gradient_sync(False)
                _, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded), mine)
                assert all(g is None for g in got.values()), i
        assert "reduce_scatter" not in comm.get_comm_counts()
        sharded.set_requires_gradient_sync(True)
        with CommDebugMode() as comm:
            handle = sharded.finalize_backward(async_op=async_op)
        assert comm.get_comm_counts() == ({"reduce_scatter": 3} if size > 1 else {})
        if async_op:
            handle.wait()
            handle.wait()
        for name, p in adapter_parameters(sharded, platform):
            same(adapter.numpy(p.grad) * size, wanted[name], f"gradient of {name}", 2e-4)
        # One backward that reduces: gradients come when it is said.
        ((x, mine),) = batches(mesh, 1)
        _, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded), mine)
        assert platform.fast is None or all(g is None for g in got.values())
        handle = sharded.finalize_backward(async_op=True)
        if async_op:
            sharded.reset_iter_state()
            with fails(RuntimeError, "reset_iter_state has dropped the gradients"):
                handle.wait()
        else:
            handle.wait()
            assert all(p.grad is not None for _, p in adapter_parameters(sharded, platform))
    if not platform.accumulates_gradients:
        ((x, mine),) = batches(mesh, 1)
        _, _, grads = adapter.model_value_and_grads(single, loss_of(single), x)
        _, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded), mine)
        for name, g in grads.items():
            same(adapter.numpy(got[name]) * size, adapter.numpy(g), f"gradient of {name}", 2e-4)
        handle = sharded.finalize_backward(async_op=True)
        sharded.reset_iter_state()
        with fails(RuntimeError, "reset_iter_state has dropped the gradients"):
            handle.wait()
    adapter.call(sharded, adapter.tensor(np.ones((2, 1, FEATURES), np.float32)))
    with fails(RuntimeError, "set_manual_backward_finalization must be called on the outermost module"):
        sharded.attention.set_manual_backward_finalization(True)
    sharded.finalize_backward()
    sharded.set_manual_backward_finalization(False)
    with fails(RuntimeError, "call set_manual_backward_finalization(True)"):
        sharded.finalize_backward()
    other = shard_block(adapter.load(block_of((FEATURES, 7)), np.random.default_rng(5)), mesh)
    other.attention.set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="must be called on the outermost module"):
        adapter.call(other, adapter.tensor(np.ones((2, 1, FEATURES), np.float32)))

    def within(x: Any) -> Any:
        return adapter.sum(mesh.platform.autograd_function(lambda ctx, x: mesh.platform.detach(x), said)(x)), None

    def said(ctx: Any, cotangent: Any) -> Any:
        with pytest.raises(RuntimeError, match="call it before backward, not during backward"):
            sharded.set_manual_backward_finalization(True)
        return cotangent

    adapter.model_value_and_grads(sharded, within, np.ones((2, FEATURES), np.float32))


def adapter_parameters(module: Any, platform: Any) -> list[tuple[str, Any]]:
    """Return names and parameters."""
    return [
        (f"{path}.{name}" if path else name, p)
        for path, m in platform.named_modules(module)
        for name, p in platform.named_parameters(m)
    ]


@spmd.on_mesh()
def some_in_lower_precision(mesh: Any) -> None:
    """Check two parameters of one dtype, one of which is gathered and read in lower precision."""
    adapter, size = get_adapter(), mesh.size()
    half, whole = (adapter.tensor(np.ones(1, dtype)).dtype for dtype in (np.float16, np.float32))
    read: list[Any] = []

    def make(forward: Any) -> Any:
        def run(self: Any, x: Any) -> Any:
            read.append((self.weight.dtype, self.bias.dtype))
            return x * adapter.sum(self.weight) + adapter.sum(self.bias)

        return run

    def loss_of(module: Any) -> Any:
        return lambda x: (adapter.mean(adapter.square(adapter.call(module, x))), None)

    single = changed(mesh, make)
    for given in (whole, whole, None, half):
        policy = MixedPrecisionPolicy(
            param_dtype=half,
            cast_forward_inputs=False,
            param_dtype_override_fn=lambda p, given=given: given if len(p.shape) == 1 else None,
        )
        sharded = fully_shard(changed(mesh, make), mesh=mesh, mp_policy=policy)
        ((x, mine),) = batches(mesh, 1)
        _, _, grads = adapter.model_value_and_grads(single, loss_of(single), x)
        read.clear()
        with CommDebugMode() as comm:
            _, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded), mine)
        assert read[0] == (half, whole if given == whole else half)
        kinds = 2 if given == whole else 1
        gathers = comm.get_comm_counts().get("all_gather", 0)
        assert size == 1 or gathers == kinds, gathers
        for name, g in grads.items():
            assert got[name].dtype == whole
            same(adapter.numpy(got[name]), adapter.numpy(g), f"gradient of {name}", 1e-2)
    wrong = MixedPrecisionPolicy(
        param_dtype=half, param_dtype_override_fn=lambda p: adapter.tensor(np.ones(1, np.int32)).dtype
    )
    with fails(ValueError, "param_dtype_override_fn returned", "parameter 'weight'"):
        fully_shard(changed(mesh, make), mesh=mesh, mp_policy=wrong)


@spmd.on_mesh()
def refused(mesh: Any) -> None:
    """Check that wrong and unsupported arguments are rejected."""
    block = shard_block(get_adapter().load(block_of((6, 7)), np.random.default_rng(3)), mesh)
    block.set_reduce_scatter_unused_params(True, recurse=False)
    block.set_separate_reduce_scatter_group(False)
    block.set_allocate_memory_from_process_group_for_comm(False)
    with fails(ValueError, "and call set_custom_reduce_scatter(comm) with a comm"):
        block.set_separate_reduce_scatter_group()
    with fails(ValueError, "set_symm_mem_for_comm is not supported: ", "allocate(size, *, dtype"):
        block.set_symm_mem_for_comm()
    with fails(
        ValueError, "set_allocate_memory_from_process_group_for_comm is not supported: ", "allocate(size, *, dtype"
    ):
        block.set_allocate_memory_from_process_group_for_comm(True)
    for wrong in (True, 1.5):
        with fails(TypeError, "set_reduce_scatter_max_input_buffers takes a number"):
            block.set_reduce_scatter_max_input_buffers(wrong)
    with fails(ValueError, "takes 1 or more"):
        block.set_reduce_scatter_max_input_buffers(0)


JOBS = (other_methods, kept_storage, not_in_backward, finalized_by_hand, some_in_lower_precision, refused)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@on_ranks(1, 3)
def test_methods(pool: Any, world_size: int, job: Any) -> None:
    pool.run(world_size, job)
