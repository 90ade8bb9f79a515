"""Base classes of the styles."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

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
    """Abstract base class of styles. A user-defined style derives from `ModuleStyle`, or defines `_apply`.

    Attributes:
        src_data_rank: rank of the mesh whose parameters all ranks get; None uses local values without communication.
    """

    src_data_rank: int | None = 0
    #: Whether the mesh must be 1-D. A user-defined class that only defines `_apply` gets any mesh.
    along_one_dimension: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args:
            parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
            if parameters and all(p.kind is p.KEYWORD_ONLY for p in parameters):
                # Python's own message names the class that defines __init__, which may be a private one.
                names = [p.name for p in parameters]
                raise TypeError(
                    f"{cls.__name__} takes {', '.join(names)} by keyword, got {args[0]!r} by position: write "
                    f"{cls.__name__}({names[0]}={args[0]!r}), or another keyword{import_hint(args[0])}"
                )
        return super().__new__(cls)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelise ``module`` in place over a mesh and return it.

        Raises:
            ValueError: if the style needs a 1-D mesh and the mesh has several dimensions, or if `check` raises.
        """
        mesh = resolve_mesh(device_mesh, f"{type(self).__name__}.apply")
        bind_platform(mesh.platform)
        self.check(module, mesh, type(module).__name__)
        return self._apply(module, mesh)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        """Raise ValueError if the style does not fit ``module``, which the message calls ``where``. Change nothing."""
        if self.along_one_dimension and device_mesh.ndim != 1:
            raise ValueError(
                f"{type(self).__name__} on {where!r} needs a 1-D mesh, got one of shape {device_mesh.shape}: pass one "
                "dimension of it, as in mesh['tp']"
            )
        for earlier, _ in getattr(module, APPLIED, ()):
            if self.excludes(earlier):
                raise ValueError(f"{where!r} has the style {earlier!r} already and cannot get {self!r} as well")

    def excludes(self, other: ParallelStyle) -> bool:
        """Return whether a module cannot have both this style and ``other``."""
        return type(self) is type(other)

    @abstractmethod
    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelise ``module`` in place and return it."""

    def __repr__(self) -> str:
        """Return the constructor call, with all arguments that are stored as attributes of the same name."""
        arguments = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            value = vars(self).get(name)
            if value is not None:
                arguments.append(repr(value) if parameter.kind is not parameter.KEYWORD_ONLY else f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __str__(self) -> str:
        """Return the constructor call without default arguments, for texts that list many styles."""
        arguments = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            value = vars(self).get(name)
            usual: Any = (None, {}, parameter.default, getattr(type(self), name, None))
            if not any(value == other for other in usual):
                value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
                arguments.append(f"{name}={value!r}".replace("dim=", ""))
        return f"{type(self).__name__}({', '.join(arguments)})"


#: Methods that convert inputs and outputs, and what says that a class with such a method has a program.
_CONVERSIONS = ("prepare_input", "prepare_output", "prepare_inputs", "prepare_outputs", "_new_forward")
_OF_PROGRAMS = {*_CONVERSIONS, "program", "has_program"}
#: Errors that frameworks raise for an unsuitable input. Torch's checkpointing ends a recomputation by another error.
_OF_AN_INPUT = (RuntimeError, TypeError, ValueError, IndexError)


class ModuleStyle(ParallelStyle):
    """Base class of styles that distribute the parameters of a module. User-defined styles derive from it.

    A subclass declares the placements of parameters, inputs and outputs. The style converts inputs to DTensors, runs
    the module's forward on them and converts the outputs. Checks of the plan use the same placements. Override a method
    where a placement depends on the module. A module can have only one such style.

    Attributes:
        placements: placements of the module's direct parameters, by name. All other parameters are replicated.
        input_layouts: placements of plain positional inputs; None leaves an input unchanged. A single entry is for the
            first input, even if it is passed by keyword.
        desired_input_layouts: placements that the module needs; None keeps the placements of the inputs.
        output_layouts: placement of each output; None leaves an output unchanged. None in place of the tuple is for a
            single output, which keeps its placement.
        use_local_output: whether outputs are plain local tensors.
        whole_dims: number of trailing dimensions that must not be sharded, for a module that computes each position of
            the other dimensions independently. None uses the platform's number, which is known for norms.
        partial_output_features: number of last features of a plain output whose gradients are partial; -1 for all.

    Example:
        A style for a layer that multiplies its features by a parameter ``gain``; both are sharded:

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
    #: Whether ranks compare the sizes of plain shards that are passed to the module.
    compares_input: bool = True
    #: Whether the data describe the conversions. A class that overrides one has to say so again.
    has_program: ClassVar[bool] = True

    def input_placements(self, module: Any, mesh: DeviceMesh) -> tuple[Placement | None, Placement | None]:
        """Return the placement of a plain first input, and the placement that the module needs, or None."""
        return self.input_layouts[0], (self.desired_input_layouts or (None,))[0]

    def parameter_placements(self, module: Any, mesh: DeviceMesh) -> Mapping[str, Placement]:
        """Return the placements of the direct parameters of ``module``, by name; all others are replicated."""
        return self.placements

    def prepare_input(self, module: Any, x: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        """Convert an input with a layout to a DTensor that the module's forward can take.

        Args:
            module: the module that is called.
            x: plain tensor or DTensor.
            i: index of the input's entry in ``input_layouts``.
            what: name of the input in messages.
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
        """Return the arguments for the module's forward: each input with a layout is converted by `prepare_input`."""
        layouts, name = self.input_layouts, module_label(module)
        if len(layouts) == 1 and layouts[0] is not None:
            what = f"the input of {name}"
            if args:
                return (self._prepared(module, args[0], 0, what, mesh), *args[1:]), kwargs
            for first, x in kwargs.items():
                return args, {**kwargs, first: self._prepared(module, x, 0, what, mesh)}
            raise ValueError(f"{name} was called without inputs")
        if len(args) < len(layouts):
            raise too_few_inputs(module, args, layouts, self)
        new = list(args)
        for i, layout in enumerate(layouts):
            if layout is not None and args[i] is not None:
                new[i] = self._prepared(module, args[i], i, f"input {i} of {name}", mesh)
        return tuple(new), kwargs

    def _prepared(self, module: Any, x: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        """Return the converted input. In the first call, ranks compare a plain input that must be equal on all."""
        whole = self.input_layouts[i] is _WHOLE and not isinstance(x, DTensor)
        if whole and what not in vars(module).get(COMPARED, ()):
            compare_input(x, mesh, what, module)
        return self.prepare_input(module, x, i, what, mesh)

    def prepare_outputs(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        """Convert the output, or the outputs, of the module's forward for the caller."""
        layouts = self.output_layouts
        if layouts is None:
            return self.prepare_output(module, output, 0, f"the output of {module_label(module)}", mesh)
        return convert_outputs(module, output, layouts, self.prepare_output, self, mesh)

    def local_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> LocalForward | None:
        """Return a fast path for a single input, or None. It replaces the style's conversions and ``forward``."""
        program = self._program(module, mesh)
        local = None if program is None else short_way(program, module, forward)
        return None if local is None or program is None else overlapped_first(local, program)

    def program(self, module: Any, mesh: DeviceMesh) -> Program | None:
        """Return the `Program` of ``module`` for `short_way` and compilers, or None for several inputs."""
        return program_of(self, module, mesh)

    def _program(self, module: Any, mesh: DeviceMesh) -> Program | None:
        own = next(vars(cls) for cls in type(self).__mro__ if not vars(cls).keys().isdisjoint(_OF_PROGRAMS))
        return self.program(module, mesh) if "program" in own or own.get("has_program") else None

    def excludes(self, other: ParallelStyle) -> bool:
        return isinstance(other, ModuleStyle)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
        # User-defined classes may declare placements of the framework, such as torch's `Shard`.
        self.input_layouts = own_placements(self.input_layouts)
        self.desired_input_layouts = own_placements(self.desired_input_layouts)
        self.output_layouts = own_placements(self.output_layouts)
        own = dict(device_mesh.platform.named_parameters(module))
        for name, placement in self.parameter_placements(module, device_mesh).items():
            if name not in own:
                raise ValueError(
                    f"{self!r} names the parameter {name!r}, but the parameters of {where!r} "
                    f"({type(module).__name__}) are: {', '.join(map(repr, own)) or 'none of its own'}. Correct the "
                    "name, or name the submodule in the plan"
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
        """Distribute the direct parameters of ``module`` in the placements that `parameter_placements` returns."""
        for name, placement in self.parameter_placements(module, mesh).items():
            distribute_parameter(module, name, mesh, (placement,), src_data_rank=self.src_data_rank)

    def _new_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
        """Return the replacement of the module's ``forward``. It runs `local_forward` for a supported single input, or
        else converts the inputs, runs ``forward`` and converts the outputs."""
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
                """Compare the input between ranks, in the first call and, after shards became uneven, in each call."""
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
                            # This explains an unsuitable input. For a suitable input it communicates nothing.
                            self.prepare_inputs(module, args, kwargs, mesh)
                        tell_of_failure(error, f"forward of {module_label(module)}", mesh)
                        raise
                    if y is not NotImplemented:
                        return y
            return convert(module, *args, **kwargs)

        def tell_borders(module: Any, *args: Any, **kwargs: Any) -> Any:
            """Run the module, and report the placements of its input and output to `check_plain_code`."""
            if len(args) != 1 or kwargs or type(args[0]) not in by_class or not args[0].shape:
                return convert(module, *args, **kwargs)  # which reports the placements
            x, whole = args[0], args[0].shape
            if type(x) is plain:  # the ranks compare that their shards have one size
                try:
                    layout = layout_of_even_part(x, mesh, self.input_layouts[0])  # type: ignore[arg-type]
                except ValueError:  # for an unsuitable input; the error of `convert` says more
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
    """Return ``value``, the bool that was passed for ``keyword``.

    Raises:
        TypeError: if ``value`` is not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{style}({keyword}=...) takes True or False, got {value!r}")
    return value
