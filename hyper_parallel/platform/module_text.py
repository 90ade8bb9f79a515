"""Additions to the text of a parallelised module: its styles, and the placements of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.platform.contract.modules import APPLIED

__all__ = ["text_of_plan"]


def text_of_plan(module: Any, own: Mapping[str, Any], usual: str) -> str:
    """Return the module's own text ``usual``, followed by its styles and the placements of its ``own`` parameters."""
    parts = [usual, *(str(style) for style, _ in vars(module).get(APPLIED, ()))]
    for name, x in own.items():
        layout = getattr(x, "_layout", None)
        if layout is not None:
            dims = layout.mesh.mesh_dim_names or range(layout.mesh.ndim)
            placed = ", ".join(
                f"{placement!r} on {dim}".replace("dim=", "")
                for placement, dim in zip(layout.placements, dims, strict=True)
            )
            parts.append(f"{name}: {placed}")
    return ", ".join(filter(None, parts))
