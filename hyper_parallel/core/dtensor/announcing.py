"""Log line that reports a change of a model, such as an applied plan."""

from __future__ import annotations

import logging
import math
from typing import Any

from hyper_parallel.core.dtensor.undistributed import held_tensors
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform.logs import LOG

__all__ = ["announce"]


def announce(what: str, module: Any, mesh: DeviceMesh) -> None:
    """Log that a model was changed.

    The line contains ``what``, the platform, the mesh, and this rank's share of the parameters and buffers. The first
    rank of the mesh logs at level INFO, and the others at DEBUG. A dry run does not log. If the level is off, the
    function costs nothing.
    """
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
