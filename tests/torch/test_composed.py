"""Functions that run as compositions, by index or in batches: in rare spellings, and where torch says no."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    register_sharding,
    strict,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn, shard
from tests.torch.test_rare_calls import compared, operands

#: As in `test_rare_calls`.
CALLS: dict[str, Callable[..., Any]] = {
    "addmv without the first": lambda v, x: torch.addmv(v[:5].detach() * float("nan"), mat=x, vec=v, beta=0, alpha=2),
    "addbmm": lambda z, x: torch.addbmm(x[:2, :2], z.mT[:, :2], batch2=z[..., :2], beta=0.5),
    "inner with a number": lambda x, s: torch.inner(x, s),
    "tensordot of dimensions": lambda x, z: torch.tensordot(x, z, dims=([1], [1])),
    "tensordot by a product": lambda x, v: torch.tensordot(x, v, dims=0),
    "tensordot that stretches": lambda x, z: torch.tensordot(x[:, :1], z, dims=([1], [1])),
    "kron of vectors": lambda v, x: torch.kron(v, x),
    "multi_dot of vectors": lambda x, v: torch.linalg.multi_dot([x[:, 0], x, v]),
    "multi_dot that is cheaper from behind": lambda x, v: torch.linalg.multi_dot(
        [x.T, x, v.unsqueeze(1), v.unsqueeze(0)]
    ),
    "chain_matmul": lambda x, z: torch.chain_matmul(x, z[0]),
    "norm of all": lambda z: torch.linalg.norm(z),
    "norm of a vector": lambda v: torch.linalg.norm(v, 3),
    "norm of matrices": lambda z: torch.linalg.norm(z, "fro", dim=(1, 2), keepdim=True),
    "nuclear norm along dimensions": lambda z: torch.norm(z, "nuc", dim=(1, 2), keepdim=True),
    "difference of nothing": lambda x: torch.diff(x, n=9),
    "difference of rows": lambda x, v: torch.diff(x, dim=0, prepend=v[None]),
    "trapezoid at places": lambda x, v: torch.trapezoid(x, v.cumsum(0)),
    "trapezoid of one": lambda x: torch.trapezoid(x[:, :1]),
    "trapezoid at a place of each": lambda x, y: torch.cumulative_trapezoid(x, y.cumsum(1)),
    "cov of a vector": lambda v: torch.cov(v, correction=0),
    "cov of whole numbers": lambda i: torch.cov(i),
    "cov with both weights": lambda x, y, i: torch.cov(x, fweights=i[0] + 1, aweights=y[0].detach()),
    "corrcoef of a vector": lambda v: torch.corrcoef(v),
    "bincount of nothing": lambda i: torch.bincount(i[0][:0], minlength=3),
    "bincount with weights": lambda i, y: torch.bincount(i[0], weights=y[0].detach()),
    "histc of whole numbers": lambda i: torch.histc(i.float().detach(), 4, 1, 3),
    "histc of one number": lambda y: torch.histc(y.detach() * 0 + 1, 3),
    "take_along_dim of the flat tensor": lambda x, i: torch.take_along_dim(x, i),
    "take_along_dim that stretches": lambda x, i: torch.take_along_dim(x, i[:1], dim=0),
    "meshgrid of a list": lambda v, x: torch.meshgrid([v, x[:, 0]], indexing="ij")[0],
    "tensordot that stretches the second": lambda x, z: torch.tensordot(x, z[:, :1], dims=([1], [1])),
    "cross": lambda z: torch.cross(z, z.flip(0), dim=-1),
    "cross without a dimension": lambda z: torch.cross(z, z.roll(1, 2) * 2),
    "cross that stretches": lambda z: torch.linalg.cross(z, z[:1, :1] * 2),
    "one_hot of as many classes as there are": lambda i: F.one_hot(i),
    "index_put through a mask": lambda x, m, s: x.index_put((m,), s),
    "index_put of columns": lambda x, i, s: x.index_put((i, i), s, accumulate=True),
    "repeat_interleave of rows": lambda x, i: x.repeat_interleave(i[:, 1], 0),
    "repeat_interleave of a number": lambda s: s.repeat_interleave(3),
    "repeat_interleave of repeats alone": lambda i: torch.repeat_interleave(i[0]),
    "narrow by keyword": lambda x, n: torch.narrow(x, 1, start=n, length=2),
    "unsafe pieces": lambda x: x.unsafe_split(2)[1] * x.unsafe_chunk(3)[0],
    "at least three": lambda v: torch.atleast_3d(v) * torch.atleast_3d(v.reshape(2, 3))[:, :, :1].sum(),
    "copies of views": lambda z: torch.unsqueeze_copy(z, 1).sum(1) * torch.split_copy(z, 2, 1)[0].sum(),
    "broadcast_tensors": lambda x, v: torch.broadcast_tensors(x, v)[1],
    "stacked as each dimension": lambda x, z: (
        torch.hstack((x, x)).sum() * torch.vstack((x, x)) + torch.dstack((z, z)).sum()
    ),
    "column_stack": lambda v, x: torch.column_stack((x.T, v)),
    "diagflat": lambda v: torch.diagflat(v, 1),
    "trace": lambda x: torch.trace(x),
    "reversed both ways": lambda x: x.fliplr() - x.flipud() * 2,
    "rot90 by a half": lambda x: x.rot90(2) + x,
    "softmin": lambda x: F.softmin(x, 1),
    "tensorinv": lambda x: torch.linalg.tensorinv((x @ x.T).reshape(5, 5, 1), 1),
    "constant_pad_nd": lambda x: torch.constant_pad_nd(x, (1, 2)),
    "meshgrid by columns": lambda v, x: torch.meshgrid(v, x[:, 0], indexing="xy")[1],
    "cartesian_prod of one": lambda v: torch.cartesian_prod(v) * 2,
    "combinations of none": lambda v: torch.combinations(v, 0),
    "block_diag of vectors": lambda x, v, s: torch.block_diag(x, v, s),
    "tensor_split at places": lambda x: torch.tensor_split(x, (1, -2), dim=1)[1],
    "tensor_split that overlaps": lambda x: torch.tensor_split(x, (4, 2), dim=1)[2],
    "tensor_split by a tensor": lambda x, n: torch.tensor_split(x, n.cpu())[0],
    "hsplit of a vector": lambda v: torch.hsplit(v, 3)[1],
    "rot90 by nothing": lambda x: x.rot90(4),
    "rot90 backwards": lambda z: z.rot90(-1, (2, 0)),
    "slice_scatter of nothing": lambda x: torch.slice_scatter(x, x[:, :0], 1, 2, 2),
    "diagonal_scatter below": lambda x, v: torch.diagonal_scatter(x, v[:4], -1),
    "sum_to_size of all": lambda x: x.sum_to_size(()),
    "sum_to_size of rows": lambda z: z.sum_to_size(1, 3),
    "unravel_index": lambda i: torch.unravel_index(i, (2, 3))[1],
    "unravel_index of a vector": lambda i: torch.unravel_index(i, 5)[0],
    "linspace between tensors": lambda s: torch.linspace(s.detach(), 4, 5),
    "solve with one right side for several": lambda z: torch.linalg.solve((z.mT @ z).exp(), z[0, :3]),
    "median of all, by keyword": lambda x: torch.nanmedian(input=x),
    "std with both older arguments": lambda x: x.std(1, True, True),
    "quantiles of all": lambda x: x.quantile(0.25, keepdim=True),
    "gather of one": lambda s, i: s.gather(0, i[0, :1] * 0),
    "isin of a number": lambda i: torch.isin(2, i),
    "view_as_complex": lambda z: torch.view_as_complex(z[..., :2].contiguous()).abs(),
}

#: Functions that add a product to their first operand, and the sizes of the operands.
SUMMANDS: dict[str, tuple[tuple[int, ...], ...]] = {
    "addmm": ((5, 4), (5, 3), (3, 4)),
    "addmv": ((5,), (5, 3), (3,)),
    "addr": ((5, 3), (5,), (3,)),
    "baddbmm": ((2, 5, 4), (2, 5, 3), (2, 3, 4)),
    "addbmm": ((5, 4), (2, 5, 3), (2, 3, 4)),
}

#: In place by the function that returns a new tensor; backward needs the value that is written over.
WRITES: dict[str, Callable[..., Any]] = {
    "cumprod_": lambda x: x.cumprod_(1),
    "renorm_": lambda x: x.renorm_(2, 0, 1.0),
    "index_add_": lambda x, i: x.index_add_(1, i[0], x.detach().clone()),
    "scatter_reduce_": lambda x, i, y: x.scatter_reduce_(0, i, y, "amax"),
    "put_": lambda x, i, y: x.put_(i[0, :3], y[0, :3]),
    "addmv_": lambda v, x: v[:5].clone().addmv_(x, v),
}

#: Refusals of torch, in its words: of ``x`` (5, 6).
REFUSED: dict[str, Callable[[Any], Any]] = {
    "addmv": lambda x: torch.addmv(x, x, x),
    "baddbmm": lambda x: torch.baddbmm(x.expand(3, 5, 6), x[None, :, :2], x[None, :2]),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([0, 1], [0])),
    "cross": lambda x: torch.cross(x, x),
    "cross of others": lambda x: torch.linalg.cross(x[:, :3], x[0, :3]),
    "nonzero_static": lambda x: torch.nonzero_static(x, size=-1),
    "masked_select": lambda x: x.masked_select(x[:, :5] > 0),
    "masked_scatter": lambda x: x.masked_scatter(x[:, :5] > 0, x),
    "multi_dot": lambda x: torch.linalg.multi_dot([x]),
    "multi_dot of a batch": lambda x: torch.linalg.multi_dot([x[None], x]),
    "norm": lambda x: torch.linalg.norm(x.reshape(5, 2, 3), 2),
    "tensorinv": lambda x: torch.linalg.tensorinv(x),
    "tensorsolve": lambda x: torch.linalg.tensorsolve(x, x),
    "inv": lambda x: torch.linalg.inv(x),
    "inv of a vector": lambda x: torch.linalg.inv(x[0]),
    "geqrf": lambda x: torch.geqrf(x[0]),
    "diff": lambda x: torch.diff(x.sum()),
    "cov": lambda x: torch.cov(x[None]),
    "bincount": lambda x: torch.bincount(x),
    "histc": lambda x: torch.histc(x, 5, 3, 1),
    "meshgrid": lambda x: torch.meshgrid(x, x),
    "block_diag": lambda x: torch.block_diag(x[None]),
    "tensor_split": lambda x: torch.tensor_split(x, 0),
    "tensor_split of a number": lambda x: torch.tensor_split(x.sum(), 2),
    "hsplit": lambda x: torch.hsplit(x, 4),
    "diag": lambda x: torch.diag(x[None]),
    "trace": lambda x: torch.trace(x[0]),
    "fliplr": lambda x: torch.fliplr(x[0]),
    "flipud": lambda x: torch.flipud(x.sum()),
    "rot90": lambda x: torch.rot90(x, 1, (0, 0)),
    "select_scatter": lambda x: torch.select_scatter(x, x, 0, 0),
    "slice_scatter": lambda x: torch.slice_scatter(x, x, 0, 0, 2),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x),
    "sum_to_size": lambda x: x.sum_to_size(4, 6),
    "unravel_index": lambda x: torch.unravel_index(x, (2, 3)),
    "topk": lambda x: x.topk(7),
    "unfold": lambda x: x.unfold(1, 7, 1),
    "view_as_complex": lambda x: torch.view_as_complex(x),
    "take_along_dim": lambda x: torch.take_along_dim(x, x[0].long(), 0),
    "cumsum_ of another type": lambda x: x.long().true_divide_(2),
    "diff_ of another shape": lambda x: x.addmv_(x, x[0]),
}


@on_mesh()
def calls(mesh: Any) -> None:
    warnings.simplefilter("ignore")
    for name, call in CALLS.items():
        names = call.__code__.co_varnames[: call.__code__.co_argcount]
        compared(mesh, name, call, names)


@on_mesh()
def without_the_summand(mesh: Any) -> None:
    """``beta=0`` ignores the first operand, NaN too, and gives it a gradient of zeros."""
    for name, sizes in SUMMANDS.items():
        for value in (1.0, float("nan")):
            plain = [randn(*size, seed=i) for i, size in enumerate(sizes)]
            plain[0].fill_(value)
            placed = [shard(x, mesh, Shard(0)).requires_grad_() for x in plain]
            for x in plain:
                x.requires_grad_()
            found = [getattr(torch, name)(*given, beta=0) for given in (plain, placed)]
            for y in found:
                y.square().sum().backward()
            close(found[1], found[0], name)
            for x, y in zip(placed, plain, strict=True):
                close(x.grad, y.grad, f"gradient of {name}")
            with torch.no_grad():
                close(getattr(torch, name)(*placed, beta=0), found[0], f"{name} without gradients")


def test_beta_of_zero(pool: Any) -> None:
    pool.run(3, without_the_summand)


@on_mesh()
def writes(mesh: Any) -> None:
    for name, call in WRITES.items():
        names = call.__code__.co_varnames[: call.__code__.co_argcount]

        def on_a_copy(_call: Callable[..., Any] = call, _names: tuple = names, **given: Any) -> Any:
            return _call(**{**given, _names[0]: given[_names[0]] * 1.0})

        compared(mesh, name, on_a_copy, names)


@on_mesh()
def refused(mesh: Any) -> None:
    for name, call in REFUSED.items():
        x = operands()["x"]
        with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)):
            call(x)
        for placement in (Replicate(), Shard(0)):
            with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)):
                call(shard(x, mesh, placement))
                raise AssertionError(name)


@on_mesh()
def nothing_is_gathered(mesh: Any) -> None:
    """Values added along a sharded index are a partial sum; batches stay sharded."""
    x, i = operands()["x"], operands()["i"][:, 0]
    with strict():
        y = shard(torch.zeros(4, 6, device=device()), mesh, Replicate()).index_add(
            0, shard(i, mesh, Shard(0)), shard(x, mesh, Shard(0))
        )
        assert y.placements == (Partial(),)
        z = torch.linalg.svdvals(distribute_tensor(torch.ones(6, 2, 3, device=device()), mesh, [Shard(0)]))
        assert isinstance(z, DTensor) and z.placements == (Shard(0),)
    close(y, torch.zeros(4, 6, device=device()).index_add(0, i, x))


@pytest.mark.parametrize("job", [calls, writes, refused, nothing_is_gathered], ids=lambda job: job.__name__)
def test_on_two_ranks(pool: Any, job: Any) -> None:
    pool.run(2, job)


def test_out_of_several() -> None:
    x = distribute_tensor(operands()["x"], init_device_mesh(None, (1,)), [Shard(0)])
    out = torch.empty_like(x), torch.zeros_like(x).long()
    values, places = torch.sort(x, out=out)
    assert values is out[0] and places is out[1]
    close(values, operands()["x"].sort().values)
    with pytest.raises(TypeError, match="needs one tensor for each result, got 1"):
        torch.sort(x, out=(out[0],))


@pytest.mark.parametrize("function", [torch.diff, torch.kron, torch.Tensor.cumsum_, torch.linalg.inv])
def test_what_has_a_rule_gets_no_other(function: Any) -> None:
    with pytest.raises(ValueError, match="rule"):
        register_sharding(function, lambda shapes, static_args: None)
