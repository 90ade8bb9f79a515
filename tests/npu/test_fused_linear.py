"""Linear layers and their collective in one operator of torch_npu: values, gradients, and where it does not apply."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hyper_parallel import ColwiseParallel, Replicate, RowwiseParallel, Shard, get_platform, parallelize_module
from hyper_parallel.debug import CommDebugMode
from hyper_parallel.platform.contract import LinearCollective
from hyper_parallel.platform.torch import fused_linear
from hyper_parallel.testing import spmd
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn

R = Replicate()
TOKENS, IN, OUT = 8, 1024, 2048
ASCEND_910B, ASCEND_910C = 223, 250


def fused(mesh: Any, collective: str, x: Any, weight: Any, dim: int = 0) -> tuple[Any, list[str]]:
    """The result of the verb, and the list of collectives that it announces."""
    said: list[str] = []
    platform = get_platform()
    platform.fast.fuses_linear = True  # type: ignore[attr-defined]
    try:
        group, size = mesh.platform_group(0), mesh.size()
        how = LinearCollective(collective, group, size, dim, lambda name, local: said.append(name))
        y = platform.fast.linear_with_collective(x, weight, how)
    finally:
        platform.fast.fuses_linear = False  # type: ignore[attr-defined]
    return y, said


def made(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    return (randn(*shape, seed=seed) / shape[-1] ** 0.5).to(dtype)


def part(x: torch.Tensor, mesh: Any, dim: int) -> torch.Tensor:
    return x.chunk(mesh.size(), dim)[spmd.rank].detach().clone().requires_grad_()


@on_mesh(2)
def on_two(mesh: Any, dtype_name: str) -> None:
    products(mesh, getattr(torch, dtype_name))


@on_mesh(4)
def on_four(mesh: Any, dtype_name: str) -> None:
    products(mesh, getattr(torch, dtype_name))


def products(mesh: Any, dtype: torch.dtype) -> None:
    """Comparison with float32 on one device; the cotangent is different everywhere."""
    tolerance = 2e-2 if dtype is torch.bfloat16 else 4e-3
    x, weight = made(dtype, 1, TOKENS, IN, seed=1), made(dtype, OUT, IN, seed=2)
    cotangent = made(dtype, 1, TOKENS, OUT, seed=3)
    whole = [t.float().requires_grad_() for t in (x, weight)]
    wanted = torch.nn.functional.linear(*whole)
    wanted.backward(cotangent.float())
    by_x, by_weight = (t.grad for t in whole)

    # x and weight by features; the sum on every rank
    mine, own = part(x, mesh, -1), part(weight, mesh, 1)
    y, said = fused(mesh, "all_reduce", mine, own)
    close(y.float(), wanted, "all_reduce", tolerance)
    y.backward(cotangent)
    assert said == ["all_reduce"]
    close(mine.grad.float(), part(by_x, mesh, -1), "all_reduce: x", tolerance)
    close(own.grad.float(), part(by_weight, mesh, 1), "all_reduce: weight", tolerance)

    # ... its tokens shared among the ranks
    mine, own = part(x, mesh, -1), part(weight, mesh, 1)
    y, said = fused(mesh, "reduce_scatter", mine, own, dim=1)
    close(y.float(), part(wanted, mesh, 1), "reduce_scatter", tolerance)
    y.backward(part(cotangent, mesh, 1))
    assert said == ["reduce_scatter", "all_gather"]
    close(mine.grad.float(), part(by_x, mesh, -1), "reduce_scatter: x", tolerance)
    close(own.grad.float(), part(by_weight, mesh, 1), "reduce_scatter: weight", tolerance)

    # x by tokens, weight by output features
    mine, own = part(x, mesh, 1), part(weight, mesh, 0)
    y, said = fused(mesh, "all_gather", mine, own, dim=1)
    close(y.float(), part(wanted, mesh, -1), "all_gather", tolerance)
    y.backward(part(cotangent, mesh, -1))
    assert said == ["all_gather", "reduce_scatter"]
    close(mine.grad.float(), part(by_x, mesh, 1), "all_gather: x", tolerance)
    close(own.grad.float(), part(by_weight, mesh, 0), "all_gather: weight", tolerance)

    # a view that is not contiguous, and a frozen weight or input
    mine, own = part(x, mesh, -1), part(weight, mesh, 1).detach()
    y, _ = fused(mesh, "all_reduce", mine.transpose(0, 1), own)
    close(y.transpose(0, 1).float(), wanted, "transposed", tolerance)
    y.backward(cotangent.transpose(0, 1))
    close(mine.grad.float(), part(by_x, mesh, -1), "transposed: x", tolerance)
    for collective, feature, token in (("all_reduce", 1, -1), ("reduce_scatter", 1, -1), ("all_gather", 0, 1)):
        mine, own = part(x, mesh, token).detach(), part(weight, mesh, feature)
        y, said = fused(mesh, collective, mine, own, dim=1)
        (y * 1.0).sum().backward()
        assert own.grad is not None
        assert said == ([collective, "all_gather"] if collective == "reduce_scatter" else [collective])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products(pool: Any, dtype: str) -> None:
    pool.run(2, on_two, dtype)
    pool.run(4, on_four, dtype)


@on_mesh(2)
def not_asked_for(mesh: Any) -> None:
    platform = get_platform()
    x, weight = made(torch.float16, TOKENS, IN, seed=1), made(torch.float16, OUT, IN, seed=2)
    assert platform.fast.fuses_linear is False  # type: ignore[attr-defined]
    how = LinearCollective("all_reduce", mesh.platform_group(0), 2, 0, print)
    assert platform.fast.linear_with_collective(x, weight, how) is None
    assert fused(mesh, "all_reduce", x.float(), weight.float())[0] is None


def test_off_by_itself(pool: Any) -> None:
    pool.run(2, not_asked_for)


def test_where_it_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conditions are the same on every rank, and stay within the limits that torch_npu documents."""
    half = torch.empty(1, TOKENS, IN, dtype=torch.float16, device="meta")
    weight = torch.empty(OUT, IN, dtype=torch.float16, device="meta")

    def yes(
        collective: str, x: Any = half, w: Any = weight, size: int = 2, dim: int = 1, chip: int = ASCEND_910B
    ) -> bool:
        return fused_linear.applies(x, w, LinearCollective(collective, None, size, dim, print), chip)

    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        assert yes(collective)
        assert not yes(collective, half.float(), weight.float()), "float32"
        assert not yes(collective, half, weight.bfloat16()), "two dtypes"
        assert not yes(collective, half[:0]), "nothing"
        assert not yes(collective, half[0, 0]), "a vector"
        assert not yes(collective, size=3)
        assert not yes(collective, size=16) and yes(collective, size=16, x=torch.cat([half] * 2, 1), chip=ASCEND_910C)
        for chip in (102, 202, 241):  # Ascend 910A, 310P, 310B
            assert not yes(collective, chip=chip)
        with torch.autocast("npu"):
            assert not yes(collective)
    small = torch.empty(OUT, 255, dtype=torch.float16, device="meta")
    assert yes("all_reduce", half[..., :255], small)
    for collective in ("all_gather", "reduce_scatter"):
        assert not yes(collective, half[..., :255], small)
        assert not yes(collective, half[..., :255], small.t()), "in backward"
        assert not yes(collective, torch.cat([half, half])), "rows of several batch elements"
        assert not yes(collective, dim=2), "features"
        assert yes(collective, torch.cat([half, half]), dim=0)
    assert not yes("reduce_scatter", half[:, :7]) and yes("all_gather", half[:, :7])
    monkeypatch.setattr(fused_linear, "_OPERATORS", {**fused_linear._OPERATORS, "all_gather": "npu_of_the_future"})
    assert not yes("reduce_scatter") and yes("all_reduce")


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in ((None, False), ("0", False), ("", False), ("1", True)):
        if value is None:
            monkeypatch.delenv("HYPER_PARALLEL_FUSED_LINEAR", raising=False)
        else:
            monkeypatch.setenv("HYPER_PARALLEL_FUSED_LINEAR", value)
        assert type(get_platform())().fast.fuses_linear is wanted  # type: ignore[attr-defined]


@on_mesh(2)
def refused_by_the_operators(mesh: Any) -> None:
    """The simulator refuses the same arguments as the operators, so that the tests above are meaningful."""
    name = fused_linear.communicator(mesh.get_group(0))
    half, square = made(torch.float16, 4, 256, seed=1), made(torch.float16, 256, 256, seed=2)
    npu = torch.ops.npu
    for call, said in (
        (lambda: npu.npu_mm_all_reduce_base(half.float(), square.float(), name), "takes float16 and bfloat16"),
        (lambda: npu.npu_mm_all_reduce_base(half.t(), square[:4], name), "takes a contiguous matrix"),
        (lambda: npu.npu_mm_all_reduce_base(half, square, "unknown"), "no communicator 'unknown'"),
        (lambda: npu.npu_mm_all_reduce_base(half, square, name, reduce_op="max"), "is simulated with reduce_op='sum'"),
        (lambda: npu.npu_all_gather_base_mm(half[:, :8].contiguous(), square[:8], name, 2), "cannot multiply"),
        (lambda: npu.npu_all_gather_base_mm(half, square, name, 3), "is for 2, 4 or 8 ranks"),
        (lambda: npu.npu_mm_reduce_scatter_base(half[:3], square, name, 2), "cannot share 3 rows among 2"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    bias = torch.ones(256, dtype=torch.float16, device=device())
    plain = npu.npu_mm_all_reduce_base(half, square, name)
    close(npu.npu_mm_all_reduce_base(half, square, name, bias=bias), plain + 1, tolerance=1e-2)
    y, nothing = npu.npu_all_gather_base_mm(half, square, name, 2, bias=bias, gather_output=False)
    assert y.shape == (8, 256) and nothing.numel() == 0
    close(npu.npu_mm_reduce_scatter_base(half, square, name, 2, bias=bias), part(plain, mesh, 0) + 2, tolerance=1e-2)


def test_refused_by_the_operators(pool: Any) -> None:
    pool.run(2, refused_by_the_operators)


# ------------------------------------------------------------------------------------------------ in styles
def mlp(dtype: torch.dtype, bias: bool) -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(IN, OUT, bias=bias), torch.nn.SiLU(), torch.nn.Linear(OUT, IN, bias=bias)]
    return torch.nn.Sequential(*layers).to(device()).to(dtype)


#: name -> (styles of both layers, placement of input and output, operators asked for, those that answer, collectives)
PLANS: dict[str, tuple] = {
    "tensor": ({}, {}, R, ["all_reduce"], {"all_reduce": 1}, {"all_reduce": 1}),
    "sequence": (
        {"input_layouts": Shard(1)},
        {"output_layouts": Shard(1)},
        Shard(1),
        ["all_gather", "reduce_scatter"],
        {"all_gather": 1, "reduce_scatter": 1},
        {"all_gather": 1, "reduce_scatter": 1},
    ),
}


@on_mesh(2)
def styles(mesh: Any, name: str, bias: bool, local: bool, dtype_name: str) -> None:
    """The MLP with and without fusing: values, gradients, and the number of collectives, which stays the same."""
    dtype = getattr(torch, dtype_name)
    first, last, placement, wanted_calls, forward, backward = PLANS[name]
    x, cotangent = made(dtype, 1, TOKENS, IN, seed=1), made(dtype, 1, TOKENS, IN, seed=3)
    single = mlp(dtype, bias).float()
    whole = x.float().clone().requires_grad_()
    expected = single(whole)
    expected.backward(cotangent.float())
    platform, calls = get_platform(), []
    applies = fused_linear.applies

    def counted(x: Any, weight: Any, how: LinearCollective, chip: int) -> bool:
        answer = applies(x, weight, how, chip)
        calls.append((how.collective, answer))
        return answer

    fused_linear.applies = counted
    platform.fast.fuses_linear = True
    try:
        plan = {
            "0": ColwiseParallel(use_local_output=local, **first),
            "2": RowwiseParallel(use_local_output=local, **last),
        }
        model = parallelize_module(mlp(dtype, bias), mesh, plan)
        mine = (x if placement == R else x.chunk(2, 1)[spmd.rank]).clone().requires_grad_()
        with CommDebugMode() as comm:
            y = model(mine)
        assert comm.get_comm_counts() == forward, comm.get_comm_counts()
        tolerance = 1e-5 if dtype is torch.float32 else 4e-3
        if local:
            close(y.float(), expected if placement == R else part(expected, mesh, 1), name, tolerance)
        else:
            assert y.placements == (placement,)
            close(y.full_tensor().float(), expected, name, tolerance)
        by_y = cotangent if placement == R else cotangent.chunk(2, 1)[spmd.rank]
        with CommDebugMode() as comm:
            (y if local else y.to_local()).backward(by_y)
        # Of a bias that is added to scattered rows each rank knows a part of the gradient.
        wanted = {**backward, "all_reduce": 1} if bias and placement != R and dtype is not torch.float32 else backward
        assert comm.get_comm_counts() == wanted, comm.get_comm_counts()
        assert calls == [(c, dtype is not torch.float32) for c in wanted_calls], calls
        close(mine.grad.float(), whole.grad if placement == R else part(whole.grad, mesh, 1), "x", tolerance)
        for (key, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            close(p.grad.full_tensor().float(), q.grad, key, tolerance)
    finally:
        fused_linear.applies, platform.fast.fuses_linear = applies, False


@pytest.mark.parametrize("name", PLANS)
def test_styles(pool: Any, name: str) -> None:
    for bias in (False, True):
        for local in (True, False):
            pool.run(2, styles, name, bias, local, "float16")
    pool.run(2, styles, name, False, True, "float32")


@on_mesh(2)
def left_alone(mesh: Any) -> None:
    """Layers that nothing is fused for run as usual: parts of different sizes, other layouts, a mesh of one rank."""
    platform, applies = get_platform(), fused_linear.applies

    def never(*args: Any) -> bool:
        raise AssertionError("asked for an operator")

    fused_linear.applies = never
    platform.fast.fuses_linear = True
    try:
        for style, features in (
            (RowwiseParallel(input_layouts=R), (5, 5)),
            (RowwiseParallel(input_layouts=R, packed=(2, 4)), (6, 5)),
            (RowwiseParallel(input_layouts=R, output_layouts=Shard(-1)), (6, 4)),
            (ColwiseParallel(), (6, 5)),
            (ColwiseParallel(output_layouts=R), (6, 4)),
        ):
            torch.manual_seed(0)
            single = torch.nn.Linear(*features).to(device()).half()
            model = parallelize_module(copy.deepcopy(single), mesh, style)
            y = model(made(torch.float16, 2, TOKENS, features[0], seed=1))
            assert y.dtype is torch.float16, style
    finally:
        fused_linear.applies, platform.fast.fuses_linear = applies, False


def test_left_alone(pool: Any) -> None:
    pool.run(2, left_alone)
