"""Parallelised models on fake GPUs, forward, backward and a step of the optimizer: device, dtype, shapes, placements,
and the collectives that reach nccl's place. The reference is the single-device model on the same fake GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Replicate,
    RowwiseParallel,
    Shard,
    init_device_mesh,
    loss_parallel,
    manual_seed,
    parallelize_module,
    strict,
)
from hyper_parallel.testing.adapters import torch_adapter
from hyper_parallel.testing.comparisons import block_plan
from tests.fake_cuda.conftest import WORLD
from tests.fake_cuda.device import CUDA, FakeCudaMode

#: Functions of a process group -> the collective that each one is.
CALLED = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
}
IDS, FLOATS = "ids", "floats"


class Case:
    """A model, its plan, its input, and the collectives forward and backward.

    ``along``: dimension of the input that the plan takes sharded.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        plan: dict[str, Any],
        shape: tuple[int, ...],
        forward: dict[str, int],
        backward: dict[str, int],
        kind: str = FLOATS,
        along: int | None = None,
    ) -> None:
        self.make, self.plan, self.shape, self.kind, self.along = make, plan, shape, kind, along
        self.forward, self.backward = forward, backward

    def input(self, dtype: torch.dtype) -> torch.Tensor:
        """Make an input of global shape, or this rank's part of it when the plan takes shards."""
        shape = list(self.shape)
        if self.along is not None:
            shape[self.along] //= WORLD
        if self.kind == IDS:
            return torch.randint(0, 7, shape, device="cuda")
        return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


ONE = {"all_reduce": 1}
SEQUENCE = {"all_gather": 2, "reduce_scatter": 2}
CASES = {
    "mlp": Case(
        lambda: torch_adapter.Mlp(12, 24), {"up": ColwiseParallel(), "down": RowwiseParallel()}, (3, 12), ONE, ONE
    ),
    "uneven mlp": Case(
        lambda: torch_adapter.Mlp(7, 9), {"up": ColwiseParallel(), "down": RowwiseParallel()}, (3, 7), ONE, ONE
    ),
    "attention": Case(
        lambda: torch_adapter.Attention(24, 2),
        {"w[qkv]": ColwiseParallel(), "wo": RowwiseParallel()},
        (2, 5, 24),
        ONE,
        ONE,
    ),
    "llama block": Case(
        lambda: torch_adapter.Block(24, 36, 2),
        block_plan(local_between=True),
        (2, 12, 24),
        SEQUENCE,
        {**SEQUENCE, "all_reduce": 4},
        along=1,
    ),
    "llama block of DTensors": Case(
        lambda: torch_adapter.Block(24, 36, 2),
        block_plan(local_between=False),
        (2, 12, 24),
        SEQUENCE,
        {**SEQUENCE, "all_reduce": 4},
        along=1,
    ),
    "embedding by rows": Case(
        lambda: nn.Embedding(11, 6), {"": RowwiseParallel(input_layouts=Replicate())}, (4, 5), ONE, {}, IDS
    ),
    "embedding by columns": Case(
        lambda: nn.Embedding(11, 7),
        {"": ColwiseParallel(output_layouts=Replicate())},
        (4, 5),
        {"all_gather": 1},
        {},
        IDS,
    ),
    "tied embedding and head": Case(
        lambda: torch_adapter.Tied(12, 6),
        {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
        (3, 4),
        {"all_reduce": 1, "all_gather": 1},
        ONE,
        IDS,
    ),
}


def on_gpu(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A model made there: ``.to`` swaps parameters, which torch does not do with fake ones."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with CUDA:
            return make()
    finally:
        torch.set_default_dtype(default)


def parallelised(case: Case, dtype: torch.dtype) -> nn.Module:
    mesh = init_device_mesh("cuda", (WORLD,))
    manual_seed(0, mesh)
    return parallelize_module(on_gpu(case.make, dtype), mesh, case.plan)


def check_sent(mode: FakeCudaMode, counts: dict[str, int], dtype: torch.dtype) -> None:
    """The collectives that CommDebugMode counts reached the process group, on the GPU and in the model's dtype."""
    names = [name for name, _, _ in mode.sent]
    two_tensors = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")  # output and input
    calls = Counter(CALLED[name] for name in names for _ in range(1 if name in two_tensors else 2))
    assert {name: count // 2 for name, count in calls.items()} == counts
    assert {(used, device) for _, used, device in mode.sent} <= {(dtype, CUDA)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_model(mode: FakeCudaMode, name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    model = parallelised(case, dtype)
    single = on_gpu(case.make, dtype)
    x = case.input(dtype)
    with strict():
        mode.sent.clear()
        with CommDebugMode() as forward:
            y = model(x)
        assert forward.get_comm_counts() == case.forward
        check_sent(mode, case.forward, dtype)
        wanted = single(case.input(dtype))
        assert (y.device, y.dtype, y.shape) == (CUDA, dtype, wanted.shape) and not isinstance(y, DTensor)
        mode.sent.clear()
        with CommDebugMode() as backward:
            y.sum().backward()
        assert backward.get_comm_counts() == case.backward
        check_sent(mode, case.backward, dtype)
    if case.kind == FLOATS:
        assert (x.grad.device, x.grad.dtype, x.grad.shape) == (CUDA, dtype, x.shape)
    check_parameters(model, single, dtype)


def check_parameters(model: nn.Module, single: nn.Module, dtype: torch.dtype) -> None:
    """Distributed ones with the shape of the single-device model's, gradients laid out like them, all on the GPU."""
    for (path, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        assert isinstance(p, nn.Parameter) and isinstance(p, DTensor) and isinstance(p.grad, DTensor), path
        assert p.shape == p.grad.shape == q.shape and p.grad.placements == p.placements, path
        for x in (p, p.grad):
            local = x.to_local()
            assert x.device == local.device == CUDA and x.dtype is local.dtype is dtype, path
            assert tuple(local.shape) == tuple(x._layout.local_shape), path


def test_training_step(mode: FakeCudaMode) -> None:
    """Clipping and AdamW, tensor by tensor: functions over lists look at devices below Python, where these are meta."""
    model = parallelised(CASES["llama block"], torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(CASES["llama block"].input(torch.bfloat16)).sum().backward()
    mode.sent.clear()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    assert norm.device == CUDA and norm.dtype is torch.bfloat16 and norm.shape == ()
    assert {device for _, _, device in mode.sent} == {CUDA}
    optimizer.step()
    for p in model.parameters():
        for moment in (optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
            assert isinstance(moment, DTensor) and moment._layout is p._layout
            assert (moment.device, moment.dtype, moment.shape) == (CUDA, torch.bfloat16, p.shape)
            assert moment.to_local().shape == p.to_local().shape
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_loss_of_sharded_logits(mode: FakeCudaMode) -> None:
    """Vocabulary-parallel cross entropy never gathers the logits, and its sums are float32."""
    mesh = init_device_mesh("cuda", (WORLD,))
    head = nn.Linear(6, 12, bias=False, device="cuda", dtype=torch.bfloat16)
    parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
    x = torch.randn(5, 6, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 12, (5,), device="cuda")
    with CommDebugMode() as counted, loss_parallel():
        loss = F.cross_entropy(head(x), labels)
        loss.backward()
    assert loss.device == CUDA and loss.shape == ()
    assert "all_gather" not in counted.get_comm_counts()
    assert (x.grad.device, x.grad.dtype) == (CUDA, torch.bfloat16)
    assert head.weight.grad.placements == (Shard(0),) and head.weight.grad.device == CUDA


def test_host_model(mode: FakeCudaMode) -> None:
    """A model that was made on the host is on the GPU once it is parallelised."""
    model = torch_adapter.Mlp(12, 24)
    assert model.up.weight.device.type == "cpu"
    parallelize_module(model, init_device_mesh("cuda", (WORLD,)), CASES["mlp"].plan)
    assert {p.device for p in model.parameters()} == {CUDA}
    assert model(torch.randn(3, 12, device="cuda")).device == CUDA


def test_two_dimensional_mesh(mode: FakeCudaMode) -> None:
    """Tensor parallelism on one dimension of a mesh of GPUs: its collectives go to the group of that dimension."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    model = on_gpu(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), torch.float32)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    mode.sent.clear()
    y = model(torch.randn(3, 6, device="cuda"))
    assert (y.device, y.shape) == (CUDA, (3, 6))
    check_sent(mode, ONE, torch.float32)
    assert mesh["tp"].get_group().size() == 2
