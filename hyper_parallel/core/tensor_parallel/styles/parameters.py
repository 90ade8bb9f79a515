"""`ParameterParallel`: placements for parameters outside of linear layers, such as the stacked weights of experts."""

from __future__ import annotations

from hyper_parallel.core.layouts.placement_types import Placement, Replicate, own_placement
from hyper_parallel.core.tensor_parallel.program.convert import Slots, as_slots, check_placement
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, check_flag


class ParameterParallel(ModuleStyle):
    """Distribute parameters of a module by name, and run its forward on DTensors.

    The module's forward is unchanged. Its operations do the communication that the placements of parameters and inputs
    need. All other parameters of the module are replicated.

    Args:
        placements: placement of each parameter, by its name in the module.
        input_layouts: placement of each plain positional input; None leaves an input unchanged. A single placement is
            for the first input. Inputs beyond these are passed on unchanged.
        output_layouts: desired placement of the output, or of each output; None leaves an output unchanged.
        use_local_output: return outputs as plain local tensors.

    Raises:
        TypeError: for a placement that is not a `Placement`.
        ValueError: if ``placements`` is empty. When the style is applied, for an unknown parameter name, or a placement
            that does not fit the parameter. When the module is called, for fewer inputs than layouts.

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
        input_layouts: Placement | Slots = Replicate(),  # noqa: B008 - interned and immutable
        output_layouts: Placement | Slots = Replicate(),  # noqa: B008
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        self.placements = {key: own_placement(placement) for key, placement in placements.items()}
        if not self.placements:
            raise ValueError(f"{name} needs the placement of at least one parameter")
        for key, placement in self.placements.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} takes names of parameters, got {key!r}")
            check_placement(placement, f"placements[{key!r}]", name)
        self.input_layouts = self.desired_input_layouts = as_slots(input_layouts, "input_layouts", name)
        self.output_layouts = as_slots(output_layouts, "output_layouts", name)
        self.use_local_output = check_flag(use_local_output, "use_local_output", name)
