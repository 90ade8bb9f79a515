"""torch_npu's fused operators on DTensors: values, gradients and collectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyper_parallel import Replicate, Shard, distribute_tensor
from hyper_parallel.debug import CommDebugMode
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn

R = Replicate()


def rms_norm(x: Any, gamma: Any) -> Any:
    import torch_npu

    return torch_npu.npu_rms_norm(x, gamma, epsilon=1e-5)


def swiglu(x: Any) -> Any:
    import torch_npu

    return torch_npu.npu_swiglu(x, dim=-1)


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    import torch_npu

    return torch_npu.npu_rotary_mul(x, cos, sin, "interleave")


#: name -> (function, shapes, dimensions of the first operand that may be sharded, which ones of the others follow)
CASES: dict[str, tuple[Callable[..., Any], tuple, tuple[int, ...]]] = {
    "rms_norm": (rms_norm, ((4, 5, 6), (6,)), (0, 1)),
    "swiglu": (swiglu, ((4, 5, 6),), (0, 1)),
    "rotary": (rotary, ((4, 2, 5, 6), (5, 6), (5, 6)), (0, 1, 2)),
}


def first(out: Any) -> Any:
    return out[0] if isinstance(out, (tuple, list)) else out


@on_mesh(2)
def sharded(mesh: Any, name: str) -> None:
    function, shapes, free = CASES[name]
    arrays = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    for placements in itertools.product(*[[R, *(Shard(d) for d in range(len(shape)))] for shape in shapes]):
        plain = [x.clone().requires_grad_() for x in arrays]
        spread = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(arrays, placements, strict=True)]
        wanted = first(function(*plain))
        with CommDebugMode() as comm:
            got = first(function(*spread))
        if placements[1:] == (R,) * (len(shapes) - 1) and (placements[0] == R or placements[0].dim in free):
            assert comm.get_total_counts() == 0, placements
            assert got.placements == (placements[0],)
        close(got, wanted, f"{name} of {placements}")
        cotangent = randn(*wanted.shape, seed=9)
        (wanted * cotangent).sum().backward()
        (got * distribute_tensor(cotangent, mesh, list(got.placements))).sum().backward()
        for x, y in zip(plain, spread, strict=True):
            close(y.grad, x.grad, f"gradient of {name} of {placements}")


@pytest.mark.parametrize("name", CASES)
def test_every_layout(pool: Any, name: str) -> None:
    """Batches, lengths and heads stay sharded without a collective; other layouts are gathered."""
    pool.run(2, sharded, name)


@on_mesh(2)
def operator_without_rule(mesh: Any) -> None:
    import torch_npu

    x, gamma = randn(4, 6), torch.ones(6, device=device())
    got = torch_npu.npu_add_rms_norm(
        *(distribute_tensor(t, mesh, [Shard(0)]) for t in (x, x)), distribute_tensor(gamma, mesh, [R])
    )
    for y, wanted in zip(got, torch_npu.npu_add_rms_norm(x, x, gamma), strict=True):
        close(y, wanted)
    q = randn(2, 4, 8, 16)
    whole, spread = q.clone().requires_grad_(), distribute_tensor(q, mesh, [Shard(1)]).requires_grad_()
    outs = [torch_npu.npu_fusion_attention(x, x, x, 4, "BNSD", scale=0.25) for x in (whole, spread)]
    for wanted, y in zip(outs[0][:3], outs[1][:3], strict=True):
        close(y, wanted)
    assert outs[1][4:] == outs[0][4:]
    for out in outs:
        out[0].square().sum().backward()
    close(spread.grad, whole.grad)


def test_operator_without_rule_is_gathered(pool: Any) -> None:
    pool.run(2, operator_without_rule)
