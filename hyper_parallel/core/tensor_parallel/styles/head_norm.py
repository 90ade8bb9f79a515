"""`HeadNormParallel`: norms inside attention heads."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.core.tensor_parallel.program.convert import to_placement
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, check_flag


class HeadNormParallel(ModuleStyle):
    """Run a norm over the last dimension on sharded attention heads, such as the q_norm and k_norm of a model.

    The weight of the norm is replicated, and each rank normalises its local heads. The gradients of the weight are
    reduced over the mesh automatically. `parallelize_module` applies this style to norms next to projections that the
    plan shards by heads.

    Args:
        use_local_output: return the output as a plain local tensor, as projections do by default.

    Example:
        >>> from hyper_parallel import HeadNormParallel
        >>> HeadNormParallel()
        HeadNormParallel(use_local_output=True)

    Source: ``ReplicatedWithGradAllReduce`` of Hugging Face transformers.
    """

    input_layouts = (Shard(-2),)
    output_layouts = None
    whole_dims: int = 1
    compares_input = False
    has_program = True

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = check_flag(use_local_output, "use_local_output", type(self).__name__)

    def prepare_input(self, module: Any, x: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        # The last dimension of a plain input is unsharded. The norm gives the same result whichever other dimension is
        # sharded, and for shards of any size. So ranks do not compare the sizes of their shards.
        usual = given = self.input_layouts[i]
        if FOLLOWING:
            whole = mesh.platform.normalized_dims(module) or self.whole_dims
            given = FOLLOWING[-1].cut_of(x, mesh, whole, usual) or usual
        return to_placement(x, mesh, given, None, what)
