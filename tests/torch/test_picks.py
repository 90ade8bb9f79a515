"""Operations whose results have sizes that the data say, and indices into sharded dimensions. They are right for every
placement, with gradients, also where a rank has nothing. Rules alone serve them, with no message that carries a whole
operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import CommDebugMode, DTensor, Partial, Replicate, Shard, distribute_tensor, strict
from hyper_parallel.testing import spmd
from tests.torch.support import close, device, randn, shard

#: Calls of a tensor of floats ``x``, whole numbers ``i`` and a mask ``m`` of its shape, a mask of rows ``r`` and
#: numbers ``s``.
CHOSEN: dict[str, Callable[..., Any]] = {
    "masked_select": lambda x, m: x.masked_select(m),
    "masked_select by rows": lambda x, r: x.masked_select(r.unsqueeze(1)),
    "mask in brackets": lambda x, m: x[m],
    "rows in brackets": lambda x, r: x[r],
    "nothing": lambda x, m: x[m & ~m],
    "masked_scatter": lambda x, m, s: x.masked_scatter(m, s),
    "masked_scatter of columns": lambda x, m, s: x.masked_scatter(m[0], s),
    "masked_scatter_": lambda x, m, s: (x * 1).masked_scatter_(m, s),
    "nonzero": lambda i: i.nonzero(),
    "nonzero in three dimensions": lambda i: i.unsqueeze(1).nonzero(as_tuple=True)[2],
    "unique": lambda i: i.unique(),
    "unique, places": lambda i: i.unique(return_inverse=True)[1],
    "unique, counts": lambda i: i.unique(return_inverse=True, return_counts=True)[2],
    "unique rows": lambda i: torch.unique(i[:, :1], dim=0, return_inverse=True)[1],
    "consecutive": lambda i: i.unique_consecutive(return_inverse=True, return_counts=True)[1],
    "consecutive columns": lambda i: torch.unique_consecutive(i[:1], dim=1, return_counts=True)[1],
    "one_hot": lambda i: F.one_hot(i),
    "where a mask is assigned": lambda x, m, s: assigned(x, m, s[: int(m.sum())]),
    "where rows are assigned": lambda x, r, s: assigned(x, r, s[:6]),
    "where a mask of numbers is assigned": lambda x, m, s: assigned(x, m.to(torch.uint8), s[: int(m.sum())]),
}

#: Of ``x`` and ``s`` with small tensors of indices.
AT_PLACES: dict[str, Callable[..., Any]] = {
    "gather": lambda x, j: x.gather(0, j[:, None].expand(2, x.shape[1])[:1]),
    "gather of truth values": lambda x, j: (x > 0).gather(0, j[:1, None].expand(1, x.shape[1])),
    "index_select": lambda x, j: x.index_select(1, j),
    "index_put of rows": lambda x, j, s: x.index_put((j - 1,), s[:6]),
    "index_put of elements": lambda x, j, s: x.index_put((j, -1 - j), s[:2]),
    "index_put that adds": lambda x, j, s: x.index_put((j * 0, j[:, None] * 0 + j), s[:4].reshape(2, 2), True),
    "index_put through a mask": lambda x, r, s: x.index_put((r,), s[:6]),
    "rows taken": lambda x, j: x[j],
    "columns taken, from the end": lambda x, j: x[:, j - 3],
    "elements taken": lambda x, j: x[j, -1 - j],
    "a row taken twice": lambda x, j: x[j * 0],
    "blocks taken": lambda x, j: x[:2, None][j[:1], :, j[:, None] + 1],
    "a row taken by a number": lambda x, j: x[j[1]] * 2.0,
    "one element taken": lambda x, j: x[j[0], j],
    "whole numbers taken": lambda i, j: i[j],
    "truth values taken": lambda m, j: m[:, j],
    "columns at a mask": lambda x, m: x[:, m[0]],
    "rows at a mask of numbers": lambda x, r: x[r.to(torch.uint8)],
    "elements at a mask and places": lambda x, r, j: x[r, j[:1]],
    "columns assigned": lambda x, j, s: assigned(x, (slice(None), j - 1), s[0]),
    "a number assigned": lambda x, j: assigned(x, j, 3.0),
}


def assigned(x: Any, index: Any, value: Any) -> Any:
    x = x * 1.0
    x[index] = value
    return x


def operands(rows: int) -> dict[str, torch.Tensor]:
    whole = (torch.arange(rows * 6).reshape(rows, 6) * 7 % 5).to(device())
    return {
        "x": randn(rows, 6),
        "i": whole % 3,
        "m": whole > 2,
        "r": whole[:, 1] > 1,
        "s": randn(rows * 6, seed=1),
        "j": torch.tensor([1, 0], device=device()),
    }


def with_gradients(call: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, list[Any]]:
    leaves = [x.requires_grad_() for x in given.values() if x.is_floating_point()]
    y = call(**given)
    if y.requires_grad:
        weights = torch.linspace(-1.0, 2.0, y.numel(), device=device()).reshape(tuple(y.shape))
        weighted = y * (distribute_tensor(weights, y.device_mesh) if isinstance(y, DTensor) else weights)
        weighted.square().sum().backward()
    return y, [x.grad for x in leaves]


def compare(mesh: Any, placements: tuple, rows: int, calls: dict[str, Callable[..., Any]]) -> None:
    for name, call in calls.items():
        names = call.__code__.co_varnames[: call.__code__.co_argcount]
        given = {n: x for n, x in operands(rows).items() if n in names}
        wanted, gradients = with_gradients(call, {n: x.clone() for n, x in given.items()})
        distributed = {n: distribute_tensor(x, mesh, placed(n, placements)) for n, x in given.items()}
        what = f"{name} of {rows} rows placed {placements}"
        with strict():
            got, found = with_gradients(call, distributed)
        close(got.float(), wanted.float(), what)
        for mine, theirs in zip(found, gradients, strict=True):
            assert (mine is None) == (theirs is None), what
            if mine is not None:
                close(mine, theirs, f"gradient of {what}")


def placed(name: str, placements: tuple) -> list[Any]:
    """The first operand's placements, where dimensions exist and sums are possible; otherwise whole."""
    whole: Any = Replicate()
    if name in ("s", "j") or (name == "r" and Shard(1) in placements):
        return [whole] * len(placements)
    return [whole if p.is_partial() and name != "x" else p for p in placements]


def right() -> None:
    line, grid = spmd.device_mesh(4), spmd.device_mesh(2, 2)
    for mesh, placements in ((line, (Shard(0),)), (grid, (Shard(1), Shard(0)))):
        compare(mesh, placements, 5, {**CHOSEN, **AT_PLACES})
    few = (
        "masked_select",
        "masked_scatter of columns",
        "index_put of rows",
        "gather",
        "nonzero",
        "rows taken",
        "elements taken",
    )
    for mesh, placements, rows in (
        (line, (Shard(1),), 5),
        (grid, (Shard(0), Shard(0)), 5),
        (grid, (Partial(), Shard(0)), 5),
        (line, (Shard(0),), 2),
    ):
        compare(mesh, placements, rows, {name: {**CHOSEN, **AT_PLACES}[name] for name in few})


def messages() -> None:
    """Each call sends only the messages and bytes that it needs."""
    mesh = spmd.device_mesh(4)
    x, mask = torch.ones(64, 8, device=device()), torch.zeros(64, 8, dtype=torch.bool, device=device())
    mask[3, 1] = mask[40, 5] = mask[41, 6] = True
    row, rows = (distribute_tensor(t, mesh) for t in (x[0], torch.tensor([1, 50], device=device())))
    for placement, counts in ((Shard(0), 8), (Shard(1), 64 * 8)):
        d, m = shard(x, mesh, placement), shard(mask, mesh, placement)
        for number, (call, most, count) in enumerate(
            (
                (lambda d, m: d[m], counts + 2 * 4, 2),
                (lambda d, m: m.nonzero(), counts + 2 * 16, 2),
                (lambda d, m: d.masked_scatter(m, row), counts, 1),
                (lambda d, m: d.unique(return_counts=True), 8 + 4 + 8, 3),
                (lambda d, m: F.one_hot(d.long()), 8, 1),
                (lambda d, m: d.index_put((rows,), row), 0, 0),
                (lambda d, m: d[rows], 0, 0),
                (lambda d, m: d[rows, -1 - rows[:1]], 0, 0),
                (lambda d, m: d[rows[0]], 8 * 4, placement is Shard(0)),  # as d[1], which is a view
            )
        ):
            with CommDebugMode() as comm, strict():
                call(d, m)
            what = f"call {number} of a tensor placed {placement}: {comm.get_bytes()}"
            assert comm.get_total_counts() == count, what
            assert sum(comm.get_bytes().values()) <= most, what


def refused() -> None:
    """Refused on all ranks, whichever rank has the data."""
    mesh = spmd.device_mesh(4)
    x = distribute_tensor(torch.zeros(6, 4, device=device()), mesh, [Shard(0)])
    mask = distribute_tensor(torch.arange(24, device=device()).reshape(6, 4) > 3, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="the mask selects 20 elements, but the source has 8"):
        x.masked_scatter(mask, distribute_tensor(torch.zeros(2, 4, device=device()), mesh))
    if device().type == "cuda":
        return  # there torch ends the process: "device-side assert triggered"
    far = distribute_tensor(torch.tensor([6], device=device()), mesh)
    for call in (lambda: x.index_put((far,), x.sum()), lambda: x.gather(0, far.reshape(1, 1)), lambda: x[-1 - far]):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            call()


@pytest.mark.parametrize("job", [right, messages, refused], ids=lambda job: job.__name__)
def test_on_four_ranks(pool: Any, job: Any) -> None:
    pool.run(4, job)
