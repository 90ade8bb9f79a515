"""`ParameterParallel`: parameters that belong to no linear layer, such as the stacked weights of experts."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.core.tensor_parallel.base import ModuleStyle
from hyper_parallel.core.tensor_parallel.convert import as_slots, check_placement, leave, place

__all__ = ["ParameterParallel"]


class ParameterParallel(ModuleStyle):
    """Shard parameters that a module holds by name; the module computes with distributed tensors.

    The forward of the module stays as it is: its operations on the parameters and the inputs bring the communication
    that their placements need. Parameters that are not named are replicated.

    Args:
        placements: placement of each parameter, by its name in the module.
        input_layouts: placement of each plain positional input, None for one that stays as it is; a single placement is
            for the first input. Inputs beyond pass through untouched.
        output_layouts: placement wanted for the output, or for each of several outputs, None for one that stays.
        use_local_output: give plain local tensors.

    Raises:
        TypeError: when a placement is none. ValueError: for no parameter; when applied, for a name that the module does
            not have and a placement that does not fit; when the module is called with fewer inputs than there are
            layouts.

    Example:
        >>> from hyper_parallel import PackedShard, ParameterParallel, Shard
        >>> experts = ParameterParallel({"gate_up": PackedShard(2, 2), "down": Shard(1)})
        >>> experts.placements["down"]
        Shard(dim=1)

    Source: the tensor-parallel experts of torchtitan and Hugging Face transformers.
    """

    def __init__(
        self,
        placements: dict[str, Placement],
        *,
        input_layouts: Placement | tuple[Placement | None, ...] = Replicate(),  # noqa: B008 - interned and immutable
        output_layouts: Placement | tuple[Placement | None, ...] = Replicate(),  # noqa: B008
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        self.placements = dict(placements)
        if not self.placements:
            raise ValueError(f"{name} needs the placement of at least one parameter")
        for key, placement in self.placements.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} takes names of parameters, got {key!r}")
            check_placement(placement, f"placements[{key!r}]", name)
        self.input_layouts = as_slots(input_layouts, "input_layouts", name)
        self.output_layouts = as_slots(output_layouts, "output_layouts", name)
        self.use_local_output = use_local_output

    def parameter_placements(self, module: Any, mesh: DeviceMesh) -> dict[str, Placement]:
        return self.placements

    def _before(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        name, layouts = type(module).__name__, self.input_layouts
        if len(layouts) == 1 and (layout := layouts[0]) is not None:
            what = f"the input of {name}"
            return self._on_first_input(args, kwargs, lambda x: place(x, mesh, layout, layout, what), name)
        if len(args) < len(layouts):
            raise ValueError(
                f"{name} was called with {len(args)} positional input(s), {type(self).__name__} has {len(layouts)} "
                "input_layouts: give the rest positionally"
            )
        placed = [
            x if layout is None else place(x, mesh, layout, layout, f"input {i} of {name}")
            for i, (x, layout) in enumerate(zip(args, layouts, strict=False))
        ]
        return (*placed, *args[len(placed) :]), kwargs

    def _after(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        if len(outputs) != len(self.output_layouts):
            raise ValueError(
                f"{type(module).__name__} returned {len(outputs)} output(s), {type(self).__name__} has "
                f"{len(self.output_layouts)} output_layouts: give one for each output, None for one that stays as it is"
            )
        new = [
            y
            if layout is None
            else leave(y, mesh, layout, self.use_local_output, f"output {i} of {type(module).__name__}")
            for i, (y, layout) in enumerate(zip(outputs, self.output_layouts, strict=True))
        ]
        return type(output)(new) if isinstance(output, (tuple, list)) else new[0]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.placements}, input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )
