"""Comparisons that the suite shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.testing.summands import summands

TOLERANCE = 2e-5


def same(got: Any, wanted: Any, what: str, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless the arrays agree: norm of the difference against the norm of what is wanted.

    Values are of order one throughout the suite: where a part of a result is zero, rounding is measured against 0.01.
    """
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, wanted {wanted.shape}"
    if wanted.size == 0:
        return
    scale = max(float(np.linalg.norm(wanted.astype(np.float64))), 0.01 * wanted.size**0.5)
    error = float(np.linalg.norm(got.astype(np.float64) - wanted.astype(np.float64))) / scale
    assert error <= tolerance, f"{what}: relative error {error:.2e}\ngot\n{got}\nwanted\n{wanted}"


def needs_gradients() -> None:
    """Skip a test on a platform that does not say how a program differentiates."""
    if type(get_platform()).differentiate is Platform.differentiate:
        pytest.skip("this platform does not differentiate by itself")


def local_parts(x: np.ndarray, layout: Any, rng: np.random.Generator) -> np.ndarray:
    """This rank's local array of a tensor with value ``x``: for `Partial`, summands that differ per rank.

    ``rng`` must be in the same state on every rank.
    """
    mesh = layout.mesh
    mine = x
    for mesh_dim, placement in enumerate(layout.placements):
        if placement.is_partial("sum"):
            mine = summands(mine, mesh.shape[mesh_dim], rng)[mesh.get_coordinate()[mesh_dim]]
        elif placement.is_partial():
            raise ValueError(f"no summands for {placement}")
    # Summands are drawn for the whole tensor, so that ranks that hold the same part draw the same.
    return np.ascontiguousarray(mine[layout.local_index()])
