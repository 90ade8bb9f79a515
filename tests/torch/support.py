"""Helpers that the torch tests share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from hyper_parallel import DTensor, distribute_tensor, get_platform

T = TypeVar("T")


def of_release(values: Mapping[str, T]) -> T:
    """Take the value for the installed torch, of values by the release since when they hold: the newest not newer."""

    def number(release: str) -> tuple[int, ...]:
        return tuple(int(part) for part in release.split(".")[:2])

    return values[max((since for since in values if number(since) <= number(torch.__version__)), key=number)]


def device() -> torch.device:
    """The device of this rank, of the backend under test."""
    return get_platform().device()  # type: ignore[attr-defined]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def full(x: Any) -> torch.Tensor:
    """The whole tensor, detached, of a plain or distributed one."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def shard(x: torch.Tensor, mesh: Any, *placements: Any) -> Any:
    """Distribute a tensor that every rank has."""
    return distribute_tensor(x, mesh, list(placements))


def close(got: Any, wanted: Any, what: str = "", tolerance: float = 1e-5) -> None:
    """Compare whole tensors."""
    got, wanted = full(got).cpu(), full(wanted).cpu()
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")
