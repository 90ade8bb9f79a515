"""Norms and clipping of gradients: values as of plain parameters, one all-reduce a mesh dimension."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    CommDebugMode,
    DeviceMesh,
    DTensor,
    PackedShard,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    init_device_mesh,
)
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.support.programs import run_each
from tests.torch.support import close, device, full, randn, shard

INFINITY = float("inf")
ORDERS = (2.0, 1.0, 3.0, 0.5, INFINITY, 0.0, -1.0, -INFINITY)
#: With three ranks, the last one has nothing of the second and third tensor in their sharded dimension.
SHAPES = [(5, 3), (2,), (1, 4), (6,), (2, 2)]


def gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [randn(*shape, seed=i).to(dtype) for i, shape in enumerate(SHAPES)]


def parameter(value: Any, gradient: Any) -> Any:
    p = value.detach().requires_grad_()
    p.grad = gradient
    return p


def plain_parameters(grads: list[torch.Tensor]) -> list[Any]:
    return [parameter(torch.zeros_like(g), g.clone()) for g in grads]


def check(mine: list[Any], grads: list[torch.Tensor], all_reduces: int, what: str) -> None:
    """Clip by every norm: the result, the gradients, and the state of the tensors afterwards are right."""
    layouts = [g.grad._layout if isinstance(g, DTensor) else None for g in mine]
    for order in ORDERS:
        for foreach in (None, True, False):
            where = f"{what}, order {order}, foreach={foreach}"
            for p, g in zip(mine, grads, strict=True):
                with torch.no_grad():
                    p.grad.copy_(shard(g, p.device_mesh, *p.placements) if isinstance(p, DTensor) else g)
            theirs = plain_parameters(grads)
            wanted = nn.utils.clip_grad_norm_(theirs, 0.3, norm_type=order, foreach=foreach)
            with CommDebugMode() as comm:
                got = nn.utils.clip_grad_norm_(iter(mine), 0.3, norm_type=order, foreach=foreach)
            assert comm.get_comm_counts() == ({"all_reduce": all_reduces} if all_reduces else {}), where
            assert isinstance(got, DTensor) and got.shape == () and all(p.is_replicate() for p in got.placements)
            assert got.dtype == wanted.dtype
            close(got, wanted, where)
            for p, q, layout in zip(mine, theirs, layouts, strict=True):
                assert isinstance(p, DTensor) is (layout is not None), where
                assert layout is None or p.grad._layout is layout, where
                close(p.grad, q.grad, where)


@on_mesh()
def one_mesh(mesh: Any) -> None:
    placements = [Shard(1), Shard(0), Shard(0), Replicate(), Replicate()]
    for dtype in (torch.float32, torch.float64):
        grads = gradients(dtype)
        mine = [
            parameter(shard(torch.zeros_like(g), mesh, p), shard(g, mesh, p))
            for g, p in zip(grads, placements, strict=True)
        ]
        check(mine, grads, int(mesh.size() > 1), f"{dtype}")
        for order in ORDERS:
            norms = torch._foreach_norm([p.grad for p in mine], order)
            for got, g in zip(norms, grads, strict=True):
                close(got, torch.linalg.vector_norm(g, order), f"{dtype}, order {order}")
        # Parameters that are not distributed take part, wherever they stand.
        for i in (0, 3):
            some = [*mine[:i], plain_parameters(grads)[i], *mine[i + 1 :]]
            check(some, grads, int(mesh.size() > 1), f"{dtype}, parameter {i} is plain")
        replicated = [
            parameter(shard(torch.zeros_like(g), mesh, Replicate()), shard(g, mesh, Replicate())) for g in grads
        ]
        check(replicated, grads, 0, f"{dtype}, replicated")


def calls_of_clipping(count: int) -> int:
    """The number of calls of the package's functions to clip so many gradients."""
    mesh = init_device_mesh(None, (1,))
    mine = [parameter(shard(randn(3), mesh, Shard(0)), shard(randn(3), mesh, Shard(0))) for _ in range(count)]
    nn.utils.clip_grad_norm_(mine, 1.0)
    calls = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and "hyper_parallel" in frame.f_code.co_filename

    sys.setprofile(see)
    nn.utils.clip_grad_norm_(mine, 1.0)
    sys.setprofile(None)
    return calls


def test_no_gradient_is_looked_at_by_interception() -> None:
    """Looking would cost more than clipping: one call for each gradient remains, which finds the dtype that counts."""
    assert 0 < calls_of_clipping(40) <= calls_of_clipping(20) + 20


@on_mesh(2, 2, names=("dp", "tp"))
def several_meshes(mesh: Any) -> None:
    """Each dimension that shards has its all-reduce, whatever number of tensors, and of slices that they are on."""
    tp, dp = mesh["tp"], mesh["dp"]
    where = [(mesh, Shard(0), Shard(1)), (mesh, Replicate(), Shard(0)), (mesh, Shard(1), Replicate()), (tp, Shard(0))]
    for last, all_reduces in (((dp, Shard(0)), 2), (None, 2)):
        grads = [*gradients()[:4], randn(7, seed=9)]
        mine = [
            parameter(torch.zeros_like(g), g.clone())
            if at is None
            else parameter(shard(torch.zeros_like(g), *at), shard(g, *at))
            for g, at in zip(grads, [*where, last], strict=True)
        ]
        check(mine, grads, all_reduces, f"last on {last}")
    only = [parameter(shard(torch.zeros_like(g), *where[1]), shard(g, *where[1])) for g in grads[:2]]
    check(only, grads[:2], 1, "one dimension of two")
    # Slices of other meshes have all-reduces of their own, though their ranks are equal.
    other = DeviceMesh(None, mesh.mesh, mesh_dim_names=("rows", "columns"))["columns"]
    where = [(mesh, Shard(0), Shard(1)), (other, Shard(0))]
    apart = [parameter(shard(torch.zeros_like(g), *at), shard(g, *at)) for g, at in zip(grads[:2], where, strict=True)]
    check(apart, grads[:2], 3, "another root")


@on_mesh(2, 1, 2, names=("replicate", "shard", "tp"))
def nested(mesh: Any) -> None:
    """Parameters that tensor parallelism has cut first: in any order of cuts, packed, flattened, and plain for it."""
    strided, dp = StridedShard(0, 2), mesh["replicate", "shard"]._flatten("dp")
    both = mesh["dp", "tp"]
    for last, all_reduces in ((mesh["replicate"], 2), (dp, 4)):
        where = [
            (mesh, strided, Replicate(), Shard(0)),
            (mesh, strided, strided, Shard(0)),
            (mesh, strided, Replicate(), PackedShard(0, (2, 4))),
            (mesh["tp"], Shard(0)),
            (last, Shard(0)),
        ]
        grads = [randn(5, 3), randn(3, 2, seed=1), randn(6, 2, seed=2), randn(7, seed=3), randn(5, seed=4)]
        mine = [parameter(shard(torch.zeros_like(g), *at), shard(g, *at)) for g, at in zip(grads, where, strict=True)]
        check(mine, grads, all_reduces, f"last on {last}")
    grads = [randn(5, 3), randn(6, seed=1), randn(7, seed=2)]
    where = [(both, strided, Shard(0)), (both, strided, PackedShard(0, (2, 4))), (dp, Shard(0))]
    mine = [parameter(shard(torch.zeros_like(g), *at), shard(g, *at)) for g, at in zip(grads, where, strict=True)]
    check(mine, grads, 2, "flattened")


@on_mesh()
def not_finite(mesh: Any) -> None:
    """NaN and infinity of one rank reach all, as they would on a single device."""
    for bad in (float("nan"), INFINITY):
        for order in ORDERS:
            grads = [randn(6, 3), randn(4, seed=1)]
            grads[0][5, 2] = bad
            mine = [parameter(shard(torch.zeros_like(g), mesh, Shard(0)), shard(g, mesh, Shard(0))) for g in grads]
            wanted = nn.utils.get_total_norm(grads, order)
            got = nn.utils.get_total_norm([p.grad for p in mine], order)
            torch.testing.assert_close(full(got), wanted, equal_nan=True)
            if wanted.isfinite():
                continue
            for foreach in (None, False):
                errors = []
                for parameters in (plain_parameters(grads), mine):
                    with pytest.raises(RuntimeError, match="non-finite") as error:
                        nn.utils.clip_grad_norm_(parameters, 0.1, order, error_if_nonfinite=True, foreach=foreach)
                    errors.append(str(error.value))
                assert errors[0] == errors[1]
            for p, g in zip(mine, grads, strict=True):
                assert isinstance(p.grad, DTensor) and p.grad.shape == g.shape
                assert torch.equal(full(p.grad).nan_to_num(), g.nan_to_num())


@on_mesh()
def without_elements(mesh: Any) -> None:
    """Some norms of a tensor without elements are errors, on all ranks, whichever rank counts the tensor."""
    empty = torch.zeros(0, 3, device=device())
    some = shard(randn(6, 3), mesh, Shard(0))
    for other in (empty, shard(empty, mesh, Replicate()), shard(empty, mesh, Shard(1))):
        for order in ORDERS:
            if order > 0 and order != INFINITY:
                close(nn.utils.get_total_norm([other, some], order), torch.linalg.vector_norm(full(some), order))
            elif order:
                with pytest.raises(RuntimeError, match="empty tensor"):
                    nn.utils.get_total_norm([other, some], order)
            else:
                assert float(nn.utils.get_total_norm([other, some], order)) == 1.0


@on_mesh()
def short_and_complex_numbers(mesh: Any) -> None:
    """Squares of norms do not overflow on the way; dtypes of norms are torch's."""
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.complex64, 1e-5)):
        grads = [(100 * randn(6, 3)).to(dtype), (100 * randn(5, seed=1)).to(dtype)]
        mine = [parameter(shard(torch.zeros_like(g), mesh, Shard(0)), shard(g, mesh, Shard(0))) for g in grads]
        theirs = plain_parameters(grads)
        wanted, got = (nn.utils.clip_grad_norm_(parameters, 1.0) for parameters in (theirs, mine))
        assert got.dtype == wanted.dtype
        close(got, wanted, str(dtype), tolerance)
        for p, q in zip(mine, theirs, strict=True):
            close(p.grad, q.grad, str(dtype), tolerance)
        norms = torch._foreach_norm([p.grad for p in mine])
        close(norms[0], grads[0].norm() / wanted.clamp(min=1), str(dtype), 2 * tolerance)
    # The ranks count tensors of different dtypes: only the first one counts the replicated tensors.
    mixed = [shard(randn(5).double(), mesh, Replicate()), shard(randn(6, seed=1), mesh, Shard(0))]
    got, wanted = (nn.utils.get_total_norm(x) for x in (mixed, [full(x) for x in mixed]))
    assert got.dtype == wanted.dtype
    close(got, wanted)


@on_mesh()
def other_ways_to_clip(mesh: Any) -> None:
    """Tensors that are no gradients, norms that were computed otherwise, by value, none at all."""
    grads = [randn(5, 3), randn(4, seed=1)]
    mine = [parameter(shard(torch.zeros_like(g), mesh, Shard(0)), shard(g, mesh, Shard(0))) for g in grads]
    partial = DTensor.from_local(randn(3), mesh, [Partial()])
    wanted = nn.utils.get_total_norm([mesh.size() * randn(3), grads[0]])
    close(nn.utils.get_total_norm([partial, mine[0].grad]), wanted)
    close(nn.utils.get_total_norm(mine[0].grad), grads[0].norm())
    for norm in (DTensor.from_local(torch.tensor(2.0, device=device()), mesh, [Partial()]), 2.0 * mesh.size()):
        theirs = plain_parameters(grads)
        for p, g in zip(mine, grads, strict=True):
            p.grad = shard(g, mesh, Shard(0))
        total = torch.tensor(2.0 * mesh.size(), device=device())
        nn.utils.clip_grads_with_norm_(theirs, 0.5, total)
        nn.utils.clip_grads_with_norm_(mine, 0.5, total if isinstance(norm, float) else norm)
        for p, q in zip(mine, theirs, strict=True):
            close(p.grad, q.grad)
    for foreach in (None, True, False):
        for parameters in (mine, theirs):
            for p, g in zip(parameters, grads, strict=True):
                p.grad = shard(g, mesh, Shard(0)) if isinstance(p, DTensor) else g.clone()
            nn.utils.clip_grad_value_(parameters, 0.25, foreach=foreach)
        for p, q in zip(mine, theirs, strict=True):
            assert isinstance(p.grad, DTensor)
            close(p.grad, q.grad)
    mine[1].grad = None
    close(nn.utils.clip_grad_norm_(mine, 1.0), theirs[0].grad.norm())
    mine[0].grad = None
    assert torch.equal(nn.utils.clip_grad_norm_(mine, 1.0), torch.tensor(0.0))
    close(nn.utils.clip_grad_norm_([*mine, theirs[0]], 1.0), theirs[0].grad.norm())
    with pytest.raises(ValueError, match="could not convert string to float"):
        nn.utils.clip_grad_norm_(mine, "one")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        nn.utils.clip_grad_norm_((p for p in ()), 1.0)
    assert ["empty generator" in str(w.message) for w in seen] == [True]


@on_mesh()
def gradients_that_nobody_has_looked_at(mesh: Any) -> None:
    """Gradients straight from backward can be clipped, and read afterwards."""
    p = shard(randn(5, 3), mesh, Shard(0)).requires_grad_()
    q = randn(5, 3).requires_grad_()
    for x in (p, q):
        (x * x).sum().backward()
    close(nn.utils.clip_grad_norm_(p, 0.5), nn.utils.clip_grad_norm_(q, 0.5))
    assert p.grad.placements == (Shard(0),) and p.grad.shape == (5, 3)
    close(p.grad, q.grad)


JOBS = [
    one_mesh,
    not_finite,
    without_elements,
    short_and_complex_numbers,
    other_ways_to_clip,
    gradients_that_nobody_has_looked_at,
]


def run_all() -> None:
    for job in JOBS:
        job()


@on_ranks(1, 2, 3)
def test_clipping(pool: Any, world_size: int) -> None:
    pool.run(world_size, run_all)


def test_several_meshes(pool: Any) -> None:
    pool.run(4, several_meshes)
    pool.run(4, nested)


PROGRAM = """
import inspect
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from hyper_parallel import CommDebugMode, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.testing.extent import on_ranks
mesh = init_device_mesh(None, (1,))
p = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
p.pow(2).sum().backward()
for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_"):
    assert getattr(torch.nn.utils, name).__module__ == "torch.nn.utils.clip_grad", name
    assert "foreach" in inspect.signature(getattr(torch.nn.utils, name)).parameters, name
assert torch.nn.utils.clip_grad_norm_ is torch.nn.utils.clip_grad.clip_grad_norm_ is not clip_grad_norm_
assert abs(float(get_total_norm([p.grad])) - 32 ** 0.5) < 1e-5
assert abs(float(clip_grad_norm_([p], 1.0)) - 32 ** 0.5) < 1e-5
assert abs(float(torch.nn.utils.clip_grad_norm_([p], 1.0)) - 1) < 1e-5
print("done")
"""


def test_functions_imported_before() -> None:
    """Functions imported earlier are torch's own, and work too."""
    (ended,) = run_each(["-c", PROGRAM], [{}])
    assert (ended.status, ended.out.strip()) == (0, "done"), ended.err
