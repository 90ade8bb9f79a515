"""`ColwiseParallel`: the column-parallel layer of Megatron (Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.layouts.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.convert import to_output
from hyper_parallel.core.tensor_parallel.program.heads import local_heads
from hyper_parallel.core.tensor_parallel.styles.weight import WeightParallel
from hyper_parallel.platform.contract.programs import Program


class ColwiseParallel(WeightParallel):
    """Shard the output features of a linear module, or the features of an embedding.

    The weight (out, in) and bias (out,) of a linear module are sharded on ``out``. The weight (vocabulary, features)
    of an embedding is sharded on ``features``. With the default layouts forward does not communicate. Backward of a
    linear module has one all-reduce of the input's gradient.

    Args:
        input_layouts: placement of a plain input; default ``Replicate()``. A DTensor input has its own placement.
        output_layouts: placement of the output; default ``Shard(-1)``.
        use_local_output: return the output as a plain local tensor.
        packed: for a weight that stacks several matrices (query, key and value; gate and up). Give the output features
            of each matrix, or the number of matrices if they have equal sizes. Each matrix is sharded separately, and
            ``Shard(-1)`` as ``output_layouts`` means `PackedShard`. After ``split`` or ``chunk`` each tensor is
            ``Shard(-1)``. ``packed=1`` declares one matrix where the shape suggests several. An example is a weight
            whose query, key and value alternate head by head: consecutive features belong together.
        heads: number of attention heads in the output features. The style checks that every rank gets complete heads.
            For a packed weight give a tuple with a number for each matrix; it implies ``packed``.
        replicate_heads: for keys and values with fewer heads than ranks. Every rank has the full weight. A local output
            is the one head that this rank's query heads use, and ``ranks / heads`` ranks share a head.

    Raises:
        TypeError: for a layout that is not a placement, or a number that is not an int.
        ValueError: for more than one layout, or numbers that contradict each other. When the style is applied, for
            heads that the ranks cannot share evenly.

    Example:
        >>> from hyper_parallel import ColwiseParallel, Replicate
        >>> ColwiseParallel(output_layouts=Replicate()).output_layouts
        (Replicate(),)

    Source: ``torch.distributed.tensor.parallel.ColwiseParallel``; Megatron-LM (Shoeybi et al. 2019).
    """

    _splits_outputs = True
    #: Whether the cotangent of the module's input is partial: each rank computes a summand.
    reads_for_parts = True
    _embedding = Shard(1)
    input_layouts = desired_input_layouts = (Replicate(),)
    output_layouts = (Shard(-1),)

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        packed: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
        replicate_heads: bool = False,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            packed=packed,
            heads=heads,
        )
        if replicate_heads and not isinstance(self.heads, int):
            raise ValueError(f"ColwiseParallel(replicate_heads=True) needs the number of heads, got heads={heads!r}")
        if replicate_heads:
            self.replicate_heads = replicate_heads

    def prepare_output(self, module: Any, y: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        desired: Placement | None = self.output_layouts[0]
        if desired is Shard(-1):
            whole = self._keeps_whole(mesh)
            if whole and self.use_local_output:
                return local_heads(y, self.heads, mesh)
            desired = None if whole or self._is_packed else desired
        return to_output(y, mesh, desired, self.use_local_output, what)

    def program(self, module: Any, mesh: DeviceMesh) -> Program | None:
        return None if self._keeps_whole(mesh) else super().program(module, mesh)
