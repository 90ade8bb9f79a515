"""`NoParallel`."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.core.tensor_parallel.base import ModuleStyle, check_flag
from hyper_parallel.core.tensor_parallel.compiled import describe
from hyper_parallel.core.tensor_parallel.convert import as_single
from hyper_parallel.platform.contract import CompiledForward


class NoParallel(ModuleStyle):
    """Replicate a module and all below it on the mesh, with the layouts of input and output explicit.

    For what every rank computes alike, such as the router of experts, between modules that are sharded: its parameters
    are distributed tensors as theirs are, so that one optimizer step and one gradient norm cover all.

    Args:
        input_layout: placement of a plain first input; default ``Replicate()``. It is gathered where it is sharded.
        output_layout: placement of the output; default ``Replicate()``.
        use_local_output: give the output as a plain local tensor.

    Raises:
        TypeError: when a layout is no placement. ValueError: for more than one.

    Example:
        >>> from hyper_parallel import NoParallel
        >>> NoParallel()
        NoParallel(input_layout=Replicate(), output_layout=Replicate(), use_local_output=True)

    Source: ``torchtitan.distributed.NoParallel``.
    """

    desired_input_layouts = (Replicate(),)

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        output_layout: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        self.input_layout = as_single(input_layout, "input_layout", name) or Replicate()
        self.output_layout = as_single(output_layout, "output_layout", name) or Replicate()
        self.input_layouts, self.output_layouts = (self.input_layout,), (self.output_layout,)
        self.use_local_output = check_flag(use_local_output, "use_local_output", name)

    def compiled_forward(self, module: Any, mesh: DeviceMesh) -> CompiledForward | None:
        return describe(self, module, mesh, "alike")
