"""Steps that a CUDA graph can capture: on a GPU, forward and backward of a style never wait for the device. Nor do they
make tensors whose shape depends on computed values. The first step may: in it ranks compare their inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    fully_shard,
    init_device_mesh,
    loss_parallel,
    parallelize_module,
    replicate,
    vocab_parallel_cross_entropy,
)
from tests.fake_cuda.conftest import WORLD
from tests.fake_cuda.device import FakeCudaMode
from tests.fake_cuda.test_models import CASES, on_gpu, parallelised
from tests.torch.test_compile_styles import GROUPS, Scale


def twice(mode: FakeCudaMode, step: Any) -> None:
    """The second time as in a capture."""
    step()
    mode.captures = True
    try:
        step()
    finally:
        mode.captures = False


def backward(outputs: Any) -> None:
    """Call backward of all outputs, plain or distributed, that have one."""
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        y = y.to_local() if isinstance(y, DTensor) else y
        if y.requires_grad:
            y.float().square().sum().backward()


@pytest.mark.parametrize("name", CASES)
def test_models(mode: FakeCudaMode, name: str) -> None:
    model, x = parallelised(CASES[name], torch.bfloat16), CASES[name].input(torch.bfloat16)
    twice(mode, lambda: backward(model(x)))


@pytest.mark.parametrize("name", GROUPS)
def test_styles(mode: FakeCudaMode, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch-cuda")
    mesh = init_device_mesh("cuda", (WORLD,))
    mesh.platform.register_norm_module(Scale)
    with torch.device("cuda"):
        cases = list(GROUPS[name](mesh))
    for module, style, given in cases:
        parallelize_module(module, mesh, style)
        args = [x for key, x in given.items() if isinstance(key, int)]
        kwargs = {key: x for key, x in given.items() if isinstance(key, str)}
        for x in (*args, *kwargs.values()):
            if x is not None and x.is_floating_point():
                x.requires_grad_()
        twice(mode, lambda module=module, args=args, kwargs=kwargs: backward(module(*args, **kwargs)))  # type: ignore[misc]


def test_losses(mode: FakeCudaMode) -> None:
    mesh = init_device_mesh("cuda", (WORLD,))
    labels, weight = torch.randint(0, 12, (5,), device="cuda"), torch.rand(12, device="cuda")
    x = torch.randn(5, 6, device="cuda", requires_grad=True)
    for plain in (True, False):
        head = parallelize_module(
            on_gpu(lambda: nn.Linear(6, 12), torch.float32), mesh, ColwiseParallel(use_local_output=plain)
        )

        def step(head: nn.Module = head, plain: bool = plain) -> None:
            with loss_parallel():
                y = head(x)
                if plain:
                    loss = vocab_parallel_cross_entropy(y, labels, mesh, weight=weight, label_smoothing=0.1)
                else:
                    loss = F.cross_entropy(y, labels)
            loss.backward()

        twice(mode, step)


@pytest.mark.parametrize("wrap", [fully_shard, replicate])
def test_units(mode: FakeCudaMode, wrap: Any) -> None:
    mesh = init_device_mesh("cuda", (WORLD,))
    model = on_gpu(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), torch.float32)
    wrap(model, mesh=mesh) if wrap is fully_shard else wrap(model, mesh)
    x = torch.randn(3, 6, device="cuda", requires_grad=True)
    twice(mode, lambda: backward(model(x)))


def test_what_is_refused(mode: FakeCudaMode) -> None:
    """The check notices the operations that it guards against."""
    x = torch.randn(3, device="cuda")
    for waits in (x.nonzero, lambda: x[x > 0], lambda: x.to("cpu"), lambda: torch.zeros(3, device="cpu").to("cuda")):
        mode.captures = True
        try:
            with pytest.raises(RuntimeError, match=r"waits for the device"):
                waits()
            with pytest.raises(Exception, match=r"waits for the device|_local_scalar_dense"):
                x.sum().item()
        finally:
            mode.captures = False
