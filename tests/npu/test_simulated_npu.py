"""The simulated NPU: it refuses unsupported calls, by name; its kernels must be right."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel import get_platform
from hyper_parallel.testing import spmd
from hyper_parallel.testing.spmd import on_mesh
from tests.simulated_npu import build, preload
from tests.torch.support import device

pytestmark = pytest.mark.skipif(not preload.is_simulated(), reason="the NPUs here are real")
ROOT = Path(__file__).resolve().parents[2]


def run_python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


# ---------------------------------------------------------------------------------------------------------- refusals
def test_every_call_is_accounted_for() -> None:
    """A call of CANN is emulated, accepted with a reason, or ends the process by name; the table says which."""
    emulated, accepted = build.emulated_calls(build.build()), build.accepted_calls()
    assert not emulated & set(accepted)
    assert all(reason for reason in accepted.values())
    command = [sys.executable, "-m", "tests.simulated_npu", "calls"]
    table = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = {line.split()[0]: line for line in table.splitlines()[:-1]}
    assert build.calls_of_wheel() <= set(rows)
    assert {name for name, row in rows.items() if row.endswith(" emulated") and "not" not in row} == emulated


def test_call_that_is_not_emulated_ends_the_process_by_name() -> None:
    missing = sorted(build.calls_of_wheel() - build.emulated_calls(build.build()) - set(build.accepted_calls()))
    assert "aclrtMapMem" in missing
    done = run_python("import torch, ctypes; ctypes.CDLL('libacl_op_compiler.so').aclrtMapMem()")
    assert done.returncode == -6
    assert "torch_npu called CANN's aclrtMapMem, which is not emulated: add it to" in done.stderr


def test_operator_of_cann_that_is_not_emulated_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    run = ctypes.CDLL("libascendcl.so").aclopCompileAndExecute
    assert run(b"TopKV2", 0, None, None, 0, None, None, None, 0, 0, None, None) != 0
    assert "runs CANN's operator TopKV2 (0 inputs" in capfd.readouterr().err


def test_kernel_that_is_missing_is_named() -> None:
    import torch_npu

    with pytest.raises(RuntimeError, match=r"operator npu_gelu_mul is not simulated: add a .* KERNELS in tests/"):
        torch_npu.npu_gelu_mul(torch.ones(2, 4, device="npu"))


def test_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match=r"same device, but found at least two devices, npu:0 and cpu! \(aten::add"):
        torch.ones(2, device="npu") + torch.ones(2)


def test_memory_is_limited() -> None:
    done = run_python("import torch; torch.empty(2**21, device='npu')", SIMULATED_NPU_MEMORY=str(2**22))
    assert done.returncode != 0
    assert "out of memory" in done.stderr


def test_double_is_float_as_on_the_device() -> None:
    """torch_npu converts float64 to float32 without an error."""
    assert torch.ones(2, device="npu").double().dtype is torch.float32


@on_mesh(2)
def different_collectives(mesh: Any) -> str:
    x = torch.ones(4, device=device())
    group = mesh.get_group(0)
    with pytest.raises(RuntimeError):
        if spmd.rank == 0:
            dist.all_reduce(x, group=group)
        else:
            dist.all_gather_into_tensor(torch.empty(8, device=device()), x, group=group)
    x.fill_(1)
    dist.all_reduce(x, group=group)  # both have left it, so the group is as good as before
    return x.sum().item()


def test_different_collectives_are_an_error(pool: Any) -> None:
    assert pool.run(2, different_collectives) == [8, 8]


def absent_rank() -> str:
    group = dist.new_group([0, 1])  # of its own, because it is of no use afterwards
    if spmd.rank > 1:
        return ""
    x = torch.ones(4, device=device())
    dist.all_reduce(x, group=group)
    if spmd.rank == 0:
        os.environ["SIMULATED_NPU_TIMEOUT"] = "1"
        try:
            with pytest.raises(RuntimeError) as caught:
                dist.all_reduce(x, group=group)
        finally:
            del os.environ["SIMULATED_NPU_TIMEOUT"]
        return str(caught.value)
    return ""


def test_rank_that_does_not_come_is_a_timeout(pool: Any) -> None:
    assert "HcclAllreduce, error code is 9" in pool.run(2, absent_rank)[0]


# ----------------------------------------------------------------------------------------------------- fused kernels
def leaves(*shapes: tuple[int, ...], seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same numbers as leaves on the CPU and on the NPU."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.clone().requires_grad_() for x in numbers], [x.npu().requires_grad_() for x in numbers]


def compare(wanted: torch.Tensor, got: torch.Tensor, cpu: list[torch.Tensor], npu: list[torch.Tensor]) -> None:
    """Values and gradients, with a cotangent that is different everywhere."""
    torch.testing.assert_close(got.detach().cpu(), wanted.detach(), rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    wanted.backward(cotangent)
    got.backward(cotangent.npu())
    for x, y in zip(cpu, npu, strict=True):
        assert x.grad is not None and y.grad is not None
        torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalised", [(16,), (4, 16)])
def test_rms_norm(normalised: tuple[int, ...]) -> None:
    import torch_npu

    cpu, npu = leaves((3, 4, 16), normalised)
    compare(F.rms_norm(cpu[0], normalised, cpu[1], 1e-6), torch_npu.npu_rms_norm(*npu)[0], cpu, npu)


@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(dim: int) -> None:
    import torch_npu

    cpu, npu = leaves((3, 4, 16))
    gate, up = cpu[0].chunk(2, dim)
    compare(F.silu(gate) * up, torch_npu.npu_swiglu(npu[0], dim=dim), cpu, npu)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary(mode: str) -> None:
    """Rotary embedding equals a rotation of complex numbers."""
    import torch_npu

    cpu, npu = leaves((2, 3, 5, 8))
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
    pairs = cpu[0].unflatten(-1, (2, 4)).transpose(-1, -2) if mode == "half" else cpu[0].unflatten(-1, (4, 2))
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    wanted = turned.transpose(-1, -2).flatten(-2) if mode == "half" else turned.flatten(-2)
    both = angles.repeat(1, 2) if mode == "half" else angles.repeat_interleave(2, -1)
    cos, sin = (f(both)[None, None].npu() for f in (torch.cos, torch.sin))
    compare(wanted, torch_npu.npu_rotary_mul(npu[0], cos, sin, mode), cpu, npu)


def test_ranges_are_those_of_mstx_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    mstx = torch.npu.mstx  # type: ignore[attr-defined]
    monkeypatch.setattr(mstx, "range_start", lambda name: said.append(name) or 7)
    monkeypatch.setattr(mstx, "range_end", said.append)
    end = get_platform("torch-npu").profiler_range("all_reduce over tp")
    assert end is not None and said == ["all_reduce over tp"]
    end()
    assert said == ["all_reduce over tp", 7]
