"""Marks of plain tensors in a followed program, for the tests of each framework."""

from __future__ import annotations

from typing import Any

from hyper_parallel import DTensor, Shard
from hyper_parallel.core.plain_code.marks import held

__all__ = ["part", "placed", "ways"]


def part(x: Any, dim: int, mesh: Any) -> Any:
    """A plain tensor that a followed program knows as a shard of dimension ``dim``."""
    return DTensor.from_local(x, mesh, [Shard(dim)]).to_local()


def ways(x: Any) -> Any:
    """The marks of a plain tensor, or None without any."""
    found = held(x)
    return None if found is None else found.ways


def placed(x: Any) -> list[Any]:
    """The placements in the marks of a plain tensor."""
    return [mark.layout.placements for mark in ways(x)]
