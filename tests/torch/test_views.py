"""Writes through views on torch: with gradients, by methods that only torch has, and where people meet them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.extent import on_ranks
from tests.torch.support import device

View = Callable[[torch.Tensor], torch.Tensor]
VIEWS: dict[str, View] = {
    "int": lambda y: y[0],
    "slice": lambda y: y[:2],
    "step": lambda y: y[1:5:2],
    "narrow": lambda y: y.narrow(0, 1, 3),
    "select": lambda y: y.select(0, 3),
    "view": lambda y: y.view(-1),
    "reshape": lambda y: y.reshape(3, 10),
    "flatten": lambda y: y.flatten(),
    "unflatten": lambda y: y.unflatten(0, (2, 3)),
    "view_as": lambda y: y.view_as(torch.empty(5, 6, dtype=y.dtype)),
    "t": lambda y: y.t(),
    "copy of t": lambda y: y.t().contiguous(),
    "flat copy of t": lambda y: y.t().reshape(-1),
    "int, slice": lambda y: y[0][1:3],
    "slice, slice, t": lambda y: y[:4][1:3].t(),
    "column": lambda y: y[:, 1],
    "squeeze": lambda y: y[2:3].squeeze(0),
    "unsqueeze": lambda y: y.unsqueeze(0)[0, 1],
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda v: v.mul_(3),
    "fill_": lambda v: v.fill_(1.5),
    "copy_": lambda v: v.copy_(v.detach() * 2),
    "setitem": lambda v: v.__setitem__(slice(0, 1), 2.0),
    "foreach": lambda v: torch._foreach_mul_([v], 2.0),
}


def run(x: torch.Tensor, view: View, write: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    """Values of the base and of the view after the write, and the gradient."""
    y = x * 2
    v = view(y)
    write(v)
    results = [y * 3, v * 5]
    if x.requires_grad:
        sum((r**2).sum() for r in results).backward()
        results.append(x.grad)
    return [r.full_tensor() if isinstance(r, DTensor) else r for r in results]


@spmd.on_mesh()
def compare(mesh: Any, shape: tuple[int, ...], placement: Any, requires_grad: bool) -> None:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device())
    for name, view in VIEWS.items():
        for how, write in WRITES.items():
            if how == "foreach" and requires_grad and device().type == "npu":
                continue  # simulated NPUs do not tell views, of plain tensors either, that their base has a new history
            plain = values.clone().requires_grad_(requires_grad)
            expected = run(plain, view, write)
            x = distribute_tensor(values, mesh, [placement]).requires_grad_(requires_grad)
            for got, wanted in zip(run(x, view, write), expected, strict=True):
                assert torch.allclose(got, wanted), f"{name}, {how}, {placement}"


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@on_ranks(1, 2, 4)
def test_values_and_gradients(pool: Any, world_size: int, placement: Any, requires_grad: bool) -> None:
    pool.run(world_size, compare, (6, 5), placement, requires_grad)


@spmd.on_mesh()
def write_parts(mesh: Any) -> None:
    """Several views of one call, which torch itself refuses to write to while it records gradients."""
    for take in (
        lambda y: y.chunk(3),
        lambda y: y.split([1, 3, 2]),
        lambda y: y.unbind(0),
    ):
        values = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device())
        x = distribute_tensor(values, mesh, [Shard(1)])
        for part in take(x):
            part.mul_(2)
        assert torch.equal(x.full_tensor(), values * 2)
    x = distribute_tensor(values, mesh, [Shard(0)])
    for row in x.unbind(0):
        row.mul_(2)
    assert torch.equal(x.full_tensor(), values * 2)


@on_ranks(1, 2, 4)
def test_parts(pool: Any, world_size: int) -> None:
    pool.run(world_size, write_parts)


@spmd.on_mesh()
def read_memory(mesh: Any) -> None:
    """`as_strided` reads the elements of a single device, or refuses; no placement gives other elements."""
    values = torch.arange(24.0, device=device()).reshape(4, 6)
    calls: list[Any] = [
        lambda x: x.as_strided((6,), (1,)),
        lambda x: torch.as_strided(x[1:], (4,), (2,)),
        lambda x: x.clone().as_strided((3, 2), (2, 1), 5),
        lambda x: torch.as_strided_copy(x, (6,), (1,)),
        lambda x: torch.as_strided_scatter(x, x[0, :3], (3,), (2,)),
    ]
    # Tensors that a single device has in another order in memory, or in a part of another tensor's.
    refused: list[Any] = [
        lambda x: x.t().as_strided((6,), (1,)),
        lambda x: (x.t() * 2).as_strided((6,), (1,)),
        lambda x: x[1:].as_strided((4,), (1,), 0),
    ]
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(values, mesh, [placement])
        for call in calls:
            assert torch.equal(call(x).full_tensor(), call(values))
        for call in refused:
            if placement.is_replicate():
                assert torch.equal(call(x).full_tensor(), call(values))
            else:
                with pytest.raises(ValueError, match=r"start of the storage|memory by strides"):
                    call(x)

    with pytest.raises(ValueError, match="as_strided_scatter got a plain tensor"):
        torch.as_strided_scatter(values, distribute_tensor(values[0], mesh, [Shard(0)]), (6,), (1,))


@on_ranks(2, 4)
def test_places_in_memory(pool: Any, world_size: int) -> None:
    pool.run(world_size, read_memory)


@spmd.on_mesh()
def refuse(mesh: Any) -> None:
    """Views whose write cannot change the base tensor, and views that are out of date."""
    x = distribute_tensor(torch.ones(6, 5, device=device()), mesh, [Shard(0)])
    for view in (lambda x: x.diagonal(), lambda x: x.as_strided((2, 2), (5, 1)), lambda x: x.unfold(0, 2, 2)):
        with pytest.raises(ValueError, match="the write cannot change the base tensor"):
            view(x).mul_(2)
        view(x).clone().mul_(2)
    x.tensor_split(3)[1].mul_(2)
    torch.testing.assert_close(x.full_tensor()[:, 0].cpu(), torch.tensor([1.0, 1.0, 2.0, 2.0, 1.0, 1.0]))
    row = x[0]
    torch._foreach_mul_([x], 2.0)
    with pytest.raises(ValueError, match="make the view again"):
        row.sum()
    row = x[0]
    nn.init.normal_(x)
    with pytest.raises(ValueError, match="make the view again"):
        _ = row.shape
    assert x[0].shape == (5,)


@on_ranks(2, 4)
def test_refusals(pool: Any, world_size: int) -> None:
    pool.run(world_size, refuse)


# ---------------------------------------------------------------------------- writes that torch's own code makes
def _step(make: Callable[..., Any], **options: Any) -> Callable[[Any], tuple]:
    def step(base: Any) -> tuple:
        p = nn.Parameter(base)
        view = p.data[0]
        (p * p).sum().backward()
        make([p], 0.1, **options).step()
        return p.detach(), view

    return step


def _on_gradient(write: Callable[[Any], Any]) -> Callable[[Any], tuple]:
    def run(base: Any) -> tuple:
        p = nn.Parameter(base)
        (p * p).sum().backward()
        view = p.grad[0]
        write(p)
        return p.grad, view

    return run


def _unscale(p: Any) -> None:
    found, scale = (torch.full((1,), value, device=device()) for value in (0.0, 2.0))
    torch._amp_foreach_non_finite_check_and_unscale_([p.grad], found, scale)


def _row_of(base: Any) -> tuple:
    row = base[0].requires_grad_()
    (row * row).sum().backward()
    torch.optim.SGD([row], 0.1).step()
    return base, row.detach()


def _gradient_is_row(base: Any) -> tuple:
    p = nn.Parameter(base[0].detach().clone())
    p.grad = base[1]
    nn.utils.clip_grad_value_([p], 1.5)
    return base, p.grad


def _then(write: Callable[[Any, Any, Any], Any]) -> Callable[[Any], tuple]:
    """Return a function that gives ``write`` a tensor, a row of it and another tensor."""

    def run(base: Any) -> tuple:
        row, other = base[0], base * 2
        write(base, row, other)
        return base, other, row

    return run


#: name -> function of a tensor that writes to it and returns tensors that share memory on a single device.
HIDDEN_WRITES: dict[str, Callable[[Any], tuple]] = {
    "SGD": _step(torch.optim.SGD),
    "Adam": _step(torch.optim.Adam),
    "Adam of lists": _step(torch.optim.Adam, foreach=True),
    "Adam one by one": _step(torch.optim.Adam, foreach=False),
    "zero_grad": _on_gradient(lambda p: torch.optim.SGD([p]).zero_grad(set_to_none=False)),
    "second backward": _on_gradient(lambda p: (p * p).sum().backward()),
    "clip_grad_norm_": _on_gradient(lambda p: nn.utils.clip_grad_norm_([p], 0.1)),
    "clip_grad_value_": _on_gradient(lambda p: nn.utils.clip_grad_value_([p], 0.1)),
    "clip_grads_with_norm_": _on_gradient(
        lambda p: nn.utils.clip_grads_with_norm_([p], 0.1, torch.tensor(9.0, device=device()))
    ),
    "unscale": _on_gradient(_unscale),
    "row as parameter": _row_of,
    "row as gradient": _gradient_is_row,
    "copy_ of plain": _then(lambda x, row, y: x.copy_(torch.ones(x.shape, device=device()))),
    "copy_ of plain into row": _then(lambda x, row, y: row.copy_(torch.ones(row.shape, device=device()))),
    "eye_": _then(lambda x, row, y: nn.init.eye_(x)),
    "t_": _then(lambda x, row, y: x.t_()),
    "unsqueeze_ of row": _then(lambda x, row, y: row.unsqueeze_(0).add_(1)),
    "unsqueeze_, write to base": _then(lambda x, row, y: (row.unsqueeze_(0), x.add_(1))),
    "set_": _then(lambda x, row, y: (x.set_(y), x[1].add_(1))),
    "data": _then(lambda x, row, y: (setattr(x, "data", y), y.add_(1))),
    "data of itself": _then(lambda x, row, y: (setattr(x, "data", x), row.add_(1))),
    "data, row before": _then(lambda x, row, y: (z := y[1], setattr(x, "data", y), z.add_(1))),
}


@spmd.on_mesh()
def write_in_hidden_ways(mesh: Any) -> None:
    for name, call in HIDDEN_WRITES.items():
        values = torch.arange(12.0, device=device()).reshape(4, 3) + 1
        expected = [x.clone() for x in call(values.clone())]
        for placement in Shard(0), Shard(1):
            *results, view = call(distribute_tensor(values.clone(), mesh, [placement]))
            for got, wanted in zip(results, expected, strict=False):
                assert torch.allclose(got.full_tensor(), wanted), f"{name}, {placement}"
            moved = mesh.size() > 1 and placement == Shard(0)
            if moved and "_out_of_date" in view.__dict__:
                assert name not in ("row as parameter", "row as gradient", "data of itself", "unsqueeze_ of row"), name
                with pytest.raises(ValueError, match="make the view again"):
                    view.full_tensor()
            else:
                assert torch.allclose(view.full_tensor(), expected[-1]), f"{name}, {placement}"


@spmd.on_mesh()
def refuse_hidden_writes(mesh: Any) -> None:
    """A write to a view that cannot reach its base. One call that writes to a view and its base."""
    x = distribute_tensor(torch.ones(4, 4, device=device()), mesh, [Shard(0)])
    diagonal, row = x.diagonal().requires_grad_(), x[0].requires_grad_()
    for parameters, message in (([diagonal], "cannot change the base tensor"), ([x, row], "writes to a tensor and to")):
        for p in parameters:
            p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match=message):
            torch.optim.SGD(parameters, 0.1).step()
    diagonal = x.diagonal()
    p = nn.Parameter(torch.ones_like(diagonal))
    p.grad = diagonal
    with pytest.raises(ValueError, match="cannot change the base tensor"):
        nn.utils.clip_grad_value_([p], 0.5)


@on_ranks(1, 2, 4, gate=(2,))
def test_hidden_writes(pool: Any, world_size: int) -> None:
    pool.run(world_size, write_in_hidden_ways)
    if world_size > 1:
        pool.run(world_size, refuse_hidden_writes)


@spmd.on_mesh()
def pick(mesh: Any) -> None:
    """0-d tensors and NumPy's numbers in an index select as ints do, and give views."""
    plain, one = torch.arange(24.0, device=device()).reshape(4, 3, 2), torch.tensor(1, device=device())
    indices: dict[str, Any] = {
        "tensor": one,
        "short": one.to(torch.int8),
        "two": (one, one),
        "with a slice": (one, slice(0, 2)),
        "behind": (slice(None), one),
        "number": np.int64(1),
        "array": np.array(1),
        "truth": np.bool_(True),
        "mask": torch.tensor(True, device=device()),
        "byte": torch.tensor(1, dtype=torch.uint8, device=device()),
    }
    for placement in Shard(0), Shard(1):
        for name, index in indices.items():
            expected, x = plain.clone(), distribute_tensor(plain.clone(), mesh, [placement])
            for tensor in expected, x:
                tensor[index].mul_(3)
            assert torch.equal(x.full_tensor(), expected), f"{name}, {placement}"
        distributed = DTensor.from_local(one.clone(), mesh, [Replicate()])
        x[distributed].zero_()
        assert not x.full_tensor()[1].any()


@pytest.mark.filterwarnings("ignore:In future, it will be an error")
@on_ranks(1, 2, gate=(2,))
def test_picks(pool: Any, world_size: int) -> None:
    pool.run(world_size, pick)


# ---------------------------------------------------------------------------- order in memory, and the tensor itself
def _loaded(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


#: name -> function that returns a new tensor with the memory order of its operand, or the operand.
ALIKE: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "load": _loaded,
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "copy": copy.copy,
    "dropout": lambda x: nn.functional.dropout(x, 0.0),
    "dropout of evaluation": lambda x: nn.functional.dropout(x, 0.5, training=False),
}


@spmd.on_mesh()
def keep_order(mesh: Any) -> None:
    """The order in memory is the single device's. All ranks answer the same, also with one row."""
    values = torch.arange(2.0 * mesh.size(), device=device()).reshape(mesh.size(), 2) + 1
    for placement in Shard(0), Shard(1), Replicate():
        for name, make in ALIKE.items():
            bases = values.clone(), distribute_tensor(values.clone(), mesh, [placement])
            made = []
            for base in bases:
                torch.manual_seed(0)
                x = make(base.t())
                answers = x.stride(), x.is_contiguous(), x.t().is_contiguous()
                answers += (x[None, None].is_contiguous(memory_format=torch.channels_last),)
                x.contiguous().add_(1)
                made.append((answers, base, x))
            (expected, *plain), (got, *distributed) = made
            assert got == expected, f"{name}, {placement}"
            for x, y in zip(plain, distributed, strict=True):
                assert torch.equal(y.full_tensor(), x), f"{name}, {placement}"
    x = distribute_tensor(values.clone(), mesh, [Shard(0)])
    row = x[0]
    copy.copy(x).add_(1)
    if mesh.size() > 1:
        with pytest.raises(ValueError, match="make the view again"):
            row.sum()


@on_ranks(1, 2, 4, gate=(2,))
def test_memory_order(pool: Any, world_size: int) -> None:
    pool.run(world_size, keep_order)


@spmd.on_mesh()
def heads(mesh: Any) -> None:
    """One head a rank: transposed heads are contiguous there, and a copy must be made all the same."""
    h = torch.randn(2, 3, mesh.size(), 2, generator=torch.Generator().manual_seed(0)).to(device())
    x = distribute_tensor(h, mesh, [Shard(2)])
    y = x.transpose(1, 2).contiguous().mul_(2)
    assert torch.equal(x.full_tensor(), h)
    assert torch.equal(y.full_tensor(), h.transpose(1, 2) * 2)


@on_ranks(2, 4)
def test_heads(pool: Any, world_size: int) -> None:
    pool.run(world_size, heads)


# ---------------------------------------------------------------------------- where people meet them
@spmd.on_mesh()
def embeddings(mesh: Any) -> None:
    """`reset_parameters`, and the code of every ``_init_weights`` of Hugging Face, leave the padding row 0."""
    for pad in range(10):
        torch.manual_seed(0)
        plain = nn.Embedding(10, 4, padding_idx=pad, device=device())
        model = nn.Sequential(nn.Embedding(10, 4, padding_idx=pad, device=device()))
        parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
        for module in plain, model[0]:
            torch.manual_seed(1)
            module.reset_parameters()
        assert torch.equal(model[0].weight.full_tensor(), plain.weight)
        for module in plain, model[0]:
            torch.manual_seed(2)
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[module.padding_idx].zero_()
        assert torch.equal(model[0].weight.full_tensor(), plain.weight)
        assert not plain.weight[pad].any()
        assert plain.weight[pad - 1].any()


@spmd.on_mesh()
def orthogonal(mesh: Any, placement: Any) -> None:
    plain = torch.empty(8, 3, 2, dtype=torch.float64, device=device())
    x = distribute_tensor(torch.zeros(8, 3, 2, dtype=torch.float64, device=device()), mesh, [placement])
    for tensor in plain, x:
        torch.manual_seed(2)
        nn.init.orthogonal_(tensor)
    assert torch.allclose(x.full_tensor(), plain)


@on_ranks(1, 2, 4)
def test_initialisation(pool: Any, world_size: int) -> None:
    pool.run(world_size, embeddings)
    for placement in Shard(0), Shard(1), Shard(2), Replicate():
        pool.run(world_size, orthogonal, placement)


@spmd.on_mesh()
def partial(mesh: Any) -> None:
    """A view of partial sums is one of partial sums: linear writes are allowed."""
    local = torch.arange(12.0, device=device()).view(4, 3) + mesh.get_local_rank()
    x = DTensor.from_local(local.clone(), mesh, [Partial()])
    before = x.full_tensor().clone()
    x[1].mul_(2)
    before[1] *= 2
    assert torch.allclose(x.full_tensor(), before)


@on_ranks(1, 2, 4)
def test_partial_sums(pool: Any, world_size: int) -> None:
    pool.run(world_size, partial)
