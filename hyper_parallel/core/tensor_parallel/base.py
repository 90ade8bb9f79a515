"""What a style is: the base classes."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.api import distribute_parameter, replicate_rest
from hyper_parallel.core.dtensor.communication.errors import tell_of_failure
from hyper_parallel.core.dtensor.communication.rank_check import CHECKS
from hyper_parallel.core.dtensor.communication.recorder import LISTENERS, current_module, run_in_module
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.dtensor.layouts.layout import get_layout, normalize_placements
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.dtensor.rest import check_call
from hyper_parallel.core.dtensor.tensor import bind_platform, dtensor_class
from hyper_parallel.core.lookalikes import import_hint
from hyper_parallel.core.tensor_parallel.held import name_module, path_of, remember_layouts, title, watch
from hyper_parallel.core.tensor_parallel.lengths import compare_lengths, uneven_on
from hyper_parallel.core.tensor_parallel.local_forward import LocalForward

__all__ = [
    "APPLIED",
    "ModuleStyle",
    "ParallelStyle",
    "check_flag",
    "is_styled",
    "mark_applied",
    "name_module",
    "of_style",
    "title",
]

#: Attribute of a module: (style, mesh) for each style that was applied to it.
APPLIED = "_hyper_parallel_styles"


class ParallelStyle(ABC):
    """How one module is parallelised. A style of your own defines `_apply`.

    Attributes:
        src_data_rank: rank of the mesh whose parameters count; None communicates nothing.
    """

    src_data_rank: int | None = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args:
            parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
            if all(p.kind is p.KEYWORD_ONLY for p in parameters):
                # Python's own message names the class that defines __init__, which may be a private one.
                names = [p.name for p in parameters]
                raise TypeError(
                    f"{cls.__name__} takes {', '.join(names)} by keyword, got {args[0]!r} by position: write "
                    f"{cls.__name__}({names[0]}={args[0]!r}), or the keyword that is meant{import_hint(args[0])}"
                )
        return super().__new__(cls)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelise ``module`` in place over a 1-D mesh and return it.

        Raises:
            ValueError: for a mesh that is not 1-D, or when `check` finds the style unfit.
        """
        bind_platform(resolve_mesh(device_mesh, f"{type(self).__name__}.apply").platform)
        self.check(module, device_mesh, type(module).__name__)
        return self._apply(module, device_mesh)

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        """Raise ValueError when the style cannot be applied to ``module``; ``where`` names it. Changes nothing."""
        if device_mesh.ndim != 1:
            raise ValueError(
                f"{type(self).__name__} on {where!r} needs a 1-D mesh, got one of shape {device_mesh.shape}: pass one "
                "dimension of it, as in mesh['tp']"
            )
        for earlier, _ in getattr(module, APPLIED, ()):
            if self.excludes(earlier):
                raise ValueError(f"{where!r} has the style {earlier!r} already and cannot get {self!r} as well")

    def excludes(self, other: ParallelStyle) -> bool:
        """Whether one module cannot have this style and ``other``."""
        return type(self) is type(other)

    @abstractmethod
    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelise ``module`` in place and return it."""


#: What a framework raises for an input that does not fit. Not every exception: torch's checkpointing ends a
#: recomputation with one of its own, and nothing may be computed after it.
_OF_AN_INPUT = (RuntimeError, TypeError, ValueError, IndexError)


class ModuleStyle(ParallelStyle):
    """A style that owns the parameters of its module: one such style a module.

    Attributes:
        shard_taken: what a plain input counts as, where that is a shard whose global size only the ranks together know.
    """

    shard_taken: Placement | None = None

    def excludes(self, other: ParallelStyle) -> bool:
        return isinstance(other, ModuleStyle)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        self._partition(module, device_mesh)
        remember_layouts(module, device_mesh)
        device_mesh.platform.replace_forward(
            module,
            lambda forward: self._forward(
                module, forward, self._local_forward(module, forward, device_mesh), device_mesh
            ),
        )
        mark_applied(module, self, device_mesh)
        return module

    def _forward(
        self, module: Any, forward: Callable[..., Any], local: LocalForward | None, mesh: DeviceMesh
    ) -> Callable[..., Any]:
        """What a call of the module runs in place of ``forward``: ``local`` for a single input that it knows, else that
        between the styles' conversions, with parameters that are still distributed as they are now."""
        if mesh.get_coordinate() is None:
            return _forward_outside(mesh)
        check = watch(module, mesh)
        plain, distributed = mesh.platform.Tensor, dtensor_class(mesh.platform)

        def convert(module: Any, *args: Any, **kwargs: Any) -> Any:
            if LISTENERS and current_module() != path_of(module):
                return run_in_module(path_of(module), convert, module, *args, **kwargs)
            if CHECKS:
                check_call(module)
            check(module)
            args, kwargs = self._before(module, args, kwargs, mesh)
            if local is not None and len(args) == 1 and not kwargs and type(args[0]) is distributed:
                y = local.distributed(module, args[0])
                if y is not NotImplemented:
                    return y
            return self._after(module, forward(module, *args, **kwargs), mesh)

        if local is None:
            return convert
        by_class: dict[type, Any] = {plain: local.plain, distributed: local.distributed}
        shard, run_plain = self.shard_taken, local.plain
        uneven: Any = ()
        if shard is not None and run_plain is not None:
            uneven = uneven_on(mesh)

            def compare(module: Any, x: Any) -> Any:
                """In the first call, and in all calls once shards are uneven."""
                compare_lengths(x, mesh, shard, f"the input of {title(module)}", module)
                by_class[plain] = run_plain
                return run_plain(module, x)

            by_class[plain] = compare

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            if LISTENERS and current_module() != path_of(module):
                return run_in_module(path_of(module), run, module, *args, **kwargs)
            if len(args) == 1 and not kwargs and not CHECKS:
                if uneven:
                    by_class[plain] = compare
                run_local = by_class.get(type(args[0]))
                if run_local is not None:
                    try:
                        y = run_local(module, args[0])
                    except Exception as error:
                        if isinstance(error, _OF_AN_INPUT):
                            # One that does not fit is explained here; this communicates nothing where it fits.
                            self._before(module, args, kwargs, mesh)
                        tell_of_failure(error, f"forward of {title(module)}", mesh)
                        raise
                    if y is not NotImplemented:
                        return y
            return convert(module, *args, **kwargs)

        return run

    def _local_forward(self, module: Any, forward: Callable[..., Any], mesh: DeviceMesh) -> LocalForward | None:
        """A shorter way for single inputs, where style and module are such that all is known now; else None. It must
        do what `_before`, the module's forward and `_after` do."""
        return None

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        super().check(module, device_mesh, where)
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

    def parameter_placements(self, module: Any, mesh: DeviceMesh) -> dict[str, Placement]:
        """How the style places parameters that ``module`` itself holds, by name; all others are replicated."""
        return {}

    def _partition(self, module: Any, mesh: DeviceMesh) -> None:
        for name, placement in self.parameter_placements(module, mesh).items():
            distribute_parameter(module, name, mesh, (placement,), src_data_rank=self.src_data_rank)
        for _, submodule in list(mesh.platform.named_modules(module)):
            replicate_rest(submodule, mesh, self.src_data_rank)

    @abstractmethod
    def _before(self, module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        """The inputs with which the module runs."""

    @abstractmethod
    def _after(self, module: Any, output: Any, mesh: DeviceMesh) -> Any:
        """The output that the caller gets."""

    def _on_first_input(self, args: tuple, kwargs: dict, convert: Any, where: str) -> tuple[tuple, dict]:
        """Convert the first input, positional or by keyword; all others pass through untouched."""
        if args:
            return (convert(args[0]), *args[1:]), kwargs
        if kwargs:
            first = next(iter(kwargs))
            return args, {**kwargs, first: convert(kwargs[first])}
        raise ValueError(f"{where} was called without inputs")


def _forward_outside(mesh: DeviceMesh) -> Callable[..., Any]:
    """What a call of a module runs on a rank outside the mesh of its style."""

    def refuse(module: Any, *args: Any, **kwargs: Any) -> Any:
        mesh.require_member(f"a call of {title(module)}")

    return refuse


def mark_applied(module: Any, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Remember on ``module`` that ``style`` was applied to it over ``mesh``."""
    object.__setattr__(module, APPLIED, (*getattr(module, APPLIED, ()), (style, mesh)))


def of_style(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a hook that a style registers, and so registers again where the module is loaded."""
    hook.of_style = True  # type: ignore[attr-defined]
    return hook


def is_styled(module: Any) -> bool:
    """Whether a style was applied to ``module``."""
    return bool(getattr(module, APPLIED, ()))


def check_flag(value: Any, keyword: str, style: str) -> bool:
    """``value`` of a keyword that is True or False.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{style}({keyword}=...) is True or False, got {value!r}")
    return value
