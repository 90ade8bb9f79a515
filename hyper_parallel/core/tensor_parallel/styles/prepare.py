"""Styles that redistribute the inputs and outputs of a module, and leave its parameters alone."""

from __future__ import annotations

from functools import partial
from typing import Any

from hyper_parallel.core.dtensor.tensor import dtensor_class
from hyper_parallel.core.layouts.placement_types import Placement, Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.calls import hook_of_style
from hyper_parallel.core.tensor_parallel.program.convert import (
    Slots,
    as_named,
    as_pairs,
    convert_outputs,
    to_known_placement,
    to_output,
    to_placement,
    too_few_inputs,
)
from hyper_parallel.core.tensor_parallel.program.distributed_batches import OtherMeshError, convert_part
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label
from hyper_parallel.core.tensor_parallel.program.programs import conversions_of
from hyper_parallel.core.tensor_parallel.program.same_inputs import compare_input
from hyper_parallel.core.tensor_parallel.program.uneven_shards import COMPARED
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle, check_flag, mark_applied

_WHOLE = Replicate()


class PrepareModuleInput(ParallelStyle):
    """Redistribute the inputs of a module before its forward.

    Each input is redistributed once, so the layers inside the module share its collective.

    Args:
        input_layouts: placement of each plain positional input; None leaves an input unchanged.
        desired_input_layouts: placement that the module needs for each positional input.
        input_kwarg_layouts: placements of plain keyword inputs, by name. Other keyword inputs are unchanged.
        desired_input_kwarg_layouts: placements that the module needs for the same keyword inputs.
        use_local_output: pass plain local tensors to the module.

    Raises:
        TypeError: for a layout that is not a placement.
        ValueError: at construction, if layouts and desired layouts are for different inputs. When the module is called,
            for fewer positional inputs than layouts.

    Example:
        >>> from hyper_parallel import PrepareModuleInput, Replicate, Shard
        >>> style = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
        >>> style.desired_input_layouts
        (Replicate(), None)

    Source: ``torch.distributed.tensor.parallel.PrepareModuleInput``.
    """

    along_one_dimension = True

    def __init__(
        self,
        *,
        input_layouts: Placement | Slots | None = None,
        desired_input_layouts: Placement | Slots | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        name = type(self).__name__
        self.input_layouts, self.desired_input_layouts = as_pairs(
            () if input_layouts is None else input_layouts,
            () if desired_input_layouts is None else desired_input_layouts,
            "input_layouts",
            name,
        )
        self.input_kwarg_layouts = as_named(input_kwarg_layouts, "input_kwarg_layouts", name)
        self.desired_input_kwarg_layouts = as_named(desired_input_kwarg_layouts, "desired_input_kwarg_layouts", name)
        self.use_local_output = check_flag(use_local_output, "use_local_output", name)
        if set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
            raise ValueError(
                f"{name}: input_kwarg_layouts names {sorted(self.input_kwarg_layouts)} and "
                f"desired_input_kwarg_layouts {sorted(self.desired_input_kwarg_layouts)}: both must name the same "
                "inputs"
            )
        given: dict[Any, Placement | None] = dict(enumerate(self.input_layouts)) | self.input_kwarg_layouts
        desired: dict[Any, Placement | None] = (
            dict(enumerate(self.desired_input_layouts)) | self.desired_input_kwarg_layouts
        )
        #: (index or name, layout, desired layout) of each input with a layout.
        self._slots = tuple((key, layout, desired[key]) for key, layout in given.items() if layout is not None)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        distributed = dtensor_class(device_mesh.platform)

        before = hook_of_style(partial(self._before, device_mesh, distributed))
        how = conversions_of(self._slots, device_mesh, len(self.input_layouts), self.use_local_output, of_outputs=False)
        before = device_mesh.platform.compiled_hook(before, how)
        device_mesh.platform.register_forward_pre_hook(module, before, with_kwargs=True)
        mark_applied(module, self, device_mesh)
        return module

    def _before(
        self, mesh: DeviceMesh, distributed: type, module: Any, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        if len(args) < len(self.input_layouts):
            raise too_few_inputs(module, args, self.input_layouts, self)
        positional, named = list(args), dict(kwargs)
        for key, layout, desired in self._slots:
            inputs: Any = positional if isinstance(key, int) else named
            x = named.get(key) if inputs is named else inputs[key]
            if x is None:
                continue
            # Fast path through the cached target layout: this hook runs in front of most collectives of a model.
            y = to_known_placement(x, mesh, desired) if type(x) is distributed else None
            if y is None:
                what = f"input {key!r} of {module_label(module)}"
                if layout is _WHOLE and not isinstance(x, distributed) and what not in vars(module).get(COMPARED, ()):
                    compare_input(x, mesh, what, module)
                try:
                    y = to_placement(x, mesh, layout, desired, what, taker=module)
                except OtherMeshError as error:
                    local = self.use_local_output
                    inputs[key] = _prepared_beside(x, mesh, layout, desired, what, module, local, error)
                    continue
            inputs[key] = to_output(y, mesh, None, True, "") if self.use_local_output else y
        return tuple(positional), named


class PrepareModuleOutput(ParallelStyle):
    """Redistribute the outputs of a module for the code that follows.

    Args:
        output_layouts: placement of each plain output; None leaves an output unchanged.
        desired_output_layouts: desired placement of each output.
        use_local_output: return plain local tensors.

    Raises:
        TypeError: for a layout that is not a placement.
        ValueError: at construction, if the numbers of layouts and desired layouts differ. When the module is called,
            if the numbers of outputs and layouts differ.

    Example:
        >>> from hyper_parallel import PrepareModuleOutput, Replicate, Shard
        >>> PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()).output_layouts
        (Shard(dim=-1),)

    Source: ``torch.distributed.tensor.parallel.PrepareModuleOutput``.
    """

    along_one_dimension = True

    def __init__(
        self,
        *,
        output_layouts: Placement | Slots,
        desired_output_layouts: Placement | Slots,
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        self.output_layouts, self.desired_output_layouts = as_pairs(
            output_layouts, desired_output_layouts, "output_layouts", name
        )
        self.use_local_output = check_flag(use_local_output, "use_local_output", name)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        slots = [
            (i, given, self.desired_output_layouts[i])
            for i, given in enumerate(self.output_layouts)
            if given is not None
        ]
        how = conversions_of(slots, device_mesh, len(self.output_layouts), self.use_local_output, of_outputs=True)
        after = device_mesh.platform.compiled_hook(hook_of_style(partial(self._after, device_mesh)), how)
        device_mesh.platform.register_forward_hook(module, after)
        mark_applied(module, self, device_mesh)
        return module

    def _after(self, mesh: DeviceMesh, module: Any, args: tuple, output: Any) -> Any:
        return convert_outputs(module, output, self.output_layouts, self._prepare, self, mesh)

    def _prepare(self, module: Any, y: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        given, desired = self.output_layouts[i], self.desired_output_layouts[i]
        try:
            placed = to_placement(y, mesh, given, desired, what, taker=module)
        except OtherMeshError as error:
            return _prepared_beside(y, mesh, given, desired, what, module, self.use_local_output, error)
        return to_output(placed, mesh, None, self.use_local_output, what)


class PrepareModuleInputOutput(ParallelStyle):
    """Redistribute the inputs and the outputs of a module: `PrepareModuleInput` and `PrepareModuleOutput` in one style.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: as for
            `PrepareModuleInput`.
        use_local_input: pass plain local tensors to the module.
        output_layouts, desired_output_layouts, use_local_output: as for `PrepareModuleOutput`.

    Raises:
        TypeError, ValueError: as the two styles do.

    Example:
        >>> from hyper_parallel import PrepareModuleInputOutput, Replicate, Shard
        >>> style = PrepareModuleInputOutput(
        ...     input_layouts=Shard(1), desired_input_layouts=Replicate(),
        ...     output_layouts=Replicate(), desired_output_layouts=Shard(1),
        ... )
        >>> style.prepare_module_input.use_local_output
        False

    Source: ``torch.distributed.tensor.parallel.PrepareModuleInputOutput``.
    """

    along_one_dimension = True

    def __init__(
        self,
        *,
        input_layouts: Placement | Slots | None = None,
        desired_input_layouts: Placement | Slots | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | Slots,
        desired_output_layouts: Placement | Slots,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
        # The representation of a style shows the attributes named as its arguments.
        vars(self).update(vars(self.prepare_module_input), use_local_input=use_local_input)
        vars(self).update(vars(self.prepare_module_output))

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        self.prepare_module_input.check(module, device_mesh, where)
        self.prepare_module_output.check(module, device_mesh, where)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        self.prepare_module_input._apply(module, device_mesh)
        self.prepare_module_output._apply(module, device_mesh)
        return module


def _prepared_beside(
    x: Any,
    mesh: DeviceMesh,
    given: Placement | None,
    desired: Placement | None,
    what: str,
    taker: Any,
    local: bool,
    error: OtherMeshError,
) -> Any:
    """Redistribute an input or output along ``mesh``, and keep its placements on the other mesh dimensions.

    Args:
        x: DTensor on other mesh dimensions than the one of ``mesh``, and possibly on ``mesh`` too.
        mesh, given, desired, what, taker: as for `to_placement`.
        local: return a DTensor on the other mesh dimensions only, whose local tensor is the local tensor on ``mesh``.
        error: the error to raise for a DTensor that has no layout of this kind.
    """
    return convert_part(
        x,
        mesh,
        lambda part: to_placement(part, mesh, given, desired, what, taker=taker),
        (lambda y: to_output(y, mesh, None, True, what)) if local else None,
        what,
        error,
    )
