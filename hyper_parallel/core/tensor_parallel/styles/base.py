"""Base classes of the styles."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hyper_parallel.core.communication.errors import tell_of_failure
from hyper_parallel.core.communication.recorder import LISTENERS, run_in_module
from hyper_parallel.core.dtensor.api import distribute_parameter, replicate_undistributed
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform, dtensor_class
from hyper_parallel.core.dtensor.undistributed import check_first_call
from hyper_parallel.core.layouts.layout import get_layout, normalize_placements
from hyper_parallel.core.layouts.placement_types import Placement, Replicate, Shard, own_placements
from hyper_parallel.core.lookalikes import import_hint
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.core.rules.logit_shards import part_of_classes
from hyper_parallel.core.tensor_parallel.program.calls import followed, is_entered
from hyper_parallel.core.tensor_parallel.program.convert import (
    Slots,
    convert_outputs,
    read_by_parts,
    to_output,
    to_placement,
    too_few_inputs,
)
from hyper_parallel.core.tensor_parallel.program.distributed_batches import OtherMeshError, run_on_parts
from hyper_parallel.core.tensor_parallel.program.local_forward import (
    LocalForward,
    layout_of_even_part,
    tell_output,
)
from hyper_parallel.core.tensor_parallel.program.overlap import overlapped_first
from hyper_parallel.core.tensor_parallel.program.planned_parameters import (
    module_label,
    parameter_check,
    path_of,
    remember_layouts,
)
from hyper_parallel.core.tensor_parallel.program.programs import program_of
from hyper_parallel.core.tensor_parallel.program.same_inputs import compare_input
from hyper_parallel.core.tensor_parallel.program.short_way import short_way
from hyper_parallel.core.tensor_parallel.program.uneven_shards import COMPARED, compare_shapes
from hyper_parallel.platform.contract.modules import APPLIED
from hyper_parallel.platform.contract.programs import Program

_WHOLE = Replicate()


class ParallelStyle(ABC):
    """The way in which one module is parallelised. A style of your own derives from `ModuleStyle`, or defines `_apply`.

    Attributes:
        src_data_rank: rank of the mesh whose parameters count; None communicates nothing.
    """

    src_data_rank: int | None = 0
    #: Whether the mesh must have one dimension; a class of your own that only defines `_apply` gets any.
    along_one_dimension: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args:
            parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
            if parameters and all(p.kind is p.KEYWORD_ONLY for p in parameters):
                # Python's own message names the class that defines __init__, which may be a private one.
                names = [p.name for p in parameters]
                raise TypeError(
                    f"{cls.__name__} takes {', '.join(names)} by keyword, got {args[0]!r} by position: write "
                    f"{cls.__name__}({names[0]}={args[0]!r}), or the keyword that is meant{import_hint(args[0])}"
                )
        return super().__new__(cls)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelise ``module`` in place over a mesh and return it.

        Raises:
            ValueError: for a mesh that is not 1-D where the style needs one, or when `check` finds the style unfit.
        """
        mesh = resolve_mesh(device_mesh, f"{type(self).__name__}.apply")
        bind_platform(mesh.platform)
        self.check(module, mesh, type(module).__name__)
        return self._apply(module, mesh)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        """Raise ValueError when the style cannot be applied to ``module``; ``where`` names it. Changes nothing."""
        if self.along_one_dimension and device_mesh.ndim != 1:
            raise ValueError(
                f"{type(self).__name__} on {where!r} needs a 1-D mesh, got one of shape {device_mesh.shape}: pass one "
                "dimension of it, as in mesh['tp']"
            )
        for earlier, _ in getattr(module, APPLIED, ()):
            if self.excludes(earlier):
                raise ValueError(f"{where!r} has the style {earlier!r} already and cannot get {self!r} as well")

    def excludes(self, other: ParallelStyle) -> bool:
        """Return whether one module cannot have this style and ``other``."""
        return type(self) is type(other)

    @abstractmethod
    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelise ``module`` in place and return it."""

    def __repr__(self) -> str:
        """The call that makes the style: the arguments of its constructor that it keeps under their names."""
        arguments = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            value = vars(self).get(name)
            if value is not None:
                arguments.append(repr(value) if parameter.kind is not parameter.KEYWORD_ONLY else f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __str__(self) -> str:
        """The representation without arguments that have their defaults, for texts that show many styles."""
        arguments = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            value = vars(self).get(name)
            usual: Any = (None, {}, parameter.default, getattr(type(self), name, None))
            if not any(value == other for other in usual):
                value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
                arguments.append(f"{name}={value!r}".replace("dim=", ""))
        return f"{type(self).__name__}({', '.join(arguments)})"


#: Methods that say more than the data of a style.
_CONVERSIONS = ("prepare_input", "prepare_output", "prepare_inputs", "prepare_outputs", "_new_forward")
#: Errors of a framework for an input that does not fit. Torch's checkpointing ends a recomputation with another one.
_OF_AN_INPUT = (RuntimeError, TypeError, ValueError, IndexError)


class ModuleStyle(ParallelStyle):
    """A style that owns the parameters of its module: one such style a module. The base for a style of your own.

    A style is data: placements of parameters, inputs and outputs. From these come the conversions of inputs and
    outputs, between which the module's own forward runs on DTensors. The comparison of plain shards between ranks and
    the checks of a plan use the same data. Override a method if the data depend on the module.

    Attributes:
        placements: placements of parameters that the module itself holds, by name. Other parameters are replicated.
        input_layouts: placements of plain positional inputs; None leaves an input unchanged. A single entry is for the
            first input, also by keyword.
        desired_input_layouts: placements that the module needs; None keeps the placements of the inputs.
        output_layouts: placement of each output; None leaves an output unchanged. None for all is for a single output,
            which keeps its placement.
        use_local_output: whether outputs are plain local tensors.
        whole_dims: number of last dimensions that must be unsharded, for a module that treats all other positions
            independently. None asks the platform, which knows norms.
        partial_output_features: number of last features of a plain output whose gradients are partial; -1 for all.

    Example:
        For a layer that multiplies its features by a parameter ``gain``, of which each rank has some:

        >>> from hyper_parallel import ModuleStyle, Shard
        >>> class GainParallel(ModuleStyle):
        ...     placements = {"gain": Shard(0)}
        ...     input_layouts = desired_input_layouts = output_layouts = (Shard(-1),)
        >>> GainParallel().use_local_output
        True
    """

    along_one_dimension = True

    placements: Mapping[str, Placement] = MappingProxyType({})
    input_layouts: Slots = (Replicate(),)
    desired_input_layouts: Slots | None = None
    output_layouts: Slots | None = (Replicate(),)
    use_local_output: bool = True
    whole_dims: int | None = None
    partial_output_features: int = 0
    #: Whether the ranks compare plain shards that they give the module.
    compares_input: bool = True

    def input_placements(self, module: Any, mesh: DeviceMesh) -> tuple[Placement | None, Placement | None]:
        """Return the placement of a plain first input, and the placement that the module needs, or None."""
        return self.input_layouts[0], (self.desired_input_layouts or (None,))[0]

    def parameter_placements(self, module: Any, mesh: DeviceMesh) -> Mapping[str, Placement]:
        """The placements of parameters that ``module`` itself holds, by name; all others are replicated."""
        return self.placements

    def prepare_input(self, module: Any, x: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        """Convert an input that has a layout for the module's forward.

        Args:
            module: the module that is called.
            x: plain tensor or DTensor.
            i: index of its layouts.
            what: names the input in messages.
            mesh: 1-D mesh.
        """
        desired = None if self.desired_input_layouts is None else self.desired_input_layouts[i]
        return to_placement(x, mesh, self.input_layouts[i], desired, what, taker=module)

    def prepare_output(self, module: Any, y: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        """Convert an output ``y`` of the module's forward for the caller; arguments as for `prepare_input`."""
        desired = None if self.output_layouts is None else self.output_layouts[i]
        y = to_output(y, mesh, desired, self.use_local_output, what)
        return read_by_parts(y, mesh, self.partial_output_features) if self.partial_output_features else y

    def prepare_inputs(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        """The arguments with which the module's forward runs: `prepare_input` of each that has a layout."""
        layouts, name = self.input_layouts, module_label(module)
        if len(layouts) == 1 and layouts[0] is not None:
            what = f"the input of {name}"
            if args:
                x = args[0]
                if layouts[0] is _WHOLE and not isinstance(x, DTensor) and what not in vars(module).get(COMPARED, ()):
                    compare_input(x, mesh, what, module)
                return (self.prepare_input(module, x, 0, what, mesh), *args[1:]), kwargs
            if kwargs:
                first, x = next(iter(kwargs.items()))
                if layouts[0] is _WHOLE and not isinstance(x, DTensor) and what not in vars(module).get(COMPARED, ()):
                    compare_input(x, mesh, what, module)
                return args, {**kwargs, first: self.prepare_input(module, x, 0, what, mesh)}
            raise ValueError(f"{name} was called without inputs")
        if len(args) < len(layouts):
            raise too_few_inputs(module, args, layouts, self)
        new = list(args)
        for i, layout in enumerate(layouts):
            if layout is not None and args[i] is not None:
                x, what = args[i], f"input {i} of {name}"
                if layout is _WHOLE and not isinstance(x, DTensor) and what not in vars(module).get(COMPARED, ()):
                    compare_input(x, mesh, what, module)
                new[i] = self.prepare_input(module, x, i, what, mesh)
        return tuple(new), kwargs

    def prepare_outputs(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        """Convert the output, or the outputs, of the module's forward for the caller."""
        layouts = self.output_layouts
        if layouts is None:
            return self.prepare_output(module, output, 0, f"the output of {module_label(module)}", mesh)
        return convert_outputs(module, output, layouts, self.prepare_output, self, mesh)

    def local_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> LocalForward | None:
        """Return a shorter way for a single input, or None. It equals ``forward`` between the conversions."""
        program = self._program(module, mesh)
        local = None if program is None else short_way(program, module, forward)
        return None if local is None or program is None else overlapped_first(local, program)

    def program(self, module: Any, mesh: DeviceMesh) -> Program | None:
        """Return steps and operation of ``module``, for the short way and compilers; None for several inputs. A class
        that overrides a conversion has none, unless it overrides this method too."""
        return program_of(self, module, mesh)

    def _program(self, module: Any, mesh: DeviceMesh) -> Program | None:
        overriding = [cls for cls in type(self).__mro__ if not vars(cls).keys().isdisjoint(("program", *_CONVERSIONS))]
        return self.program(module, mesh) if "program" in vars(overriding[0]) else None

    def excludes(self, other: ParallelStyle) -> bool:
        return isinstance(other, ModuleStyle)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
        # Classes that users write may have placements of the framework's own.
        self.input_layouts = own_placements(self.input_layouts)
        self.desired_input_layouts = own_placements(self.desired_input_layouts)
        self.output_layouts = own_placements(self.output_layouts)
        own = dict(device_mesh.platform.named_parameters(module))
        for name, placement in self.parameter_placements(module, device_mesh).items():
            if name not in own:
                raise ValueError(
                    f"{self!r} names the parameter {name!r}, and {where!r} ({type(module).__name__}) has "
                    f"{', '.join(map(repr, own)) or 'none of its own'}: correct the name, or name the submodule in the "
                    "plan"
                )
            shape = tuple(own[name].shape)
            what = f"parameter {name!r} of {where!r}, of shape {shape},"
            get_layout(device_mesh, normalize_placements((placement,), device_mesh, len(shape), what), shape)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        platform = device_mesh.platform
        self.distribute(module, device_mesh)
        for _, submodule in list(platform.named_modules(module)):
            replicate_undistributed(submodule, device_mesh, self.src_data_rank)
        remember_layouts(module, device_mesh)
        program = self._program(module, device_mesh)

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            new, head = self._new_forward(module, forward, device_mesh), part_of_classes(module)
            return new if head is None else head.noting(new, module)

        platform.replace_forward(module, make)
        platform.set_compiled_forward(module, program)
        mark_applied(module, self, device_mesh)
        return module

    def distribute(self, module: Any, mesh: DeviceMesh) -> None:
        """Make DTensors of the parameters that ``module`` itself holds, by `parameter_placements`."""
        for name, placement in self.parameter_placements(module, mesh).items():
            distribute_parameter(module, name, mesh, (placement,), src_data_rank=self.src_data_rank)

    def _new_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
        """Return the function that a call of the module runs in place of ``forward``: `local_forward` for a single
        input of a known kind, else ``forward`` between the conversions."""
        if mesh.get_coordinate() is None:
            return lambda module, *args, **kwargs: mesh.require_member(f"a call of {module_label(module)}")
        check = parameter_check(module, mesh)
        local = self.local_forward(module, forward, mesh)
        plain, distributed = mesh.platform.Tensor, dtensor_class(mesh.platform)

        def convert(module: Any, *args: Any, **kwargs: Any) -> Any:
            if LISTENERS and is_entered(module):
                return run_in_module(path_of(module), followed(convert, module), module, *args, **kwargs)
            if CHECKS:
                check_first_call(module)
            check(module)
            try:
                args, kwargs = self.prepare_inputs(module, args, kwargs, mesh)
            except OtherMeshError as error:
                return run_on_parts(new_forward, module, args, kwargs, mesh, error)
            if local is not None and len(args) == 1 and not kwargs and type(args[0]) is distributed:
                x: Any = args[0]
                y = local.distributed(module, x)
                if y is not NotImplemented:
                    return tell_output(local, y, tuple(x.shape), mesh)
            return self.prepare_outputs(module, forward(module, *args, **kwargs), mesh)

        new_forward = convert
        if local is None:
            return convert
        by_class: dict[type, Any] = {plain: local.plain, distributed: local.distributed}
        given, run_plain = local.given, local.plain
        compares = isinstance(given, Shard) and run_plain is not None
        if given is not None and run_plain is not None:

            def compare(module: Any, x: Any) -> Any:
                """Compare in the first call, and in all calls once shards are uneven."""
                what = f"the input of {module_label(module)}"
                if isinstance(given, Shard):
                    compare_shapes(x, mesh, given, what, module)
                else:
                    compare_input(x, mesh, what, module)
                by_class[plain] = run_plain
                return run_plain(module, x)

            by_class[plain] = compare

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            if LISTENERS and is_entered(module):
                way = followed(tell_borders, module) if FOLLOWING else run
                return run_in_module(path_of(module), way, module, *args, **kwargs)
            if len(args) == 1 and not kwargs and not CHECKS:
                if compares and mesh._has_uneven_shards:
                    by_class[plain] = compare
                run_local = by_class.get(type(args[0]))
                if run_local is not None:
                    try:
                        y = run_local(module, args[0])
                    except Exception as error:
                        if isinstance(error, _OF_AN_INPUT):
                            # One that does not fit is explained here; this communicates nothing where it fits.
                            self.prepare_inputs(module, args, kwargs, mesh)
                        tell_of_failure(error, f"forward of {module_label(module)}", mesh)
                        raise
                    if y is not NotImplemented:
                        return y
            return convert(module, *args, **kwargs)

        def tell_borders(module: Any, *args: Any, **kwargs: Any) -> Any:
            """Run as always, and say at the borders of plain code what each tensor is."""
            if len(args) != 1 or kwargs or type(args[0]) not in by_class or not args[0].shape:
                return convert(module, *args, **kwargs)  # which says it
            x, whole = args[0], args[0].shape
            if type(x) is plain:  # a plain shard is as large as those of the other ranks, which compare
                try:
                    layout = layout_of_even_part(x, mesh, self.input_layouts[0])  # type: ignore[arg-type]
                except ValueError:  # of an input that does not fit: `convert` has the words
                    return convert(module, *args, **kwargs)
                FOLLOWING[-1].taken(x, layout)
                whole = layout.shape
            return tell_output(local, run(module, x), tuple(whole), mesh)

        new_forward = run
        return run


def mark_applied(module: Any, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Remember on ``module`` that ``style`` was applied to it over ``mesh``."""
    object.__setattr__(module, APPLIED, (*getattr(module, APPLIED, ()), (style, mesh)))
    mesh.platform.show_styles(module)


def is_styled(module: Any) -> bool:
    """Return whether a style was applied to ``module``."""
    return bool(getattr(module, APPLIED, ()))


def check_flag(value: Any, keyword: str, style: str) -> bool:
    """``value`` of a keyword that is True or False.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{style}({keyword}=...) is True or False, got {value!r}")
    return value
