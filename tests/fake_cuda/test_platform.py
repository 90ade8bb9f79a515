"""Decisions of `TorchCudaPlatform`: whether it can run, on which GPU, with which generator, which dtypes nccl takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import available_platforms, get_platform
from hyper_parallel.platform.registry import get_platform_for_device
from hyper_parallel.platform.torch.cuda import TorchCudaPlatform
from hyper_parallel.testing import adapters
from tests.fake_cuda.device import usable_gpu

FUNCTIONS = {
    "built": (torch.backends.cuda, "is_built"),
    "gpu": (torch.cuda, "is_available"),
    "distributed": (dist, "is_available"),
    "nccl": (dist, "is_nccl_available"),
}


def test_ranges_are_those_of_nvtx_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", lambda name: said.append(name) or 7)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", said.append)
    with torch.profiler.profile() as profile:
        end = TorchCudaPlatform().profiler_range("all_reduce over tp")
        assert end is not None
        end()
    assert said == ["all_reduce over tp", 7]
    assert "all_reduce over tp" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("built", "the installed torch was built without CUDA"),
        ("gpu", "no usable GPU was found: check the driver and CUDA_VISIBLE_DEVICES"),
        ("distributed", "this torch was built without nccl"),
        ("nccl", "this torch was built without nccl"),
        ("", None),
    ],
)
def test_reasons(missing: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (module, function) in FUNCTIONS.items():
        monkeypatch.setattr(module, function, lambda answer=name != missing: answer)
    found = TorchCudaPlatform.unavailable_reason()
    assert found is None if reason is None else reason in str(found)


def test_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of platforms gives the reason."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert available_platforms()["torch-cuda"] == "the installed torch was built without CUDA"
    with usable_gpu():
        assert available_platforms()["torch-cuda"] is None


def test_names(cuda_platform: Any) -> None:
    assert (cuda_platform.name, cuda_platform.device_type, cuda_platform.comm_backend) == ("torch-cuda", "cuda", "nccl")
    assert get_platform() is get_platform("gpu") is get_platform_for_device("cuda") is cuda_platform
    assert adapters.adapter_of("torch-cuda") == "hyper_parallel.testing.adapters.torch_adapter"


@pytest.mark.parametrize(("local_rank", "gpus", "wanted"), [("0", 4, 0), ("3", 4, 3), ("5", 4, 1), ("3", 1, 0)])
def test_gpu_of_a_rank(
    local_rank: str, gpus: int, wanted: int, cuda_platform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks take the GPUs of their machine in turn; with fewer GPUs than ranks they share them."""
    current: list[int] = [-1]
    started: list[tuple] = []
    monkeypatch.delenv("HYPER_PARALLEL_TORCH_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    # The device is chosen before the group is made: nccl binds to the current one.
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: started.append((*args, current[0], kwargs)))
    for name, value in {"RANK": local_rank, "WORLD_SIZE": "8", "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    cuda_platform.init_process_group()
    ((backend, at_start, options),) = started
    assert (backend, at_start) == ("nccl", wanted)
    assert (options["rank"], options["world_size"]) == (int(local_rank), 8)
    assert cuda_platform.device() == torch.device("cuda", wanted)


def test_gloo_instead_of_nccl(cuda_platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks on one GPU; a group that the program has made is taken as it is."""
    started: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: started.append(backend))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setenv("HYPER_PARALLEL_TORCH_BACKEND", "gloo")
    cuda_platform.init_process_group()
    assert started == ["gloo"]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    cuda_platform.init_process_group()
    assert started == ["gloo"]


def test_generator(cuda_platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator is that of the current GPU, not the host's and not another GPU's.

    Generators of the host stand in for those of two GPUs. The functions that read and set their states are torch's own.
    """
    generators = tuple(torch.Generator().manual_seed(seed) for seed in (1, 2))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda.random, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.random, "_lazy_call", lambda call, **options: call())
    monkeypatch.setattr(torch.cuda.random, "current_device", lambda: 1)
    host, other = torch.get_rng_state(), generators[0].get_state()
    state = cuda_platform.get_rng_state()
    assert torch.equal(state, torch.Generator().manual_seed(2).get_state())
    drawn = torch.rand(3, generator=generators[1])
    cuda_platform.set_rng_state(state)
    assert torch.equal(torch.rand(3, generator=generators[1]), drawn)
    assert torch.equal(generators[0].get_state(), other)
    assert torch.equal(torch.get_rng_state(), host)


#: Dtypes that nccl reduces, by the table in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, but for fp8: its sums
#: depend on the version of nccl, and are emulated.
REDUCED = "bool uint8 int8 int32 int64 float16 bfloat16 float32 float64"
REFUSED = "int16 uint16 uint32 uint64 float8_e4m3fn float8_e5m2"


def dtypes(names: str) -> list[torch.dtype]:
    return [getattr(torch, name) for name in names.split()]


def test_reductions(cuda_platform: Any) -> None:
    for verb in ("all_reduce", "reduce_scatter"):

        def takes(op: str, dtype: torch.dtype, verb: str = verb) -> bool:
            return cuda_platform.supports(verb, op, torch.empty(0, dtype=dtype, device="meta"))

        for op in ("sum", "max", "min", "product"):
            assert all(takes(op, dtype) for dtype in dtypes(REDUCED)), (verb, op)
        for op in ("sum", "avg", "max", "min", "product"):
            assert not any(takes(op, dtype) for dtype in dtypes(REFUSED)), (verb, op)
        assert [dtype for dtype in dtypes(REDUCED) if takes("avg", dtype)] == dtypes("float16 bfloat16 float32 float64")
        complex_sums = {op for op in ("sum", "avg", "max", "min", "product") if takes(op, torch.complex64)}
        assert complex_sums == {"sum"}


def test_movement(cuda_platform: Any) -> None:
    """Collectives that only move data take every dtype; they send dtypes unknown to nccl as bytes."""
    for verb in ("all_gather", "all_to_all", "broadcast", "scatter"):
        assert all(cuda_platform.supports(verb, "", torch.empty(0, dtype=d)) for d in dtypes(f"{REDUCED} {REFUSED}"))
    for dtype in dtypes(REDUCED):
        x = torch.empty(3, dtype=dtype)
        assert cuda_platform._movable(x) is x
    for dtype in dtypes(REFUSED):
        assert cuda_platform._movable(torch.empty(3, dtype=dtype)).dtype is torch.uint8
