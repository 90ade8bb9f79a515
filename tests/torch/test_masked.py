"""`torch.masked.std` and `torch.masked.var` of DTensors, with masks and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyper_parallel import CommDebugMode, Partial, Replicate, Shard, distribute_tensor, strict
from hyper_parallel.testing import spmd
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn

OPTIONS: list[dict[str, Any]] = [
    {},
    {"dim": 0},
    {"dim": -1, "keepdim": True, "unbiased": False},
    {"dim": (0, 1), "correction": 2},
]


def compare(mesh: Any, placements: list[Any], rows: int) -> None:
    whole = randn(rows, 6)
    seen = torch.arange(rows * 6, device=device()).reshape(rows, 6) % 5 > 0  # of each column and row two are seen
    of_mask: list[Any] = [Replicate() if p.is_partial() else p for p in placements]
    for function in (torch.masked.std, torch.masked.var):
        for options in OPTIONS:
            for mask in (None, seen):
                what = f"{function.__name__} of {rows} rows placed {placements}, {options}, mask {mask is not None}"
                x = whole.clone().requires_grad_()
                wanted = function(x, mask=mask, **options)
                weights = torch.linspace(1.0, 2.0, wanted.numel(), device=device()).reshape(tuple(wanted.shape))
                (wanted * weights).sum().backward()
                d = distribute_tensor(whole, mesh, placements).requires_grad_()
                with strict():
                    own = None if mask is None else distribute_tensor(mask, mesh, of_mask)
                    got = function(d, mask=own, **options)
                    (got * distribute_tensor(weights, mesh)).sum().backward()
                close(got, wanted, what)
                close(d.grad, x.grad, f"gradient of {what}")


@on_mesh()
def on_a_line(mesh: Any) -> None:
    for placements in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
        compare(mesh, placements, 5)
    compare(mesh, [Shard(0)], 3)  # the last rank of 4 has none


def on_a_grid() -> None:
    mesh = spmd.device_mesh(2, 2)
    compare(mesh, [Shard(0), Shard(1)], 5)
    compare(mesh, [Shard(0), Shard(0)], 3)


@on_mesh()
def collectives(mesh: Any) -> None:
    """Numbers of elements and sums: a rank's elements stay there."""
    d = distribute_tensor(torch.ones(8, 6, device=device()), mesh, [Shard(0)])
    with CommDebugMode() as comm, strict():
        torch.masked.var(d, dim=1)
    assert comm.get_total_counts() == 0
    with CommDebugMode() as comm, strict():
        torch.masked.var(d, dim=0)
    assert {str(kind).rsplit(".", 1)[-1] for kind, n in comm.get_comm_counts().items() if n} == {"all_reduce"}
    # Plain tensors are unchanged.
    x = randn(3, 4)
    close(torch.masked.std(x, dim=0), x.std(0), "plain tensors")


@pytest.mark.parametrize("job", [on_a_line, on_a_grid, collectives], ids=lambda job: job.__name__)
def test_on_four_ranks(pool: Any, job: Any) -> None:
    pool.run(4, job)
