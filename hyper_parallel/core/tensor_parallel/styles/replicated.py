"""`NoParallel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.core.tensor_parallel.program.compiled import describe
from hyper_parallel.core.tensor_parallel.program.convert import as_single
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, check_flag
from hyper_parallel.core.tensor_parallel.styles.weight import linear_sizes
from hyper_parallel.platform.contract import CompiledForward


class NoParallel(ModuleStyle):
    """Replicate a module and all below it on the mesh, with the layouts of input and output explicit.

    It is for modules that every rank computes in the same way between sharded modules, such as an expert router. Its
    parameters are distributed tensors as theirs are, so that one optimizer step and one gradient norm cover all.

    A plain output must be read in the same way on all ranks, or by modules with styles. Code that has only some heads
    or experts may read it. Then each rank computes a part of its gradient, and the style must be told, to sum the
    parts.

    Args:
        input_layout: placement of a plain first input; default ``Replicate()``. It is gathered where it is sharded.
        output_layout: placement of the output; default ``Replicate()``.
        use_local_output: give the output as a plain local tensor.
        local_output_grad_placements: placement of the gradient that comes back to a plain output, ``(Partial(),)``
            where code that has some heads or experts only reads it; default ``(Replicate(),)``.
        partial_features: the same for the last so many features of a plain output alone, as the rotary part of the keys
            in attention with latent keys and values; 0 says that there are none.

    Raises:
        TypeError: when a layout is no placement, or a number no int. ValueError: for more than one, other placements of
            the gradient, both ways to say how the output is read, or an output that is not plain and whole.

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
                    f"{name}(local_output_grad_placements=({given!r},)): the gradient of an output that all ranks "
                    "have is the same on all, Replicate(), or the sum of the ranks' parts, Partial()"
                )
            self.local_output_grad_placements = (given,)
        if partial_features is not None and (not isinstance(partial_features, int) or partial_features is True):
            raise TypeError(f"{name}(partial_features=...) takes a number of features, got {partial_features!r}")
        if partial_features is not None and (partial_features < 0 or local_output_grad_placements is not None):
            raise ValueError(
                f"{name}(partial_features={partial_features}): give a number from 0, and leave "
                "local_output_grad_placements out. partial_features says it for the last features alone, "
                "local_output_grad_placements for all of them"
            )
        if self._summed and not (self.use_local_output and self.output_layout is Replicate()):
            raise ValueError(
                f"{name}: how a plain output is read can be said of one that all ranks have whole, "
                f"output_layout=Replicate() and use_local_output=True, got {self.output_layout!r} and "
                f"{self.use_local_output!r}: leave out partial_features= and local_output_grad_placements="
            )

    @property
    def _says_how_it_is_read(self) -> bool:
        """Return whether the plan says how code between the layers reads the output."""
        return self.partial_features is not None or self.local_output_grad_placements is not None

    @property
    def _summed(self) -> int:
        """Return the number of last features over which the gradient is summed, -1 for all."""
        return -1 if self.local_output_grad_placements == (Partial(),) else self.partial_features or 0

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
        if self._summed > 0 and device_mesh.platform.is_linear_module(module):
            features = linear_sizes(module, device_mesh.platform)[1]
            if self._summed > features:
                raise ValueError(
                    f"{self!r} on {where!r}, which gives {features} features: correct partial_features={self._summed}"
                )

    def prepare_output(self, module: Any, y: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        given = super().prepare_output(module, y, i, what, mesh)
        return read_by_parts(given, mesh, self._summed) if self._summed else given

    def compiled_forward(self, module: Any, mesh: DeviceMesh) -> CompiledForward | None:
        return describe(self, module, mesh, "alike", partial_features=self._summed)


def read_by_parts(y: Any, mesh: DeviceMesh, features: int = -1) -> Any:
    """A plain tensor that is the same on all ranks of a 1-D mesh. Each rank computes a part of its gradient.

    Args:
        y: the tensor.
        mesh: 1-D mesh.
        features: that holds for the last so many features alone; -1 is all of ``y``.

    Returns:
        A plain tensor whose gradient is summed over the ranks.
    """
    if mesh.size() == 1:
        return y
    if features < 0 or features == y.shape[-1]:
        return DTensor.from_local(y, mesh, (Replicate(),)).to_local(grad_placements=(Partial(),))
    before, read = y[..., :-features], y[..., -features:]
    pieces = before, read_by_parts(read, mesh)
    joined = mesh.platform.cat(pieces, -1)
    if FOLLOWING:
        FOLLOWING[-1].joined(joined, pieces, -1)
    return joined
