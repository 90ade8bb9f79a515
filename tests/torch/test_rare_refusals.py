"""Refusals of features of torch that other tests do not reach: of one class and one text on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from hyper_parallel import DeviceMesh, Shard, distribute_tensor, fully_shard, register_sharding, replicate
from hyper_parallel.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from hyper_parallel.core.operations import custom_ops
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.debug import CommDebugMode
from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.dry import dry_world
from hyper_parallel.platform.torch.basics.tensor import dispatch
from hyper_parallel.platform.torch.native import native_meshes
from hyper_parallel.platform.torch.processes import collectives
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import device


def sharded(mesh: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return distribute_tensor(torch.ones(*shape, dtype=dtype, device=device()), mesh, [Shard(0)])


def mesh_of_another_device(mesh: Any) -> None:
    other = "cpu" if mesh.device_type != "cpu" else "cuda"
    mesh.platform.describe_native_mesh(TorchMesh(other, torch.arange(mesh.size()), _init_backend=False))


def larger_result(mesh: Any) -> None:
    sharded(mesh, 4).addr_(sharded(mesh, 4), sharded(mesh, 4))


def other_dtype(mesh: Any) -> None:
    sharded(mesh, 4, 4, dtype=torch.int64).addr_(sharded(mesh, 4), sharded(mesh, 4))


def out_of_integers(mesh: Any) -> None:
    torch.add(sharded(mesh, 4), 1, out=sharded(mesh, 4, dtype=torch.int64))


def changed_while_whole(mesh: Any) -> None:
    unit: Any = fully_shard(nn.Linear(4, 4).to(device()), mesh=mesh)
    unit.set_reshard_after_backward(False)
    # Not for each tensor at once: torch_npu does not count such writes.
    optimizer = torch.optim.SGD(unit.parameters(), 0.1, foreach=False)
    x = torch.ones(2, 4, device=device())
    for _ in range(2):
        unit(x).sum().backward()
        optimizer.step()


def state_of_another_shape(mesh: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    state["state"]["weight"]["exp_avg"] = torch.zeros(2, 2)
    set_optimizer_state_dict(model, optimizer, state)


def keywords_without_a_bind(mesh: Any) -> None:
    def rule(shapes: tuple, static_args: tuple) -> OpSharding:
        raise AssertionError("it is not asked")

    operation = torch.ops.aten.special_entr.default
    register_sharding(operation, rule)
    try:
        operation(self=sharded(mesh, 4))
    finally:
        custom_ops._CUSTOM.clear()


class Again(torch.autograd.Function):
    """A user's own checkpointing of a recorded graph: backward runs through that graph, and through the recomputed
    one."""

    @staticmethod
    def forward(ctx: Any, x: Any, layer: nn.Module) -> Any:
        ctx.x, ctx.layer = x.detach().requires_grad_(), layer
        with torch.enable_grad():
            ctx.y = layer(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch.enable_grad():
            again = ctx.layer(ctx.x)
        for y in (ctx.y, again):
            torch.autograd.backward(y, gradients[0])
        return ctx.x.grad, None


class Twice(nn.Module):
    """Two layers that share their weight."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layer, self.other, self.again = nn.Linear(4, 4), nn.Linear(4, 4), again
        self.other.weight = self.layer.weight

    def forward(self, x: Any) -> Any:
        return self.other(Again.apply(x, self.layer) if self.again else self.layer(x))


def untied(mesh: Any) -> None:
    """A shared parameter is replaced in one of its modules, with the same layout."""
    unit: Any = fully_shard(Twice().to(device()), mesh=mesh)
    unit.other.weight = nn.Parameter(unit.layer.weight.detach().clone())
    unit(torch.ones(2, 4, device=device()))


def row_of_nothing(mesh: Any) -> None:
    """A row whose operation an author of a backend has misspelt."""
    row = NativeOp("no_such_operation", lambda func, args, kwargs: (args, ()), lambda func, operands, static: operands)
    dispatch(row, torch.special.entr, (sharded(mesh, 4),), {})


def nothing_distributed(mesh: Any) -> None:
    dispatch(None, torch.add, (1, 2), {})


def groups_after_forward_of_a_part(mesh: Any) -> None:
    """A mesh of four ranks in a world of eight: the other ranks would have to make the groups too."""
    with dry_world(8):
        part = DeviceMesh(None, range(4))
        fully_shard(nn.Linear(4, 4), mesh=part, reshard_after_forward=2)


def destroyed_group(mesh: Any) -> None:
    native_meshes.make_mesh(np.arange(2), None, [lambda: None], None, mesh.device_type)


WRONG: list[tuple[Callable[[Any], None], str]] = [
    (mesh_of_another_device, "ValueError: DeviceMesh("),
    (larger_result, "RuntimeError: addr_: the result has shape (4, 4), and cannot replace (4,)"),
    (other_dtype, "RuntimeError: addr_: result type torch.float32 can't be cast"),
    (out_of_integers, "RuntimeError: add: result type torch.float32 can't be cast"),
    (
        changed_while_whole,
        "RuntimeError: Linear under fully_shard: a parameter changed while it was unsharded: call",
    ),
    (
        state_of_another_shape,
        "ValueError: weight.exp_avg has shape (4, 4) in the optimizer and (2, 2) in the state dict",
    ),
    (untied, "ValueError: Twice under fully_shard: the parameter 'layer.weight' was replaced"),
    (row_of_nothing, "ValueError: the op table maps special_entr to 'no_such_operation', which is not a canonical"),
    (nothing_distributed, "TypeError: add was intercepted without a DTensor among its arguments"),
    (
        groups_after_forward_of_a_part,
        "ValueError: fully_shard(reshard_after_forward=2) creates process groups, which needs all",
    ),
    (destroyed_group, "RuntimeError: this mesh belongs to a process group that was destroyed: make a new mesh"),
    (
        keywords_without_a_bind,
        "TypeError: special_entr.default was called with keywords: pass bind= to register_sharding, a function",
    ),
]


@on_mesh()
def said(mesh: Any) -> list[str]:
    found = []
    for wrong, _ in WRONG:
        try:
            with CommDebugMode():
                wrong(mesh)
            found.append("nothing")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_each_is_an_error_on_all_ranks(pool: Any) -> None:
    first, second = pool.run(2, said)
    assert first == second
    expected = [text for _, text in WRONG]
    assert [
        text if text.startswith(e) else f"{text!r}, not {e!r}" for text, e in zip(first, expected, strict=True)
    ] == first


def elsewhere() -> str:
    """The error of a functional collective on the one rank of two that is not part of its mesh."""
    meshes = [DeviceMesh(None, [rank]) for rank in range(2)]
    other = meshes[dist.get_rank() == 0]
    try:
        all_reduce(torch.ones(2, device=device()), "sum", other)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_collective_of_other_ranks(pool: Any) -> None:
    for text in pool.run(2, elsewhere):
        assert text.startswith("this rank is not part of DeviceMesh(") and text.endswith(
            "on the ranks of the mesh alone"
        )


def test_a_torch_that_sorts_the_ranks_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of torch sort the ranks of a group, and so cannot make this one."""
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, timeout=None: None)
    assert collectives._ordered([0, 1]) == {}
    with pytest.raises(ValueError, match=r"the ranks \[1, 0\] .* do not ascend.*make a mesh with ascending ranks"):
        collectives._ordered([1, 0])


@on_mesh()
def computed_again(mesh: Any) -> str:
    model = replicate(Twice(again=True).to(device()), mesh, bucket_cap_mb=1e-6)
    try:
        model(torch.ones(2, 4, device=device(), requires_grad=True)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.skipif(os.environ.get("HYPER_PARALLEL_FAST") == "0", reason="without short ways it comes in time")
def test_a_gradient_that_comes_after_its_bucket_was_sent(pool: Any) -> None:
    first, second = pool.run(2, computed_again)
    assert first == second
    assert first.startswith("a gradient of a module under replicate arrived after its bucket was reduced")
