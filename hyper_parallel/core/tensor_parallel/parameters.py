"""`ParameterParallel`: parameters that belong to no linear layer, such as the stacked weights of experts."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.core.tensor_parallel.base import ModuleStyle, check_flag, title
from hyper_parallel.core.tensor_parallel.convert import (
    as_slots,
    check_placement,
    convert_inputs,
    convert_outputs,
    leave,
    place,
)

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
        self.use_local_output = check_flag(use_local_output, "use_local_output", type(self).__name__)

    def parameter_placements(self, module: Any, mesh: DeviceMesh) -> dict[str, Placement]:
        return self.placements

    def _before(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        name, layouts = title(module), self.input_layouts
        if len(layouts) == 1 and (layout := layouts[0]) is not None:
            what = f"the input of {name}"
            return self._on_first_input(
                args, kwargs, lambda x: place(x, mesh, layout, layout, what, taker=module), name
            )
        new = convert_inputs(
            args,
            layouts,
            lambda x, i: place(x, mesh, layouts[i], layouts[i], f"input {i} of {name}", taker=module),
            module,
            type(self).__name__,
        )
        return new, kwargs

    def _after(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        return convert_outputs(
            output,
            self.output_layouts,
            lambda y, i, what: leave(y, mesh, self.output_layouts[i], self.use_local_output, what),
            module,
            type(self).__name__,
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.placements}, input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )
