"""Promises of `supports` hold, for every dtype; groups do not outlive the world."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import CommDebugMode, DTensor, RowwiseParallel, Shard, get_platform, parallelize_module
from hyper_parallel.platform.torch.processes.collectives import _Group
from hyper_parallel.testing import spmd
from tests.torch.support import close, device, randn

NAMES = """
bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128
float8_e4m3fn float8_e5m2
"""
DTYPES = [getattr(torch, name) for name in NAMES.split()]
REDUCED = {"sum": sum, "max": max, "min": min, "product": lambda xs: xs[0] * xs[1], "avg": lambda xs: sum(xs) / 2}


def values(*numbers: float, dtype: Any) -> torch.Tensor:
    return torch.tensor(numbers).to(dtype).to(device())


def numbers(x: torch.Tensor) -> list[float]:
    return [float(v.real if isinstance(v, complex) else v) for v in x.to("cpu").to(torch.complex64).tolist()]


def two_ranks() -> Any:
    """Platform and group of the first two ranks, or None on the others."""
    mesh = spmd.device_mesh(2)
    return None if mesh is None else (get_platform(), mesh.platform_group(0))


def movement() -> None:
    found = two_ranks()
    if found is None:
        return
    (platform, group), rank = found, spmd.rank
    for dtype in DTYPES:
        mine = values(rank, 1, dtype=dtype)
        for verb in ("all_gather", "all_to_all", "broadcast", "scatter"):
            assert platform.supports(verb, "", mine)
        gathered = platform.all_gather(mine, group, 2)
        assert gathered.dtype is dtype and numbers(gathered) == [0, 1, 1, 1], dtype
        exchanged = platform.all_to_all(values(0, rank, dtype=dtype), group, 2)
        assert numbers(exchanged) == [[0, 0], [0, 1]][rank], dtype
        matrix = platform.all_gather(values(rank, rank, dtype=dtype).reshape(1, 2), group, 2)
        assert matrix.shape == (2, 2) and numbers(matrix.flatten()) == [0, 0, 1, 1]
        assert numbers(platform.broadcast(mine.clone(), 1, group)) == [1, 1]
        parts = [values(0, 1, dtype=dtype), values(1, 0, dtype=dtype)] if rank == 0 else None
        assert numbers(platform.scatter(torch.empty_like(mine), parts, 0, group)) == [[0, 1], [1, 0]][rank]
    platform.barrier(group)
    assert platform.all_gather_object({"rank": rank}, group, 2) == [{"rank": 0}, {"rank": 1}]


def reductions() -> list[str]:
    found = two_ranks()
    if found is None:
        return []
    (platform, group), rank = found, spmd.rank
    supported = []
    for dtype in DTYPES:
        for op, reduce in REDUCED.items():
            mine = values(rank, 1, dtype=dtype)
            if platform.supports("all_reduce", op, mine):
                supported.append(f"{op} {dtype}")
                wanted = numbers(values(reduce([0, 1]), reduce([1, 1]), dtype=dtype))
                assert numbers(platform.all_reduce(mine, op, group)) == wanted, f"all_reduce {op} {dtype}"
            mine = values(rank, 1, dtype=dtype)
            if platform.supports("reduce_scatter", op, mine):
                wanted = numbers(values((reduce([0, 1]), reduce([1, 1]))[rank], dtype=dtype))
                assert numbers(platform.reduce_scatter(mine, op, group, 2)) == wanted, f"reduce_scatter {op} {dtype}"
    return supported


def test_movement(pool: Any) -> None:
    pool.run(2, movement)


def test_reductions(pool: Any) -> None:
    supported = pool.run(2, reductions)[0]
    for needed in ("float32", "float16", "bfloat16", "int64", "int32"):
        assert {f"{op} torch.{needed}" for op in ("sum", "max", "min")} <= set(supported)


PROGRAM = """
import torch.distributed as dist
from hyper_parallel import get_platform, init_device_mesh
mesh = init_device_mesh(None, (1,))
platform = get_platform()
group = platform.native_group(mesh.platform_group(0))
assert isinstance(group, dist.ProcessGroup)
del group
if {destroy}:
    platform.destroy_process_group()
    try:
        platform.barrier(mesh.platform_group(0))
    except RuntimeError as error:
        assert "make a new mesh" in str(error), error
    else:
        raise AssertionError("the group outlived the world")
    assert platform.world() is None
    again = init_device_mesh(None, (1,))
    assert again is not mesh and platform.world() is not None
print("done")
"""


@pytest.mark.parametrize("destroy", [True, False])
def test_end_of_the_world(destroy: bool) -> None:
    """Meshes that are alive at exit neither hang nor abort the process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(destroy=destroy)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


def test_default_group_is_left_to_the_user() -> None:
    platform = get_platform()
    if not dist.is_initialized():
        platform.init_process_group()
    before = platform.world()
    platform.init_process_group()
    assert platform.world() is before
    assert (platform.rank(), platform.world_size()) == (0, 1)


@spmd.on_mesh(2)
def row_of_a_dtype_that_is_not_reduced(mesh: Any) -> None:
    """A row-parallel layer overwrites its summands, also where the sum comes from a gather."""
    platform = get_platform()
    native, dtype = platform.all_reduce_dtypes, torch.float32
    model = torch.nn.Linear(4, 3).to(device())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(randn(*p.shape))
    reference = copy.deepcopy(model)
    x = randn(2, 4, seed=1)
    part = x.chunk(2, 1)[mesh.get_local_rank()].clone().requires_grad_()
    parallel = parallelize_module(model, mesh, RowwiseParallel())
    try:
        type(platform).all_reduce_dtypes = {op: dtypes - {dtype} for op, dtypes in native.items()}
        with CommDebugMode() as counts:
            y = parallel(part)
            y.sin().sum().backward()
    finally:
        type(platform).all_reduce_dtypes = native
    assert counts.get_comm_counts() == {"all_reduce": 1}
    whole = x.clone().requires_grad_()
    wanted = reference(whole)
    wanted.sin().sum().backward()
    close(y, wanted)
    close(part.grad, whole.grad.chunk(2, 1)[mesh.get_local_rank()])
    for name, p in reference.named_parameters():
        close(parallel.get_parameter(name).grad, p.grad, name)


def test_row_of_a_dtype_that_is_not_reduced(pool: Any) -> None:
    pool.run(2, row_of_a_dtype_that_is_not_reduced)


class _Seen(TorchDispatchMode):
    """Names of the collectives that pass torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def watched() -> list[str]:
    found = two_ranks()
    if found is None:
        return []
    platform, group = found
    x = torch.ones(2, 2, device=device())
    with _Seen() as seen:
        platform.all_reduce(x, "sum", group)
        platform.all_gather(x, group, 2)
        platform.reduce_scatter(x, "sum", group, 2)
    with patch.object(group, "backend", None):  # as of a group whose class has no backends
        assert platform.all_reduce(torch.ones(1, device=device()), "sum", group).tolist() == [2]
    return seen.names


def test_collectives_are_seen_by_who_watches_the_dispatcher(pool: Any) -> None:
    """Torch's `CommDebugMode`, for example."""
    names = ["allreduce_", "_allgather_base_", "_reduce_scatter_base_"]
    assert pool.run(2, watched) == [names, names]


def test_group_without_backends() -> None:
    class Group:
        def _get_backend(self, device: Any) -> Any:
            raise RuntimeError("no backend for " + device.type)

    process_group = Group()
    group = _Group(process_group, "cpu")
    assert group.backend is None and group() is process_group
    del process_group
    assert group() is None


class _NoMore:
    """A process group that was destroyed: nothing holds it."""

    def _get_backend(self, device: torch.device) -> Any:
        return self


@pytest.mark.parametrize("verb", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"])
def test_group_that_was_destroyed(verb: str) -> None:
    """Every collective of a mesh from before says so, instead of using a destroyed group."""
    platform, owner = get_platform(), _NoMore()
    group = _Group(owner, "cpu")
    assert group.backend is owner
    group.backend = None  # as at the end of a real group: it does not hold itself
    del owner
    gc.collect()
    x = torch.ones(4)
    arguments: dict[str, tuple] = {
        "all_reduce": (x, "sum", group),
        "all_gather": (x, group, 2),
        "reduce_scatter": (x, "sum", group, 2),
        "all_to_all": (x, group, 2),
        "broadcast": (x, 0, group),
        "barrier": (group,),
    }
    with pytest.raises(RuntimeError, match="process group that was destroyed: make a new mesh"):
        getattr(platform, verb)(*arguments[verb])


@spmd.on_mesh()
def marked(mesh: Any) -> None:
    """Every collective of tensors that are conjugate or negative by a mark alone, which contiguous tensors can be."""
    real = randn(2, 2)
    for whole in (torch.complex(real, real + 1).conj(), torch._neg_view(real.clone())):
        assert whole.is_contiguous() and (whole.is_conj() or whole.is_neg())
        platform, group = mesh.platform, mesh.platform_group(0)
        wanted = whole.resolve_conj().resolve_neg()
        if platform.supports("all_reduce", "sum", whole):
            close(platform.all_reduce(_again(whole), "sum", group), 2 * wanted)
        close(platform.all_gather(_again(whole), group, 2), torch.cat([wanted, wanted]))
        close(platform.broadcast(_again(whole), 0, group), wanted)
        rank = mesh.get_local_rank()
        close(platform.all_to_all(_again(whole), group, 2), wanted[rank].expand(2, 2))
        if platform.supports("reduce_scatter", "sum", whole):
            close(platform.reduce_scatter(_again(whole), "sum", group, 2), 2 * wanted[rank : rank + 1])
        x = DTensor.from_local(_again(whole), mesh, [Shard(0)])
        close(x.full_tensor(), torch.cat([wanted, wanted]))


def _again(x: torch.Tensor) -> torch.Tensor:
    """``x`` in other memory, with its mark."""
    return x.conj().clone().conj() if x.is_conj() else torch._neg_view(torch._neg_view(x).clone())


def test_marked_tensors(pool: Any) -> None:
    pool.run(2, marked)
