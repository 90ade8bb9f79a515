"""The log line that says which change was made to a model."""

from __future__ import annotations

import logging
import math
from typing import Any

from hyper_parallel.core.dtensor.undistributed import held_tensors
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform.logs import LOG

__all__ = ["announce"]


def announce(what: str, module: Any, mesh: DeviceMesh) -> None:
    """Log that something was done to a model: ``what``, the platform, the mesh, and how much of the model this rank
    holds now. The first rank of the mesh at level INFO, the others at DEBUG, and a dry run not at all. Nothing is
    counted where the log level is off."""
    platform = mesh.platform
    level = logging.DEBUG if any(mesh.get_coordinate() or ()) else logging.INFO
    if not LOG.isEnabledFor(level) or platform.sends_nothing:
        return
    root = mesh.get_root_mesh()
    of = "" if root is mesh else f" of {_sizes(root)}"
    held = whole = 0
    for _, _, x in held_tensors(module, platform):
        held += math.prod(platform.shape_of(x)) * x.itemsize
        whole += math.prod(tuple(x.shape)) * x.itemsize
    LOG.log(
        level,
        "%s on %s (%s), mesh %s%s: %s of %s MB of parameters and buffers on this rank",
        *(what, platform.name, platform.comm_backend, _sizes(mesh), of, f"{held / 1e6:,.4g}", f"{whole / 1e6:,.4g}"),
    )


def _sizes(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return " x ".join(f"{name}={size}" if name else str(size) for name, size in zip(names, mesh.shape, strict=True))
