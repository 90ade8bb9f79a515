"""DTensors on fake GPUs: meshes, factories, redistributions and random numbers stay on the device, with their dtype."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel as hp
from hyper_parallel import CommDebugMode, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.rules.sequence_cut import attention_method
from tests.fake_cuda.conftest import WORLD
from tests.fake_cuda.device import CUDA, FakeCudaMode

#: Dtypes that nccl moves and reduces, that it only sums, that it does not know.
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.complex64, torch.int16, torch.float8_e4m3fn]
SHAPE = (6, 5)


def mesh_1d() -> Any:
    return init_device_mesh("cuda", (WORLD,), mesh_dim_names=("tp",))


def check(x: Any, placements: tuple, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> None:
    """A DTensor laid out as asked, whose local tensor lies on the GPU and has the part of this rank."""
    assert isinstance(x, DTensor) and x.placements == placements and tuple(x.shape) == shape
    local = x.to_local()
    assert x.device == local.device == CUDA and x.is_cuda
    assert x.dtype is local.dtype is dtype
    wanted = list(shape)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = torch.empty(wanted[placement.dim], device="cuda").chunk(x.device_mesh.shape[mesh_dim])
            rank = x.device_mesh.get_local_rank(mesh_dim)
            wanted[placement.dim] = parts[rank].numel() if rank < len(parts) else 0
    assert list(local.shape) == wanted


def test_mesh(mode: FakeCudaMode) -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.device_type == mesh["tp"].device_type == "cuda" and mesh.platform.name == "torch-cuda"
    assert init_device_mesh(None, (WORLD,)).platform is mesh.platform
    x = distribute_tensor(torch.randn(SHAPE, device="cuda"), mesh, [Shard(0), Shard(1)])
    check(x, (Shard(0), Shard(1)), torch.float32)
    assert {(dtype, device) for _, dtype, device in mode.sent} == {(torch.float32, CUDA)}


def test_host_tensors_go_to_the_gpu(mode: FakeCudaMode) -> None:
    mesh = mesh_1d()
    check(distribute_tensor(torch.randn(SHAPE), mesh, [Shard(1)]), (Shard(1),), torch.float32)
    check(DTensor.from_local(torch.randn(SHAPE), mesh, [Replicate()]), (Replicate(),), torch.float32)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int64])
def test_factories(mode: FakeCudaMode, dtype: torch.dtype | None) -> None:
    mesh = mesh_1d()
    hp.manual_seed(0, mesh)
    made = [hp.zeros, hp.ones, hp.empty, *([] if dtype is torch.int64 else [hp.rand, hp.randn])]
    for placement in (Shard(0), Shard(1), Replicate()):
        options = {"device_mesh": mesh, "placements": [placement], "dtype": dtype}
        for make in made:
            check(make(*SHAPE, **options), (placement,), dtype or torch.float32)
        check(hp.full(SHAPE, 3, **{**options, "dtype": dtype or torch.float32}), (placement,), dtype or torch.float32)
    # Replicated random numbers are the first rank's.
    assert mode.sent == [("broadcast_", dtype or torch.float32, CUDA)] * (0 if dtype is torch.int64 else 2)


PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial())
#: The collectives of a redistribution, and the function of the process group that each one is.
COLLECTIVE = {
    (Shard, Replicate): ("all_gather", "_allgather_base_"),
    (Partial, Replicate): ("all_reduce", "allreduce_"),
    (Partial, Shard): ("reduce_scatter", "_reduce_scatter_base_"),
    (Shard, Shard): ("all_to_all", "alltoall_base_"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_redistribute(mode: FakeCudaMode, dtype: torch.dtype) -> None:
    """Uneven sizes: six rows and five columns over four ranks."""
    mesh = mesh_1d()
    reduced = mesh.platform.supports("all_reduce", "sum", torch.empty(0, dtype=dtype, device="cuda"))
    moved = dtype if dtype in mesh.platform.moved_dtypes else torch.uint8
    for source, target in itertools.product(PLACEMENTS, (Shard(0), Shard(1), Replicate())):
        local = distribute_tensor(torch.empty(SHAPE, dtype=dtype, device="cuda"), mesh, [Replicate()])
        if isinstance(source, Partial):
            local = DTensor.from_local(local.to_local(), mesh, [source])
        else:
            local = local.redistribute(placements=[source])
        mode.sent.clear()
        with CommDebugMode() as counted:
            result = local.redistribute(placements=[target])
        check(result, (target,), dtype)
        expected = COLLECTIVE.get((type(source), type(target))) if source != target else None
        assert counted.get_comm_counts() == ({expected[0]: 1} if expected else {}), (source, target)
        sums = expected is not None and isinstance(source, Partial)
        if expected is None:
            assert mode.sent == []
        elif sums and not reduced:
            # Gathered as bytes and added.
            assert {name for name, _, _ in mode.sent} <= {"_allgather_base_", "alltoall_base_"}, mode.sent
        else:
            wanted = (expected[1], dtype if sums else moved, CUDA)
            assert set(mode.sent) == {wanted}, (source, target)


def test_full_tensor_and_gradient(mode: FakeCudaMode) -> None:
    """The cotangent of a gathered tensor is cut, without a collective."""
    mesh = mesh_1d()
    x = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
    with CommDebugMode() as counted:
        whole = d.full_tensor()
        whole.sum().backward()
    assert counted.get_comm_counts() == {"all_gather": 1}
    assert whole.device == CUDA and whole.dtype is torch.bfloat16 and tuple(whole.shape) == SHAPE
    check(d.grad, (Shard(0),), torch.bfloat16)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
def test_dropout_and_initialisation(mode: FakeCudaMode, placement: Any) -> None:
    """Noise is drawn on the GPU, for the whole tensor, and cut there. The first rank sends the parts that several ranks
    hold."""
    mesh = mesh_1d()
    hp.manual_seed(0, mesh)
    if isinstance(placement, Partial):
        x = DTensor.from_local(torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16), mesh, [placement])
    else:
        x = distribute_tensor(torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16), mesh, [placement])
        with torch.no_grad():
            for fill in (torch.nn.init.normal_, torch.nn.init.kaiming_uniform_):
                check(fill(x), (placement,), torch.bfloat16)
        check(torch.randn_like(x), (placement,), torch.bfloat16)
    mode.sent.clear()
    check(F.dropout(x, 0.5, True), (placement,), torch.bfloat16)
    alike = [("broadcast_", torch.bfloat16, CUDA)] if placement in (Replicate(), Partial()) else []
    assert mode.sent == alike
    assert set(mode.drawn) == {CUDA}


def test_generators_are_synchronized_by_the_gpu_state(mode: FakeCudaMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank takes over the GPU state of the mesh's first rank before the first random operation."""
    from hyper_parallel.core.rules import random

    mesh, states = mesh_1d(), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "mine")
    monkeypatch.setattr(torch.cuda, "set_rng_state", states.append)
    monkeypatch.setattr(random, "all_gather_object", lambda state, mesh, dim: [f"{state} of rank 0", state])
    F.dropout(distribute_tensor(torch.randn(SHAPE, device="cuda"), mesh, [Shard(0)]), 0.5, True)
    assert states == ["mine of rank 0"]


def test_a_tensor_left_on_the_host_shows(mode: FakeCudaMode) -> None:
    """The net that these tests are: two devices in one operation are an error."""
    with pytest.raises(RuntimeError, match=r"two devices|same device"):
        torch.ones(3, device="cuda") + torch.ones(3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("method", ["ring", "gather"])
def test_attention_of_cut_sequences(mode: FakeCudaMode, dtype: torch.dtype, method: str) -> None:
    """By torch's flash attention for dtypes that it takes; heads that share keys, and an uneven length."""
    mesh, kernels = mesh_1d(), []
    rows = get_layout(mesh, (Shard(2),), (2, 4, 7, 8)).local_shape[2]
    sizes = [(2, heads, rows, 8) for heads in (4, 2, 2)]
    leaves = [torch.empty(size, dtype=dtype, device="cuda", requires_grad=True) for size in sizes]
    given = [DTensor._of_part(x, get_layout(mesh, (Shard(2),), (*x.shape[:2], 7, 8))) for x in leaves]

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            kernels.append(func._opname)
            return func(*args, **(kwargs or {}))

    with Seen(), attention_method(method):
        y = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
        y.to_local().sum().backward()
    check(y, (Shard(2),), dtype, (2, 4, 7, 8))
    for x in leaves:
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype is dtype and x.grad.device == CUDA
    flash = [name for name in kernels if "flash" in name]
    assert bool(flash) == (dtype is torch.bfloat16 and rows > 0), kernels
