"""`HeadNormParallel`: norms inside attention heads."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Shard
from hyper_parallel.core.tensor_parallel.base import ModuleStyle, check_flag, title
from hyper_parallel.core.tensor_parallel.convert import leave, place

__all__ = ["HeadNormParallel"]


class HeadNormParallel(ModuleStyle):
    """Run a norm over the last dimension on attention heads that are sharded: the q_norm and k_norm of a model.

    Its weight is replicated, each rank normalises its own heads, and the gradients of the weight are reduced over the
    mesh without any user code. `parallelize_module` gives it to such norms itself where it finds them: next to
    projections that the plan shards by heads.

    Args:
        use_local_output: give a plain local tensor, as the projections do by default.

    Example:
        >>> from hyper_parallel import HeadNormParallel
        >>> HeadNormParallel()
        HeadNormParallel(use_local_output=True)

    Source: ``ReplicatedWithGradAllReduce`` of Hugging Face transformers.
    """

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = check_flag(use_local_output, "use_local_output", type(self).__name__)

    def _before(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        what = f"the input of {title(module)}"
        # A plain input is whole in the last dimension. Which of the others counts as the sharded one does not matter.
        return self._on_first_input(args, kwargs, lambda x: place(x, mesh, Shard(-2), None, what), title(module))

    def _after(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        return leave(output, mesh, None, self.use_local_output, f"the output of {title(module)}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(use_local_output={self.use_local_output})"
