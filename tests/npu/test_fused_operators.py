"""torch_npu's fused operators on DTensors: values, gradients and collectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor
from hyper_parallel.debug import CommDebugMode
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, randn

R = Replicate()


def rms_norm(x: Any, gamma: Any) -> Any:
    import torch_npu

    return torch_npu.npu_rms_norm(x, gamma, epsilon=1e-5)


def add_rms_norm(x: Any, y: Any, gamma: Any) -> Any:
    """The sum of plain tensors and its norm: torch_npu has no derivative of the fused operator."""
    import torch_npu

    if isinstance(x, DTensor):
        return torch_npu.npu_add_rms_norm(x, y, gamma, epsilon=1e-5)
    return torch_npu.npu_rms_norm(x + y, gamma, epsilon=1e-5)


def swiglu(x: Any) -> Any:
    import torch_npu

    return torch_npu.npu_swiglu(x, dim=-1)


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    import torch_npu

    return torch_npu.npu_rotary_mul(x, cos, sin, "interleave")


#: name -> (function, shapes, dimensions of the first operand that may be sharded, which ones of the others follow)
CASES: dict[str, tuple[Callable[..., Any], tuple, tuple[int, ...]]] = {
    "rms_norm": (rms_norm, ((4, 5, 6), (6,)), (0, 1)),
    "add_rms_norm": (add_rms_norm, ((4, 5, 6), (4, 5, 6), (6,)), (0, 1)),
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
        if (
            name != "add_rms_norm"
            and placements[1:] == (R,) * (len(shapes) - 1)
            and (placements[0] == R or placements[0].dim in free)
        ):
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


@on_mesh(4)
def every_length_is_cut_in_four(mesh: Any, name: str) -> None:
    """Uneven shards over four ranks: forward sends nothing, and backward only gradients that are partial."""
    function, shapes, free = CASES[name]
    for dim in free:
        arrays = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
        plain = [x.clone().requires_grad_() for x in arrays]
        placements = [
            Shard(dim),
            *[Shard(dim) if name == "add_rms_norm" and i == 1 else R for i in range(1, len(shapes))],
        ]
        spread = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(arrays, placements, strict=True)]
        wanted = first(function(*plain))
        cotangent = randn(*wanted.shape, seed=9)
        wanted.backward(cotangent)
        cotangent = distribute_tensor(cotangent, mesh, [Shard(dim)])
        with CommDebugMode() as comm:
            got = first(function(*spread))
        assert comm.get_total_counts() == 0 and got.placements == (Shard(dim),)
        with CommDebugMode() as comm:
            got.backward(cotangent)
        # Along the length, cosines and sines are sliced, and their gradients gathered.
        count, collective = (
            sum(p == R for p in placements),
            "all_gather" if (name, dim) == ("rotary", 2) else "all_reduce",
        )
        assert comm.get_comm_counts() == ({collective: count} if count else {}), (dim, comm.get_comm_counts())
        close(got, wanted, name)
        for x, y in zip(plain, spread, strict=True):
            close(y.grad, x.grad, f"gradient of {name}")


@pytest.mark.parametrize("name", CASES)
def test_collectives_on_four_ranks(pool: Any, name: str) -> None:
    pool.run(4, every_length_is_cut_in_four, name)


@on_mesh(2)
def all_results_of_add_rms_norm(mesh: Any) -> None:
    """Statistic and sum come too; a gradient through the sum, which torch_npu has no derivative for, is right."""
    import torch_npu

    x, y, gamma = randn(4, 6), randn(4, 6, seed=1), randn(6, seed=2)
    spread = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in ((x, Shard(0)), (y, Shard(0)), (gamma, R))]
    got = torch_npu.npu_add_rms_norm(*spread, epsilon=1e-5)
    for z, wanted in zip(got, torch_npu.npu_add_rms_norm(x, y, gamma, 1e-5), strict=True):
        assert z.placements == (Shard(0),)
        close(z, wanted)
    assert not got[1].requires_grad
    plain = [t.clone().requires_grad_() for t in (x, y, gamma)]
    total = plain[0] + plain[1]
    ((torch_npu.npu_rms_norm(total, plain[2], epsilon=1e-5)[0] * 2).sum() + total.square().sum()).backward()
    ((got[0] * 2).sum() + got[2].square().sum()).backward()
    for t, z in zip(plain, spread, strict=True):
        close(z.grad, t.grad)
    for wrong in ({"x1": spread[0], "x2": spread[1]}, {}):
        with pytest.raises((TypeError, RuntimeError)):
            torch_npu.npu_add_rms_norm(**wrong)


def test_all_results_of_add_rms_norm(pool: Any) -> None:
    pool.run(2, all_results_of_add_rms_norm)


@on_mesh(2)
def rotation_by_a_matrix(mesh: Any) -> str:
    """``rotate`` is refused, on all ranks, and before anything is sent."""
    import torch_npu

    given = [distribute_tensor(randn(*shape), mesh, [R]) for shape in ((4, 2, 5, 6), (5, 6), (5, 6), (6, 6))]
    with pytest.raises(TypeError) as refused:
        torch_npu.npu_rotary_mul(*given[:3], rotate=given[3])
    return str(refused.value)


def test_rotation_by_a_matrix(pool: Any) -> None:
    words = "npu_rotary_mul(rotate=...) is not supported with distributed tensors: leave rotate out"
    assert pool.run(2, rotation_by_a_matrix) == [words, words]


@on_mesh(2)
def operator_without_rule(mesh: Any) -> None:
    import torch_npu

    x, dy = randn(4, 6), randn(4, 3, seed=1)
    got = torch_npu.npu_swiglu_backward(*(distribute_tensor(t, mesh, [Shard(0)]) for t in (dy, x)))
    assert got.placements == (R,)
    close(got, torch_npu.npu_swiglu_backward(dy, x))


def test_operator_without_rule_is_gathered(pool: Any) -> None:
    pool.run(2, operator_without_rule)
