"""`overlap_collectives`: linear layers cut into chunks give the same results as in one piece, with as many bytes
moved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Replicate,
    RowwiseParallel,
    Shard,
    check_ranks,
    overlap_collectives,
    parallelize_module,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, full, randn

BATCH, SEQUENCE, FEATURES, HIDDEN = 3, 24, 12, 24


def mlp(bias: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, HIDDEN, bias=bias), nn.SiLU(), nn.Linear(HIDDEN, FEATURES, bias=bias)]
    return nn.Sequential(*layers).to(device())


def placed(x: torch.Tensor, mesh: Any, placement: Any, as_dtensor: bool) -> Any:
    """The part of ``x`` on this rank, a leaf."""
    if placement is not Replicate():
        x = x.chunk(mesh.size(), placement.dim)[spmd.rank]
    x = x.detach().clone()
    return (DTensor.from_local(x, mesh, [placement]) if as_dtensor else x).requires_grad_()


def whole(x: Any, mesh: Any, placement: Any) -> torch.Tensor:
    return full(x if isinstance(x, DTensor) else DTensor.from_local(x.detach(), mesh, [placement]))


@on_mesh()
def in_chunks(mesh: Any, dim: int | None, bias: bool, as_dtensor: bool, chunks: int) -> list[dict[str, int]]:
    """The MLP with tensor (no ``dim``) or sequence parallelism; returns the collectives of forward and backward."""
    placement: Any = Replicate() if dim is None else Shard(dim)
    single = mlp(bias)
    plan = {
        "0": ColwiseParallel(input_layouts=placement, use_local_output=not as_dtensor),
        "2": RowwiseParallel(output_layouts=placement, use_local_output=not as_dtensor),
    }
    sharded = parallelize_module(copy.deepcopy(single), mesh, plan)
    x, cotangent = randn(BATCH, SEQUENCE, FEATURES, seed=1), randn(BATCH, SEQUENCE, FEATURES, seed=2)
    if dim == 0:
        x, cotangent = x.transpose(0, 1).contiguous(), cotangent.transpose(0, 1).contiguous()
    reference = x.clone().requires_grad_()
    wanted = single(reference)
    wanted.backward(cotangent)
    mine = placed(x, mesh, placement, as_dtensor)
    with overlap_collectives(chunks=chunks, least=0):
        with CommDebugMode() as forward:
            y = sharded(mine)
        with CommDebugMode() as backward:
            y.backward(placed(cotangent, mesh, placement, as_dtensor).detach())
        with torch.no_grad():
            close(whole(sharded(mine), mesh, placement), wanted, "without gradients")
    close(whole(y, mesh, placement), wanted, "output")
    close(whole(mine.grad, mesh, placement), reference.grad, "gradient of the input", tolerance=1e-4)
    for (name, p), q in zip(sharded.named_parameters(), single.parameters(), strict=True):
        close(p.grad, q.grad, name, tolerance=1e-4)
    elements = [forward.get_elements(), backward.get_elements()]
    assert elements == without_chunks(sharded, mesh, x, cotangent, placement, as_dtensor, bias)
    return [forward.get_comm_counts(), backward.get_comm_counts()]


def without_chunks(
    model: Any, mesh: Any, x: Any, cotangent: Any, placement: Any, as_dtensor: bool, bias: bool
) -> list[dict[str, int]]:
    """Elements that the collectives work on where nothing is cut."""
    with CommDebugMode() as forward:
        y = model(placed(x, mesh, placement, as_dtensor))
    with CommDebugMode() as backward:
        y.backward(placed(cotangent, mesh, placement, as_dtensor).detach())
    elements = [forward.get_elements(), backward.get_elements()]
    if bias and placement is not Replicate() and mesh.size() > 1:
        elements[1]["all_reduce"] = FEATURES  # of the last bias, which cannot hide in a summand here
    return elements


@pytest.mark.parametrize("as_dtensor", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dim", [None, 0, 1])
@on_ranks(1, 2, 4)
def test_in_chunks(pool: Any, world_size: int, dim: int | None, bias: bool, as_dtensor: bool) -> None:
    for chunks in (2, 3):
        for forward, backward in pool.run(world_size, in_chunks, dim, bias, as_dtensor, chunks):
            if world_size == 1:
                assert not forward and not backward
            elif dim is None:
                assert forward == {"all_reduce": chunks} and backward == {"all_reduce": 1}
            else:
                both = {"all_gather": chunks, "reduce_scatter": chunks}
                assert forward == both
                assert backward == {**both, **({"all_reduce": 1} if bias else {})}


@on_mesh()
def not_cut(mesh: Any) -> None:
    """A call is not cut into chunks if its tensor is small, does not divide, or has another dtype."""
    model = parallelize_module(
        mlp(False), mesh, {"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Shard(1))}
    )
    expected = {"all_gather": 1, "reduce_scatter": 1}
    x = randn(BATCH, SEQUENCE // mesh.size(), FEATURES)
    with overlap_collectives(chunks=2), CommDebugMode() as comm:
        y = model(x)
    assert comm.get_comm_counts() == expected
    with overlap_collectives(chunks=2, least=0):
        with CommDebugMode() as comm, torch.autocast(device().type, torch.bfloat16):
            model(x)
        assert comm.get_comm_counts() == expected
        with CommDebugMode() as comm:
            model(randn(BATCH, 1, FEATURES))  # one position a rank cannot be cut
        assert comm.get_comm_counts() == expected
        layout = [Shard(1)]
        uneven = DTensor.from_local(
            randn(BATCH, 2 if spmd.rank == 0 else 1, FEATURES), mesh, layout, shape=(BATCH, 3, FEATURES)
        )
        with CommDebugMode() as comm:
            model(uneven)
        assert comm.get_comm_counts() == expected
        with check_ranks(mesh):
            close(model(x), y, "with checks")
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def test_not_cut(pool: Any) -> None:
    pool.run(2, not_cut)


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@on_mesh()
def computed_bias(mesh: Any) -> None:
    """A computed bias is not left out."""
    reference = nn.Linear(8, 6).to(device())
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(randn(*p.shape))
    model = parallelize_module(copy.deepcopy(reference), mesh, RowwiseParallel())
    for module in (reference, model):
        parametrize.register_parametrization(module, "bias", _Doubled())
    x = randn(4, 8, seed=1)
    part = x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()
    with overlap_collectives(chunks=2, least=1):
        y = model(part)
    close(y, reference(x))


def test_computed_bias(pool: Any) -> None:
    pool.run(2, computed_bias)
