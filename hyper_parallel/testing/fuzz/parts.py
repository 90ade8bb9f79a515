"""Each rank's local array of a tensor. Summands differ much and have either sign, so that a wrong rule changes
results."""

from __future__ import annotations

from typing import Any

import numpy as np

from hyper_parallel.core.layouts.layout import Layout

__all__ = ["gradient_part", "local_part"]


def local_part(x: np.ndarray, layout: Layout, seed: int) -> np.ndarray:
    """Return this rank's local array of a tensor with value ``x``; ``seed`` is the same on every rank."""
    mine = x
    for mesh_dim, placement in enumerate(layout.placements):
        if not placement.is_partial():
            continue
        size, rng = layout.mesh.shape[mesh_dim], np.random.default_rng((seed, mesh_dim))
        at = layout.mesh.get_local_rank(mesh_dim)
        op = _op(placement)
        if op in ("sum", "avg"):
            parts = rng.standard_normal((size, *x.shape)) * 2 + np.arange(size).reshape(-1, *[1] * x.ndim) - 1
            parts = parts.astype(x.dtype)
            parts[-1] = mine * x.dtype.type(size if op == "avg" else 1) - parts[:-1].sum(0)
            mine = parts[at]
        else:
            away = (1 + rng.random((size, *x.shape))).astype(x.dtype) * (-1 if op == "max" else 1)
            mine = np.where(_owner(x, layout, mesh_dim, seed) == at, mine, mine + away[at])
    return np.ascontiguousarray(mine[layout.local_index()]).reshape(layout.local_shape)


def gradient_part(g: np.ndarray, layout: Layout, seed: int) -> np.ndarray:
    """Return this rank's gradient of `local_part`, from the gradient of the full tensor."""
    for mesh_dim, placement in enumerate(layout.placements):
        if placement.is_partial("avg"):
            g = (g / layout.mesh.shape[mesh_dim]).astype(g.dtype)
        elif placement.is_partial() and _op(placement) in ("max", "min"):
            at = layout.mesh.get_local_rank(mesh_dim)
            g = np.where(_owner(g, layout, mesh_dim, seed) == at, g, 0).astype(g.dtype)
    return g[layout.local_index()].reshape(layout.local_shape)


def _op(placement: Any) -> str:
    return placement.reduce_op


def _owner(x: np.ndarray, layout: Layout, mesh_dim: int, seed: int) -> np.ndarray:
    """Return for each element the rank of the mesh dimension that has the extreme value."""
    return np.random.default_rng((seed, 7, mesh_dim)).integers(0, layout.mesh.shape[mesh_dim], x.shape)
