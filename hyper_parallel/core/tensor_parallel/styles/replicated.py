"""`NoParallel`: modules that are replicated between sharded modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.modes import implicit_replication
from hyper_parallel.core.tensor_parallel.program.convert import as_single, read_by_parts, to_output
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, check_flag
from hyper_parallel.core.tensor_parallel.styles.weight import linear_sizes
from hyper_parallel.core.trees import map_tensors, tensors_in
from hyper_parallel.platform.contract.programs import Program


class NoParallel(ModuleStyle):
    """Replicate a module and its submodules on the mesh, and declare the placements of its input and output.

    Use it for modules that every rank computes in full between sharded modules, such as an expert router. Its
    parameters become replicated DTensors. So one optimizer step and one gradient norm cover all parameters of the
    model.

    By default, the gradient of a plain output must be the same on all ranks. This holds if modules with styles read the
    output, or code that computes the same on all ranks. Code that has only this rank's heads or experts gives a partial
    gradient. Declare this with ``local_output_grad_placements`` or ``partial_features``; the style then sums the
    gradient over the ranks.

    A module may have several inputs and outputs, as recurrent layers and attention have. Further plain inputs, and
    tensors that the forward makes, count as equal on all ranks. If the first input is sharded, an operation of this
    input with a further plain input raises an error: pass DTensors.

    Args:
        input_layout: placement of a plain first input; default ``Replicate()``. A sharded input is all-gathered.
        output_layout: placement of the output, or of the first of several; default ``Replicate()``. Further outputs are
            replicated.
        use_local_output: return the output as a plain local tensor.
        local_output_grad_placements: placement of the gradient of a plain output; default ``(Replicate(),)``. Give
            ``(Partial(),)`` where the output is read by code that has only this rank's heads or experts.
        partial_features: number of last features of a plain output with a partial gradient; 0 for none. In attention
            with latent keys and values, these features are the rotary part of the keys.

    Raises:
        TypeError: for a layout that is not a placement, or a number that is not an int.
        ValueError: for more than one layout, another placement of the gradient, or both ``partial_features`` and
            ``local_output_grad_placements``. Also for a partial gradient of an output that is not plain and replicated.

    Example:
        >>> from hyper_parallel import NoParallel
        >>> NoParallel()
        NoParallel(input_layout=Replicate(), output_layout=Replicate(), use_local_output=True)
        >>> NoParallel(partial_features=64).partial_features
        64

    Source: ``torchtitan.distributed.NoParallel``.
    """

    desired_input_layouts = (Replicate(),)

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        output_layout: Placement | None = None,
        use_local_output: bool = True,
        local_output_grad_placements: Placement | Sequence[Placement] | None = None,
        partial_features: int | None = None,
    ) -> None:
        name = type(self).__name__
        self.input_layout = as_single(input_layout, "input_layout", name) or Replicate()
        self.output_layout = as_single(output_layout, "output_layout", name) or Replicate()
        self.input_layouts, self.output_layouts = (self.input_layout,), (self.output_layout,)
        self.use_local_output = check_flag(use_local_output, "use_local_output", name)
        self.local_output_grad_placements: tuple[Placement] | None = None
        self.partial_features = partial_features
        if local_output_grad_placements is not None:
            given: Any = as_single(local_output_grad_placements, "local_output_grad_placements", name)
            if given not in (Replicate(), Partial()):
                raise ValueError(
                    f"{name}(local_output_grad_placements=({given!r},)): use Replicate() for a gradient that is the "
                    "same on all ranks, and Partial() for a gradient that is summed over the ranks"
                )
            self.local_output_grad_placements = (given,)
        if partial_features is not None and (not isinstance(partial_features, int) or partial_features is True):
            raise TypeError(f"{name}(partial_features=...) takes a number of features, got {partial_features!r}")
        if partial_features is not None and (partial_features < 0 or local_output_grad_placements is not None):
            raise ValueError(
                f"{name}(partial_features={partial_features}): pass a number, at least 0, and leave "
                "local_output_grad_placements out. partial_features is about the last features, "
                "local_output_grad_placements about all features"
            )
        if self.partial_output_features and not (self.use_local_output and self.output_layout is Replicate()):
            raise ValueError(
                f"{name}: partial_features= and local_output_grad_placements= need output_layout=Replicate() and "
                f"use_local_output=True, got {self.output_layout!r} and {self.use_local_output!r}: leave them out"
            )

    @property
    def _says_how_it_is_read(self) -> bool:
        """Return whether the plan declares the placement of the gradient of a plain output."""
        return self.partial_features is not None or self.local_output_grad_placements is not None

    @property
    def partial_output_features(self) -> int:  # type: ignore[override]
        """Return the number of last features of a plain output whose gradients are partial; -1 for all."""
        return -1 if self.local_output_grad_placements == (Partial(),) else self.partial_features or 0

    def program(self, module: Any, mesh: DeviceMesh) -> Program | None:
        return super().program(module, mesh)

    def prepare_inputs(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        new, named = super().prepare_inputs(module, args, kwargs, mesh)
        first = args[0] if args else next(iter(kwargs.values()))
        whole = new[0] if args else next(iter(named.values()))
        # Self-attention is called with one tensor three times.
        same = tuple(whole if x is first else x for x in new)
        return same, {name: whole if x is first else x for name, x in named.items()}

    def prepare_outputs(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        if not isinstance(output, (tuple, list)) or not output:
            return super().prepare_outputs(module, output, mesh)
        platform, name = mesh.platform, module_label(module)

        def further(y: Any) -> Any:
            if not isinstance(y, DTensor):
                return y  # an input that is passed on
            y = to_output(y, mesh, Replicate(), self.use_local_output, f"an output of {name}")
            return read_by_parts(y, mesh) if self.partial_output_features < 0 else y

        def convert(i: int, y: Any) -> Any:
            if i == 0 and isinstance(y, DTensor):
                return self.prepare_output(module, y, 0, f"output 0 of {name}", mesh)
            return map_tensors(y, further, platform, lambda other: other)

        new = [convert(i, y) for i, y in enumerate(output)]
        return type(output)(*new) if hasattr(output, "_fields") else type(output)(new)

    def _new_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
        platform, is_whole = mesh.platform, self.input_layout is Replicate()

        def alike(module: Any, *args: Any, **kwargs: Any) -> Any:
            """Run the forward such that plain tensors count as equal on all ranks: initial states, masks, further
            inputs.
            """
            given = [] if is_whole else tensors_in((args, kwargs), platform)
            if any(not isinstance(x, DTensor) and len(x.shape) for x in given):
                return forward(module, *args, **kwargs)
            with implicit_replication():
                return forward(module, *args, **kwargs)

        return super()._new_forward(module, alike, mesh)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
        read = self.partial_output_features
        if read > 0 and device_mesh.platform.is_linear_module(module):
            features = linear_sizes(module, device_mesh.platform)[1]
            if read > features:
                raise ValueError(
                    f"{self!r} on {where!r}: the layer has {features} output features: correct partial_features={read}"
                )
