"""`LatentKeyParallel`: style of the projection to latent keys and values in DeepSeek's attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.calls import hook_of_style
from hyper_parallel.core.tensor_parallel.program.convert import read_by_parts
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle, mark_applied

__all__ = ["LatentKeyParallel"]


class LatentKeyParallel(ParallelStyle):
    """Reduce the gradient of the rotary part of a latent key, which all heads read.

    The projection is replicated on every rank. The latent part of its output goes to a column-wise projection, which
    reduces the gradient of its input. The last features go directly to this rank's heads. So each rank computes a
    partial gradient of them, and backward has one all-reduce.

    Args:
        features: number of the last features.

    Source: ``MlaKvAProjParallel`` of Hugging Face transformers.
    """

    along_one_dimension = True

    def __init__(self, features: int) -> None:
        self.features = features

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        device_mesh.platform.register_forward_hook(module, hook_of_style(partial(self._after, device_mesh)))
        mark_applied(module, self, device_mesh)
        return module

    def _after(self, mesh: DeviceMesh, module: Any, args: tuple, output: Any) -> Any:
        return read_by_parts(output, mesh, self.features)
