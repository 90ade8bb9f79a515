"""Choices where MindSpore's device is Ascend. The verbs run here on a fake device target. NumPy versions replace the
functions of the communication library; they know the data of the other rank."""

from __future__ import annotations

import importlib.util
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from mindspore.mint import distributed as dist

from hyper_parallel.platform.mindspore import base
from hyper_parallel.platform.mindspore.base import MindSporePlatform
from hyper_parallel.platform.mindspore.handlers import loss
from hyper_parallel.platform.mindspore.op_table import nn
from hyper_parallel.platform.mindspore.processes import collectives, launch

MINE = np.arange(8, dtype=np.float32).reshape(4, 2)
PEER = MINE * 10 + 1


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> MindSporePlatform:
    """A platform that takes the device for Ascend."""
    for module in (base, collectives, launch, loss, nn):
        monkeypatch.setattr(module, "device_target", lambda: "Ascend")
    return MindSporePlatform()


def test_facts(ascend: MindSporePlatform) -> None:
    assert (ascend.device_type, ascend.comm_backend) == ("npu", "hccl")
    assert (MindSporePlatform.device_type, MindSporePlatform.comm_backend) == ("cpu", "mccl"), "of this object only"


def test_without_mindspore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert MindSporePlatform.unavailable_reason() == "mindspore is not installed"


@pytest.mark.parametrize(
    ("collective", "op", "dtype", "supported"),
    [
        ("all_reduce", "sum", ms.float16, True),
        ("all_reduce", "min", ms.int16, True),
        ("reduce_scatter", "max", ms.bfloat16, True),
        ("all_reduce", "product", ms.float32, False),
        ("all_reduce", "sum", ms.float64, False),
        ("reduce_scatter", "sum", ms.bool_, False),
        ("all_gather", "", ms.bool_, True),
        ("broadcast", "", ms.float64, True),
        ("all_to_all", "", ms.int16, True),
        ("all_to_all", "", ms.bool_, False),
        ("scatter", "", ms.float32, False),
    ],
)
def test_supported_collectives(
    ascend: MindSporePlatform, collective: str, op: str, dtype: Any, supported: bool
) -> None:
    assert ascend.supports(collective, op, ops.zeros(2, dtype)) is supported


def test_all_gather(ascend: MindSporePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer for all parts, and bools travel as bytes."""

    def gather(out: Tensor, local: Tensor, group: str) -> None:
        assert group == "tp" and local.is_contiguous() and local.dtype == out.dtype
        other = Tensor(PEER) if local.dtype == ms.float32 else 1 - local
        out.copy_(mint.cat([local, other], 0))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    gathered = ascend.all_gather(Tensor(np.ascontiguousarray(MINE.T)).T, "tp", 2)
    assert np.array_equal(gathered.asnumpy(), np.concatenate([MINE, PEER]))
    flags = ascend.all_gather(Tensor([True, False]), "tp", 2)
    assert flags.dtype == ms.bool_ and flags.asnumpy().tolist() == [True, False, False, True]


@pytest.mark.parametrize(("op", "wanted"), [("sum", MINE + PEER), ("max", PEER), ("min", MINE)])
def test_reduce_scatter(
    ascend: MindSporePlatform, monkeypatch: pytest.MonkeyPatch, op: str, wanted: np.ndarray
) -> None:
    reductions = {"sum": np.add, "max": np.maximum, "min": np.minimum}

    def scatter(out: Tensor, local: Tensor, name: str, group: str) -> None:
        assert group == "tp"
        out.copy_(Tensor(np.split(reductions[name](local.asnumpy(), PEER), 2)[1]))  # as on rank 1

    monkeypatch.setattr(dist, "reduce_scatter_tensor", scatter)
    assert np.array_equal(ascend.reduce_scatter(Tensor(MINE), op, "tp", 2).asnumpy(), wanted[2:])


def test_all_to_all(ascend: MindSporePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(out: Tensor, local: Tensor, group: str) -> None:
        assert group == "tp"
        out.copy_(Tensor(np.concatenate([local.asnumpy()[:2], PEER[:2]])))  # as on rank 0

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    exchanged = ascend.all_to_all(Tensor(MINE), "tp", 2)
    assert np.array_equal(exchanged.asnumpy(), np.concatenate([MINE[:2], PEER[:2]]))


def test_barrier(ascend: MindSporePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    """The barrier is that of the library, which serves every group there; no tensor is reduced."""
    waited: list[str] = []
    monkeypatch.setattr(dist, "barrier", waited.append)
    monkeypatch.setattr(dist, "all_reduce", lambda *args: pytest.fail("reduced"))
    ascend.barrier("tp")
    assert waited == ["tp"]


def test_initialisation(ascend: MindSporePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels stay asynchronous, and torchrun's variables lead to hccl."""
    asked: list[Any] = []

    def meet(backend: str, environment: Any, timeout: Any) -> launch.World:
        asked.append((backend, environment["WORLD_SIZE"], timeout.total_seconds()))
        return launch.World(1, 2, "hccl_world_group")

    for name in ("MS_ROLE", "MS_WORKER_NUM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(launch, "_meet", meet)
    monkeypatch.setattr(ms.runtime, "launch_blocking", lambda: pytest.fail("blocking"))
    ascend.init_process_group(7)
    ascend.init_process_group(8)  # has no effect
    assert asked == [("hccl", "2", 7.0)] and (ascend.rank(), ascend.world_size()) == (1, 2)


# ------------------------------------------------------------------------------------------------ kernels of mint
class Called:
    """Stands for a function of mint that has no kernel on CPU, and records its arguments."""

    def __init__(self) -> None:
        self.args: tuple = ()

    def __call__(self, *args: Any) -> str:
        self.args = args
        return "of mint"


@pytest.mark.parametrize(
    ("row", "static_args"), [("cross_entropy", ("mean", -100, 0.0, None)), ("nll_loss", ("sum", 1))], ids=str
)
def test_losses_are_mint_s(request: pytest.FixtureRequest, row: str, static_args: tuple) -> None:
    """The called function runs on Ascend; the CPU has no kernel for it, and runs that of `mindspore.ops`."""
    native, xs = Called(), (Tensor(MINE), Tensor([0, 1, 0, 1], ms.int32), None)
    on_cpu = loss.LOSSES[row].call(native, xs, static_args)
    assert native.args == () and np.isfinite(on_cpu.asnumpy())
    request.getfixturevalue("ascend")
    assert loss.LOSSES[row].call(native, xs, static_args) == "of mint"
    reduction, ignore, *smoothing = static_args
    assert native.args == (*xs, ignore, reduction, *smoothing[:1])


def test_embedding_is_mint_s(request: pytest.FixtureRequest) -> None:
    """The padding index is an argument of Ascend's primitive; on CPU a look-up and a selection replace it."""
    native, xs = Called(), (Tensor([0, 1], ms.int32), Tensor(MINE))
    assert np.array_equal(nn._embedding(native, xs, (1,)).asnumpy(), MINE[:2])
    request.getfixturevalue("ascend")
    assert nn._embedding(native, xs, (1,)) == "of mint"
    assert native.args == (*xs, 1, None, 2.0, False)


@pytest.mark.parametrize(("chosen", "local_rank", "selected"), [(0, "3", [("Ascend", 3)]), (5, "3", []), (0, None, [])])
def test_device_of_local_rank(
    ascend: MindSporePlatform, monkeypatch: pytest.MonkeyPatch, chosen: int, local_rank: str | None, selected: list
) -> None:
    """Each rank under torchrun's variables selects its device before it meets the others, unless the program has."""
    calls: list[Any] = []
    context = {"device_id": chosen}
    plain = ms.get_context
    monkeypatch.setattr(ms, "get_context", lambda name: context[name] if name in context else plain(name))
    monkeypatch.setattr(ms, "set_device", lambda *args: calls.append(args))
    monkeypatch.setattr(launch, "_meet", lambda *args: calls.append("meet") or launch.World(1, 2, "hccl_world_group"))
    for name in ("MS_ROLE", "MS_WORKER_NUM", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    ascend.init_process_group()
    assert calls == [*selected, "meet"]


def test_torchrun_and_msrun(ascend: MindSporePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either environment leads to hccl: torchrun's through a store, msrun's through MindSpore's own initialisation."""
    calls: list[str] = []
    monkeypatch.setattr(launch.communication, "init", calls.append)
    monkeypatch.setattr(launch.communication, "get_rank", lambda: 1)
    monkeypatch.setattr(launch.communication, "get_group_size", lambda: 2)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("MS_ROLE", "MS_WORKER"), ("MS_WORKER_NUM", "2")):
        monkeypatch.setenv(name, value)
    ascend.init_process_group()
    assert calls == ["hccl"] and (ascend.rank(), ascend.world_size()) == (1, 2)
