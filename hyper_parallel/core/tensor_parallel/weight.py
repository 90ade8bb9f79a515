"""`ColwiseParallel` and `RowwiseParallel`: they differ in which dimension of the weight is sharded."""

from __future__ import annotations

from typing import Any, ClassVar

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.base import ModuleStyle
from hyper_parallel.core.tensor_parallel.convert import as_slots, leave, place
from hyper_parallel.platform import Platform

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class _WeightParallel(ModuleStyle):
    """What `ColwiseParallel` and `RowwiseParallel` share."""

    #: Per kind of module: placements of weight and bias.
    _linear: ClassVar[tuple[Placement, Placement]]
    _embedding: ClassVar[Placement]
    #: Default layouts, and what a linear and an embedding module need as input.
    _default_input: ClassVar[Placement]
    _default_output: ClassVar[Placement]
    _needed_by_linear: ClassVar[Placement]
    _needed_by_embedding: ClassVar[Placement] = Replicate()

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        slots = as_slots(input_layouts, "input_layouts", name), as_slots(output_layouts, "output_layouts", name)
        for keyword, value in zip(("input_layouts", "output_layouts"), slots, strict=True):
            if len(value) != 1:
                raise ValueError(f"{name}({keyword}=...) takes one placement, got {len(value)}")
        self.input_layouts: tuple[Placement] = (slots[0][0] or self._default_input,)
        self.output_layouts: tuple[Placement] = (slots[1][0] or self._default_output,)
        self.use_local_output = use_local_output

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
        platform = device_mesh.platform
        if not (platform.is_linear_module(module) or platform.is_embedding_module(module)):
            raise ValueError(
                f"{type(self).__name__} parallelises linear and embedding modules, {where!r} is a "
                f"{type(module).__name__}: name its linear layers in the plan, or use PrepareModuleInput, "
                "PrepareModuleOutput or SequenceParallel for the module itself"
            )

    def parameter_placements(self, module: Any, platform: Platform) -> dict[str, Placement]:
        weight, bias = platform.weight_name(module), platform.bias_name(module)
        if platform.is_embedding_module(module):
            return {weight: self._embedding}
        return {weight: self._linear[0]} if bias is None else {weight: self._linear[0], bias: self._linear[1]}

    def _before(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        platform = mesh.platform
        linear = platform.is_linear_module(module)
        needed = self._needed_by_linear if linear else self._needed_by_embedding
        layout = self.input_layouts[0]

        def convert(x: Any) -> Any:
            size = None
            if linear and isinstance(layout, Shard) and layout.dim in (-1, len(x.shape) - 1):
                # The weight knows the number of features, so uneven shards of them need no word from the user.
                size = getattr(module, platform.weight_name(module)).shape[1]
            return place(x, mesh, layout, needed, f"the input of {type(module).__name__}", size)

        return self._on_first_input(args, kwargs, convert, type(module).__name__)

    def _after(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        return leave(
            output, mesh, self.output_layouts[0], self.use_local_output, f"the output of {type(module).__name__}"
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_WeightParallel):
    """Shard the output features of a linear module, or the features of an embedding.

    Weight (out, in) and bias (out,) of a linear module are sharded on ``out``, weight (vocabulary, features) of an
    embedding on ``features``. No communication in forward, one all-reduce of the input's gradient in backward.

    Args:
        input_layouts: placement of a plain input; default ``Replicate()``. A DTensor brings its own.
        output_layouts: placement of the output; default ``Shard(-1)``.
        use_local_output: give the output as a plain local tensor.

    Raises:
        TypeError: when a layout is no placement. ValueError: for more than one.

    Example:
        >>> from hyper_parallel import ColwiseParallel, Replicate
        >>> ColwiseParallel(output_layouts=Replicate()).output_layouts
        (Replicate(),)

    Source: ``torch.distributed.tensor.parallel.ColwiseParallel``; Megatron-LM (Shoeybi et al. 2019).
    """

    _linear = (Shard(0), Shard(0))
    _embedding = Shard(1)
    _default_input = Replicate()
    _default_output = Shard(-1)
    _needed_by_linear = Replicate()


class RowwiseParallel(_WeightParallel):
    """Shard the input features of a linear module, or the vocabulary of an embedding.

    Weight (out, in) of a linear module is sharded on ``in``, its bias replicated; weight (vocabulary, features) of an
    embedding on ``vocabulary``. Each rank computes a summand of the output: one all-reduce in forward (or a
    reduce-scatter, with a sharded ``output_layouts``), none in backward.

    Args:
        input_layouts: placement of a plain input; default ``Shard(-1)``. A DTensor brings its own.
        output_layouts: placement of the output; default ``Replicate()``.
        use_local_output: give the output as a plain local tensor.

    Raises:
        TypeError: when a layout is no placement. ValueError: for more than one.

    Example:
        >>> from hyper_parallel import RowwiseParallel, Shard
        >>> RowwiseParallel(output_layouts=Shard(1)).input_layouts
        (Shard(dim=-1),)

    Source: ``torch.distributed.tensor.parallel.RowwiseParallel``; Megatron-LM (Shoeybi et al. 2019).
    """

    _linear = (Shard(1), Replicate())
    _embedding = Shard(0)
    _default_input = Shard(-1)
    _default_output = Replicate()
    _needed_by_linear = Shard(-1)
