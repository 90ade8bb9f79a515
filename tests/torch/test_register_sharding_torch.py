"""`register_sharding` as torch's decorator: overloads of aten, custom operators, lists of placements."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor as theirs

from hyper_parallel import CommDebugMode, Partial, Replicate, Shard, distribute_tensor
from hyper_parallel.core.operations.listed_shardings import TensorSpec
from hyper_parallel.experimental import register_sharding
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn

aten = torch.ops.aten


@torch.library.custom_op("hyper_parallel_tests::scaled_rows", mutates_args=())
def scaled_rows(x: torch.Tensor, scale: torch.Tensor, factor: float) -> torch.Tensor:
    return x * scale * factor


@scaled_rows.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.factor = inputs[2]


def _backward(ctx: Any, g: torch.Tensor) -> Any:
    x, scale = ctx.saved_tensors
    return g * scale * ctx.factor, (g * x).sum(0) * ctx.factor, None


scaled_rows.register_autograd(_backward, setup_context=_setup)

ASKED: list[Any] = []


def register_all() -> None:
    """Register all, once in each process of the pool."""
    if ASKED:
        return
    ASKED.append(None)

    @register_sharding(torch.ops.hyper_parallel_tests.scaled_rows.default)
    def rows(x: Any, scale: Any, factor: float) -> list:
        ASKED.append((x, scale, factor))
        return [
            ([theirs.Replicate()], [theirs.Replicate(), theirs.Replicate(), None]),
            ([Shard(0)], [theirs.Shard(0), Replicate(), None]),
            ([Shard(1)], [Shard(1), Shard(-1), None]),
            ([Partial()], [Partial(), Replicate(), None]),
        ]

    @register_sharding([aten._softmax.default, aten._log_softmax.default])
    def softmax(x: Any, dim: int, half_to_float: bool) -> list:
        return [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim) if d != dim % x.ndim]

    @register_sharding(aten.erfinv.default)
    def wrong(x: Any) -> list:
        return [([Shard(0)], [])]


@on_mesh()
def listed(mesh: Any) -> None:
    register_all()
    x, scale, weights = randn(5, 4), randn(4, seed=2), randn(5, 4, seed=3)
    whole, row = x.clone().requires_grad_(), scale.clone().requires_grad_()
    expected = scaled_rows(whole, row, 3.0)
    (expected * weights).sum().backward()
    for placed, of_row, result, count in (
        (Shard(0), Replicate(), Shard(0), {}),
        (Shard(1), Shard(0), Shard(1), {}),
        (Replicate(), Replicate(), Replicate(), {}),
    ):
        a, b = (distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in ((x, placed), (scale, of_row)))
        with CommDebugMode() as comm:
            y = scaled_rows(a, b, 3.0)
        assert y.placements == (result,) and comm.get_comm_counts() == count
        close(y.full_tensor(), expected)
        (y * distribute_tensor(weights, mesh, [result])).sum().backward()
        close(a.grad.full_tensor(), whole.grad)
        close(b.grad.full_tensor(), row.grad)
    assert any(isinstance(seen, tuple) and isinstance(seen[0], TensorSpec) for seen in ASKED)
    seen = next(seen for seen in ASKED if isinstance(seen, tuple))
    assert seen[0].shape == (5, 4) and seen[0].ndim == 2 and seen[0].size(1) == 4 and seen[2] == 3.0
    for name in ("_softmax", "_log_softmax"):
        y = getattr(aten, name).default(distribute_tensor(x, mesh, [Shard(0)]), 1, False)
        assert y.placements == (Shard(0),)
        close(y.full_tensor(), getattr(aten, name).default(x, 1, False))
        close(
            getattr(aten, name)(distribute_tensor(x, mesh, [Shard(1)]), -1, False).full_tensor(),
            getattr(aten, name)(x, 1, False),
        )
    rows = distribute_tensor(x, mesh, [Shard(0)])
    with fails(ValueError, "erfinv", "1 argument(s)"):
        aten.erfinv.default(rows)
    with fails(ValueError, "has a sharding rule already"):
        register_sharding(aten._softmax.default)(lambda *args: [])


@on_ranks(1, 2)
def test_listed(pool: Any, world_size: int) -> None:
    assert device() is not None
    pool.run(world_size, listed)
