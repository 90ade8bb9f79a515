"""Methods and operators that the DTensor class defines itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hyper_parallel import Shard
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, full, shard


class Seen(TorchFunctionMode):
    """Notes the called functions."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


@on_mesh()
def methods(mesh: Any) -> None:
    plain = torch.arange(6.0 * mesh.size(), device=device()).reshape(2 * mesh.size(), 3)
    x = shard(plain, mesh, Shard(0))
    with Seen() as seen:
        y = x.transpose(0, 1) + 1
    assert torch.Tensor.transpose in seen.functions and len(seen.functions) > 1, (
        "modes see the functions called on a DTensor"
    )
    close(full(y), plain.T + 1, "under a mode")
    close(full(x.sum(dim=(0, 1))), plain.sum(), "a keyword")
    with pytest.raises(IndexError, match=r"transpose\(0, 7\) is out of range"):
        x.transpose(0, 7)
    assert type(x).view.__doc__ == torch.Tensor.view.__doc__


@on_ranks(1, 3)
def test_methods(pool: Any, world_size: int) -> None:
    pool.run(world_size, methods)
