"""The styles of a parallelisation plan. Mirrors ``torch.distributed.tensor.parallel.style``.

Every style does the same three things: it distributes the module's parameters, brings the inputs to the layout that the
module needs, and its outputs to the layout that the plan asks for. `ColwiseParallel` and `RowwiseParallel` differ only
in which dimension of the weight is sharded and what follows from that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from hyper_parallel.core.dtensor.api import distribute_parameter, replicate_rest
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.dtensor.tensor import bind_platform
from hyper_parallel.core.tensor_parallel.convert import (
    as_slots,
    check_placement,
    check_same_length,
    leave,
    place,
)

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]

_APPLIED = "_hyper_parallel_styles"


class ParallelStyle(ABC):
    """How one module is parallelised. A style of your own defines `_apply`.

    Attributes:
        src_data_rank: rank of the mesh whose parameters count; None communicates nothing.
    """

    src_data_rank: int | None = 0

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelise ``module`` in place over a 1-D mesh and return it.

        Raises:
            ValueError: for a mesh that is not 1-D, or when `check` finds the style unfit.
        """
        bind_platform(device_mesh.platform)
        self.check(module, device_mesh, type(module).__name__)
        return self._apply(module, device_mesh)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        """Raise ValueError when the style cannot be applied to ``module``; ``where`` names it. Changes nothing."""
        if device_mesh.ndim != 1:
            raise ValueError(
                f"{type(self).__name__} on {where!r} needs a 1-D mesh, got one of shape {device_mesh.shape}: pass one "
                "dimension of it, as in mesh['tp']"
            )
        for earlier in getattr(module, _APPLIED, ()):
            if self.excludes(earlier):
                raise ValueError(f"{where!r} has the style {earlier!r} already and cannot get {self!r} as well")

    def excludes(self, other: ParallelStyle) -> bool:
        """Whether one module cannot have this style and ``other``."""
        return type(self) is type(other)

    @abstractmethod
    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelise ``module`` in place and return it."""


class _ModuleStyle(ParallelStyle):
    """A style that owns the parameters of its module: one such style a module."""

    def excludes(self, other: ParallelStyle) -> bool:
        return isinstance(other, _ModuleStyle)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        platform = device_mesh.platform
        self._partition(module, device_mesh)
        platform.register_forward_pre_hook(
            module,
            lambda module, args, kwargs: self._before(module, args, kwargs, device_mesh),
            with_kwargs=True,
        )
        platform.register_forward_hook(module, lambda module, args, output: self._after(module, output, device_mesh))
        _mark(module, self)
        return module

    def _partition(self, module: Any, mesh: DeviceMesh) -> None:
        for _, submodule in list(mesh.platform.named_modules(module)):
            replicate_rest(submodule, mesh, self.src_data_rank)

    def _before(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        raise TypeError(f"{type(self).__name__} does not say how it prepares inputs")

    def _after(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        raise TypeError(f"{type(self).__name__} does not say how it prepares outputs")

    def _on_first_input(self, args: tuple, kwargs: dict, convert: Any, where: str) -> tuple[tuple, dict]:
        """Convert the first input, positional or by keyword; all others pass through untouched."""
        if args:
            return (convert(args[0]), *args[1:]), kwargs
        if kwargs:
            first = next(iter(kwargs))
            return args, {**kwargs, first: convert(kwargs[first])}
        raise ValueError(f"{where} was called without inputs")


class _WeightParallel(_ModuleStyle):
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

    def _partition(self, module: Any, mesh: DeviceMesh) -> None:
        platform = mesh.platform
        weight, bias = platform.weight_name(module), platform.bias_name(module)
        if platform.is_linear_module(module):
            distribute_parameter(module, weight, mesh, (self._linear[0],), src_data_rank=self.src_data_rank)
            if bias is not None:
                distribute_parameter(module, bias, mesh, (self._linear[1],), src_data_rank=self.src_data_rank)
        else:
            distribute_parameter(module, weight, mesh, (self._embedding,), src_data_rank=self.src_data_rank)

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
        >>> RowwiseParallel(output_layouts=Shard(1)).input_layouts
        (Shard(dim=-1),)

    Source: ``torch.distributed.tensor.parallel.RowwiseParallel``; Megatron-LM (Shoeybi et al. 2019).
    """

    _linear = (Shard(1), Replicate())
    _embedding = Shard(0)
    _default_input = Shard(-1)
    _default_output = Replicate()
    _needed_by_linear = Shard(-1)


class SequenceParallel(_ModuleStyle):
    """Run a module whose parameters are replicated on an input that is sharded along the sequence.

    For norms and dropout. The gradients of the parameters are reduced over the mesh without any user code.

    Args:
        sequence_dim: tensor dimension that is sharded.
        use_local_output: give the output as a plain local tensor.

    Example:
        >>> SequenceParallel()
        SequenceParallel(sequence_dim=1, use_local_output=False)

    Source: ``torch.distributed.tensor.parallel.SequenceParallel``; Korthikanti et al. 2022.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _before(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        (shard,) = self.sequence_sharding
        what = f"the input of {type(module).__name__}"
        return self._on_first_input(args, kwargs, lambda x: place(x, mesh, shard, shard, what), type(module).__name__)

    def _after(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        return leave(output, mesh, None, self.use_local_output, f"the output of {type(module).__name__}")

    def __repr__(self) -> str:
        return (
            f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, use_local_output={self.use_local_output})"
        )


class PrepareModuleInput(ParallelStyle):
    """Bring the inputs of a module to the layouts it needs, by one collective for all that consume them inside.

    Args:
        input_layouts: placement of each plain positional input, None for one that stays as it is.
        desired_input_layouts: placement wanted for each.
        input_kwarg_layouts: the same for inputs given by keyword; only those named are converted.
        desired_input_kwarg_layouts: placement wanted for each.
        use_local_output: give the module plain local tensors.

    Raises:
        TypeError: when a layout is no placement.
        ValueError: when layouts and desired layouts do not match, here; when the module is called with fewer
            positional inputs than there are layouts, then.

    Example:
        >>> style = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
        >>> style.desired_input_layouts
        (Replicate(), None)

    Source: ``torch.distributed.tensor.parallel.PrepareModuleInput``.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        name = type(self).__name__
        self.input_layouts = None if input_layouts is None else as_slots(input_layouts, "input_layouts", name)
        self.desired_input_layouts = (
            None if desired_input_layouts is None else as_slots(desired_input_layouts, "desired_input_layouts", name)
        )
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        check_same_length(
            self.input_layouts or (),
            self.desired_input_layouts or (),
            ("input_layouts", "desired_input_layouts"),
            name,
        )
        if set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
            raise ValueError(
                f"{name}: input_kwarg_layouts names {sorted(self.input_kwarg_layouts)} and desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}; they must name the same inputs"
            )
        for keyword in ("input_kwarg_layouts", "desired_input_kwarg_layouts"):
            for slot in getattr(self, keyword).values():
                if slot is not None:
                    check_placement(slot, keyword, name)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        device_mesh.platform.register_forward_pre_hook(
            module,
            lambda module, args, kwargs: self._before(module, args, kwargs, device_mesh),
            with_kwargs=True,
        )
        _mark(module, self)
        return module

    def _before(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        layouts, desired = self.input_layouts or (), self.desired_input_layouts or ()
        if len(args) < len(layouts):
            raise ValueError(
                f"{type(module).__name__} was called with {len(args)} positional input(s), {type(self).__name__} has "
                f"{len(layouts)} input_layouts: give the rest positionally, or use input_kwarg_layouts for inputs by "
                "keyword"
            )
        new_args = tuple(
            self._prepare(x, mesh, layouts[i], desired[i], f"input {i} of {type(module).__name__}")
            if i < len(layouts)
            else x
            for i, x in enumerate(args)
        )
        new_kwargs = {
            key: self._prepare(
                x,
                mesh,
                self.input_kwarg_layouts[key],
                self.desired_input_kwarg_layouts[key],
                f"input {key!r} of {type(module).__name__}",
            )
            if key in self.input_kwarg_layouts
            else x
            for key, x in kwargs.items()
        }
        return new_args, new_kwargs

    def _prepare(self, x: Any, mesh: DeviceMesh, layout: Placement | None, desired: Placement | None, what: str) -> Any:
        if layout is None or x is None:
            return x
        placed = place(x, mesh, layout, desired, what)
        return placed.to_local() if self.use_local_output else placed

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(ParallelStyle):
    """Bring the outputs of a module to the layouts that what follows needs.

    Args:
        output_layouts: placement of each plain output, None for one that stays as it is.
        desired_output_layouts: placement wanted for each.
        use_local_output: give plain local tensors.

    Raises:
        TypeError: when a layout is no placement. ValueError: when layouts and desired layouts do not match, here; when
            the module returns another number of outputs, then.

    Example:
        >>> PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()).output_layouts
        (Shard(dim=-1),)

    Source: ``torch.distributed.tensor.parallel.PrepareModuleOutput``.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement | None, ...],
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        self.output_layouts = as_slots(output_layouts, "output_layouts", name)
        self.desired_output_layouts = as_slots(desired_output_layouts, "desired_output_layouts", name)
        self.use_local_output = use_local_output
        check_same_length(
            self.output_layouts,
            self.desired_output_layouts,
            ("output_layouts", "desired_output_layouts"),
            name,
        )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        device_mesh.platform.register_forward_hook(
            module, lambda module, args, output: self._after(module, output, device_mesh)
        )
        _mark(module, self)
        return module

    def _after(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        if len(outputs) != len(self.output_layouts):
            raise ValueError(
                f"{type(module).__name__} returned {len(outputs)} output(s), {type(self).__name__} has "
                f"{len(self.output_layouts)} output_layouts: give one for each output, None for one that stays as it is"
            )
        new = [
            y if layout is None or y is None else self._prepare(y, mesh, layout, desired, i, module)
            for i, (y, layout, desired) in enumerate(
                zip(outputs, self.output_layouts, self.desired_output_layouts, strict=True)
            )
        ]
        return type(output)(new) if isinstance(output, (tuple, list)) else new[0]

    def _prepare(self, y: Any, mesh: DeviceMesh, layout: Placement, desired: Any, i: int, module: Any) -> Any:
        what = f"output {i} of {type(module).__name__}"
        return leave(place(y, mesh, layout, desired, what), mesh, None, self.use_local_output, what)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: as there.
        use_local_input: give the module plain local tensors.
        output_layouts, desired_output_layouts, use_local_output: as there.

    Raises:
        TypeError, ValueError: as there.

    Example:
        >>> style = PrepareModuleInputOutput(
        ...     input_layouts=Shard(1), desired_input_layouts=Replicate(),
        ...     output_layouts=Replicate(), desired_output_layouts=Shard(1),
        ... )
        >>> style.prepare_module_input.use_local_output
        False

    Source: ``torch.distributed.tensor.parallel.PrepareModuleInputOutput``.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement | None, ...],
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

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        self.prepare_module_input.check(module, device_mesh, where)
        self.prepare_module_output.check(module, device_mesh, where)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        self.prepare_module_input._apply(module, device_mesh)
        self.prepare_module_output._apply(module, device_mesh)
        return module

    def __repr__(self) -> str:
        return f"PrepareModuleInputOutput({self.prepare_module_input!r}, {self.prepare_module_output!r})"


def _mark(module: Any, style: ParallelStyle) -> None:
    object.__setattr__(module, _APPLIED, (*getattr(module, _APPLIED, ()), style))
