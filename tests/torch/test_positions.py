"""Operations of norms on the stand-in for a DTensor in compiled code, called outside of the compiler. Each gives this
rank's part of the single device's result, or leaves it to eager mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel import Replicate, distribute_tensor
from hyper_parallel.platform.torch.compiled.placed import plain
from hyper_parallel.platform.torch.compiled.positions import class_of, is_placed, trace_positions
from hyper_parallel.testing import spmd
from tests.torch.support import device


def placed(x: torch.Tensor, mesh: Any, cut: int | None) -> Any:
    own = x if cut is None else x.chunk(mesh.size(), cut)[mesh.get_local_rank()]
    return own.contiguous().as_subclass(class_of(id(mesh), mesh.size(), cut))


@spmd.on_mesh()
def positions(mesh: Any) -> None:
    x = torch.linspace(-1, 1, 6 * 4 * 5, device=device()).view(6, 4, 5)
    distribute_tensor(x, mesh, [Replicate()])  # which binds the platform
    weight = torch.linspace(1, 2, 5, device=device())
    calls: list[tuple[Any, Any, Any]] = [
        (torch.add, (x, x), {}),
        (torch.mul, (x, 2.0), {}),
        (torch.rsqrt, (x.abs() + 1,), {}),
        (torch.mul, (x, weight), {}),
        (torch.mean, (x, -1), {"keepdim": True}),
        (torch.mean, (x, (1, 2)), {}),
        (torch.sum, (x,), {"dim": -1, "dtype": torch.float64}),
        (F.layer_norm, (x, (5,), weight), {"eps": 1e-5}),
    ]
    for func, args, kwargs in calls:
        wanted = func(*args, **kwargs)
        for cut in (None, 0):
            given = tuple(
                placed(a, mesh, cut if a.ndim == 3 else None) if isinstance(a, torch.Tensor) else a for a in args
            )
            got = trace_positions(func, given, kwargs)
            assert is_placed(got), (func, cut)
            assert torch.allclose(plain(got), plain(placed(wanted, mesh, cut))), (func, cut)
    a = placed(x, mesh, 0)
    for func, args in (
        (torch.matmul, (a, a)),
        (torch.add, (a, x)),
        (torch.add, (a, placed(x, mesh, 1))),
        (torch.mean, (a, 0)),
        (torch.mean, (a, None)),
        (F.layer_norm, (a, (6, 4, 5))),
        (F.layer_norm, (a, (5,), weight)),
        (torch.mul, (a, placed(x[:, :1], mesh, None))),
    ):
        assert trace_positions(func, args, {}) is None, func


def test_positions(pool: Any) -> None:
    pool.run(2, positions)
