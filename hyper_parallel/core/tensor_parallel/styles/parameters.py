"""`ParameterParallel`: parameters that belong to no linear layer, such as the stacked weights of experts."""

from __future__ import annotations

from hyper_parallel.core.layouts.placement_types import Placement, Replicate, own_placement
from hyper_parallel.core.tensor_parallel.program.convert import Slots, as_slots, check_placement
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, check_flag


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
