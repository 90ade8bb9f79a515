"""`replicate`: data parallelism. Mirrors ``torch.distributed._composable.replicate`` and ``DistributedDataParallel``.

The module that is called is a unit with replicated parameters (`replicated_unit.py`). A submodule that is called
directly gets a unit too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.core.data_parallel.places import Slot
from hyper_parallel.core.data_parallel.replicated_unit import Options, ReplicatedUnit
from hyper_parallel.core.data_parallel.unit import is_unit
from hyper_parallel.core.data_parallel.unit_facts import CHECKED, refuse_added
from hyper_parallel.core.dtensor.announcing import announce
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform
from hyper_parallel.core.dtensor.undistributed import broadcast_tensors
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.nesting import nest
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, current_mesh, init_device_mesh, resolve_mesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.operations.operands import refuse_foreign
from hyper_parallel.core.tensor_parallel.styles.experts import has_its_gradients
from hyper_parallel.platform import Platform
from hyper_parallel.platform.contract.modules import APPLIED

__all__ = ["ReplicatedModule", "replicate"]

#: Attribute of a module that `replicate` was applied to, and of its submodules: the `_Mark` of the module.
_MARK = "_replicated"
#: Attribute of a module: the `ReplicatedUnit` that it belongs to; None before the first call, also in a copy.
_UNIT = "_replicated_unit"
#: Attribute of a module that `replicate` has left as it is.
_LEFT = "_not_replicated"


class ReplicatedModule:
    """Methods that `replicate` adds to a module."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether gradients are all-reduced in the backward of later calls.

        With False, backward does not change ``.grad``. On MindSpore it returns zero gradients. Each rank accumulates
        its local gradients, and the next backward with True all-reduces the sum. Several batches then cost the
        communication of one, and a visible gradient is always complete.

        Args:
            requires_gradient_sync: True or False.

        Raises:
            TypeError: for anything else.

        Source: ``torch.distributed._composable.replicate``, ``torch.distributed.fsdp.FSDPModule``.
        """
        if not isinstance(requires_gradient_sync, bool):
            raise TypeError(f"set_requires_gradient_sync takes True or False, got {requires_gradient_sync!r}")
        _unit_of(self).shared.gradients.reduce_gradients = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager without gradient synchronisation, as after ``set_requires_gradient_sync(False)``. The forward
        must run inside.

        Example:
            >>> import torch
            >>> from hyper_parallel import init_device_mesh, replicate
            >>> model = replicate(torch.nn.Linear(2, 1), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
            >>> with model.no_sync():
            ...     model(torch.ones(1, 2)).sum().backward()
            >>> model.weight.grad is None
            True
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> model.weight.grad.to_local()
            tensor([[2., 2.]])

        Source: ``torch.nn.parallel.DistributedDataParallel.no_sync``.
        """
        gradients = _unit_of(self).shared.gradients
        before, gradients.reduce_gradients = gradients.reduce_gradients, False
        try:
            yield
        finally:
            gradients.reduce_gradients = before


def replicate(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    *,
    bucket_cap_mb: float = 25,
    broadcast_buffers: bool = False,
    ignored_modules: Iterable[Any] | None = None,
    process_group: Any = None,
    device_ids: Sequence[Any] | None = None,
) -> Any:
    """Train a module on the batches of all ranks of a mesh (data parallelism). Each rank has a full replica of the
    module.

    The parameters become DTensors placed ``[Replicate()]``, with the values of the first rank. Tensor-parallel
    parameters of `parallelize_module` are placed on both dimensions of the mesh. Modules read the local tensors, which
    are not copied. Each rank calls the module with plain tensors, its local part of the batch. Each rank has a local
    loss, and gradients are averaged over the ranks. If the module is called with DTensors on the mesh (a batch placed
    ``[Shard(0)]``), the ranks share one loss. Gradients are summed then, and batches of unequal size are exact.

    Gradients are complete when backward is done. They are all-reduced in buckets while backward continues, if the
    framework supports that. The order and the size of parameters alone decide which parameters share a bucket. A
    gradient that one rank has not computed counts as zero there. A parameter that no rank has used keeps its ``grad``,
    None for example.

    Materialize a model that was built on the meta device after this call. It gets the first rank's values when it is
    called.

    The module may be called several times before a backward. Each bucket is then all-reduced once for all calls. The
    module gets the methods of `ReplicatedModule`, for accumulating gradients without communication.

    Args:
        module: module of the selected platform; changed in place.
        device_mesh: 1-D mesh; None stands for the mesh entered with ``with mesh:``, or else for all ranks.
        bucket_cap_mb: size of a full bucket, in MiB of gradients.
        broadcast_buffers: before each forward whose gradients will be all-reduced, broadcast buffers such as running
            statistics from the first rank. Buffers are also broadcast once by `replicate` itself.
        ignored_modules: modules whose parameters stay unchanged, including those of their submodules.
        process_group: the framework's process group of the ranks, in place of ``device_mesh``.
        device_ids: the device of this rank, or its number, in a list. Parameters are moved to this device in any case.

    Returns:
        ``module``.

    Raises:
        TypeError: for a module of another framework, and an object that is no process group.
        ValueError: on all ranks, before anything is changed, for a mesh and a process group at once, a device of
            another rank, a mesh that is not 1-D and a ``bucket_cap_mb`` that is not positive. Also for a parameter
            without values, a parameter that is under `replicate` or `fully_shard` already, and a parameter that is
            tensor parallel on a mesh with another root. When the module is called, before communication, for plain
            tensors and DTensors at once, and for a trained parameter that was added. At the end of a forward that has
            replaced a parameter.
        RuntimeError: when a compiler traces the module's call, as `torch.export` does; for gradients of gradients of
            parameters.

    Example:
        >>> import torch
        >>> from hyper_parallel import init_device_mesh, replicate
        >>> model = replicate(torch.nn.Linear(2, 1), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> model.weight.grad.placements, model.weight.grad.to_local()
        ((Replicate(),), tensor([[3., 3.]]))

    Source: ``torch.distributed._composable.replicate``, ``torch.nn.parallel.DistributedDataParallel``; Li et al. 2020,
    "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
    """
    if process_group is not None:
        if device_mesh is not None:
            raise ValueError("replicate takes a device_mesh or a process_group, got both: pass one of the two")
        device_mesh = DeviceMesh.from_group(process_group)
    mesh = resolve_mesh(device_mesh or current_mesh() or init_device_mesh(), "replicate")
    platform = bind_platform(mesh.platform)
    if not isinstance(module, platform.Module):
        raise TypeError(
            f"replicate takes a {platform.Module.__name__} of the platform {platform.name!r}, got "
            f"{type(module).__name__}"
        )
    if mesh.ndim != 1:
        raise ValueError(f"replicate needs a 1-D mesh, got one of shape {mesh.shape}: pass mesh['dp']")
    if not bucket_cap_mb > 0:
        raise ValueError(f"replicate(bucket_cap_mb=...) takes a positive number of MiB, got {bucket_cap_mb!r}")
    mesh.require_member("replicate")
    _check_devices(device_ids, platform)
    ignored = {id(m) for top in ignored_modules or () for _, m in platform.named_modules(top)}
    modules, left = [], []
    for path, m in platform.named_modules(module):
        if id(m) in ignored or has_its_gradients(m, mesh, "replicate"):
            left.append(m)
        else:
            modules.append((path, m))
    layouts: dict[int, tuple[Layout, Layout | None]] = {}
    tensors: dict[int, Any] = {}
    marks = []
    for path, m in modules:
        if _MARK in vars(m) or is_unit(m):
            raise ValueError(
                f"replicate: {f'{path!r} of {type(module).__name__}' if path else type(module).__name__} is under "
                f"{'replicate' if _MARK in vars(m) else 'fully_shard'} already: apply replicate or fully_shard once, "
                "to a module that contains all modules with shared parameters"
            )
        own = dict(platform.named_parameters(m))
        for name, p in own.items():
            if id(p) not in tensors:
                where = f"{path}.{name}" if path else name
                layouts[id(p)] = _layouts(p, f"replicate: parameter {where!r} of {type(module).__name__}", mesh)
                tensors[id(p)] = p
        tensors.update((id(b), b) for _, b in platform.named_buffers(m) if not isinstance(b, DTensor))
        marks.append((m, {name: layouts[id(p)] for name, p in own.items()}))
    broadcast_tensors(list(tensors.values()), mesh, 0)
    without_values = any(map(platform.is_meta, tensors.values()))
    options = Options(mesh, bucket_cap_mb * (1 << 20), broadcast_buffers, without_values)
    for m, its_layouts in marks:
        for name, (layout, _) in its_layouts.items():
            p = platform.own_parameters(m)[name]
            if getattr(p, "_layout", None) is not layout:
                platform.set_distributed_parameter(m, name, _local(p, platform), layout)
        _apply(m, _Mark(options, its_layouts))
    for m in left:
        object.__setattr__(m, _LEFT, True)
    announce("replicate", module, mesh)
    return module


@dataclass(frozen=True)
class _Mark:
    """Record of one call of `replicate` on one module. Copies of the module share the record.

    Attributes:
        options: the arguments of `replicate`.
        layouts: name of a parameter that the module itself holds -> its new layout, and the tensor-parallel layout with
            which the module reads it (None for a plain parameter).
    """

    options: Options
    layouts: dict[str, tuple[Layout, Layout | None]] = field(default_factory=dict)

    def marks(self, module: Any) -> bool:
        """Return whether the same call of `replicate` has marked ``module``. Another call may have marked experts
        inside the model."""
        other: _Mark | None = vars(module).get(_MARK)
        return other is not None and other.options is self.options

    def unit(self, module: Any, whole: ReplicatedUnit | None = None) -> ReplicatedUnit:
        """Return a new unit for the parameters of ``module`` and its submodules. The unit shares the state of
        ``whole``."""
        platform = self.options.mesh.platform
        slots: list[Slot] = []
        indices: dict[int, int] = {}
        read_as: list[Layout | None] = []
        for path, holder in platform.named_modules(module):
            for name, (layout, inner) in vars(holder)[_MARK].layouts.items() if self.marks(holder) else ():
                key = id(platform.own_parameters(holder).get(name))
                if key not in indices:
                    indices[key] = len(indices)
                    read_as.append(inner)
                slots.append(Slot(path, name, indices[key], layout))
        return ReplicatedUnit(module, self.options, slots, read_as, None if whole is None else whole.shared)

    def __deepcopy__(self, memo: dict) -> _Mark:
        return self


def _unit_of(module: Any) -> ReplicatedUnit:
    """Return the `ReplicatedUnit` of a module under `replicate`. The unit is created at first use."""
    unit: ReplicatedUnit | None = vars(module)[_UNIT]
    if unit is None:
        mark: _Mark = vars(module)[_MARK]
        unit = mark.unit(module)
        for _, submodule in unit.platform.named_modules(module):
            if mark.marks(submodule):
                object.__setattr__(submodule, _UNIT, unit)
    return unit


def _entered(forward: Callable[..., Any], requires_grad: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return the function that a call of a module runs in place of ``forward``.

    The outermost call, usually of the full model, puts local parameters into all submodules. Calls inside it change
    nothing.

    Args:
        forward: the module's own forward.
        requires_grad: the function `Platform.requires_grad`.
    """

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        unit: ReplicatedUnit = module.__dict__[_UNIT] or _unit_of(module)
        shared = unit.shared
        if not shared.running:
            if module is not unit.module:  # a submodule, which is called directly
                whole, unit = unit, unit.parts.get(id(module)) or vars(module)[_MARK].unit(module, unit)
                whole.parts[id(module)] = unit
            if CHECKS or unit.checked < CHECKED:
                _look_for_added(unit)
            return unit.run(forward, args, kwargs)
        if shared.call is not None and not requires_grad(shared.call.anchors[0]):
            # Backward may be recomputing this forward, so no bucket counts as complete until the end.
            shared.call.deferred = True
        return forward(module, *args, **kwargs)

    return run


def _look_for_added(unit: ReplicatedUnit) -> None:
    """Raise ValueError if a trained parameter was added below the module of a unit after `replicate`."""
    new = (
        (f"{path}.{name}" if path else name, p)
        for path, holder in unit.platform.named_modules(unit.module)
        if _LEFT not in vars(holder)
        for name, p in unit.platform.named_parameters(holder)
        if _MARK not in vars(holder) or name not in vars(holder)[_MARK].layouts
    )
    unit.checked += refuse_added(new, unit.mesh, unit.what, "replicate", "ignored_modules")


def _layouts(p: Any, what: str, mesh: DeviceMesh) -> tuple[Layout, Layout | None]:
    """Return a parameter's new layout, and its present tensor-parallel layout, or None for a plain parameter.

    Raises:
        ValueError, TypeError: for a parameter that cannot be replicated.
    """
    platform = mesh.platform
    if isinstance(p, DTensor):
        inner: Layout = p._layout
        try:
            return nest(inner, mesh, [Replicate()], inner.shape), inner
        except ValueError as error:
            raise ValueError(
                f"{what} is placed {list(inner.placements)} on {inner.mesh} already, and cannot be replicated over "
                f"{mesh}: {error}. If another module shares the parameter, apply replicate or fully_shard once, to a "
                "module that contains both"
            ) from None
    refuse_foreign(p, platform, what)
    if platform.needs_values and not platform.has_values(p) and not platform.is_meta(p):
        raise ValueError(f"{what} has no values: initialise the model on this rank's device first")
    return nest(None, mesh, [Replicate()], platform.shape_of(p)), None


def _check_devices(device_ids: Sequence[Any] | None, platform: Platform) -> None:
    """Raise ValueError if ``device_ids`` names anything but the one device of this rank."""
    if not device_ids:
        return
    own = str(platform.to_device(platform.host_tensor(np.zeros(1, np.int32))).device)
    given = [str(device) for device in device_ids]
    if given not in ([own], [own.rpartition(":")[2]]):
        raise ValueError(
            f"replicate(device_ids={list(device_ids)!r}): this rank has the device {own!r} alone. Leave device_ids out"
        )


def _local(p: Any, platform: Platform) -> Any:
    with platform.no_dispatch(), platform.no_grad():
        return platform.to_device(platform.detach(p))


def _apply(module: Any, mark: _Mark) -> None:
    """Make one module run on local parameters, and add the methods of `ReplicatedModule`."""
    platform = mark.options.mesh.platform
    object.__setattr__(module, _MARK, mark)
    object.__setattr__(module, _UNIT, None)
    platform.replace_forward(module, lambda forward: _entered(forward, platform.requires_grad), ReplicatedModule)
    object.__setattr__(module, APPLIED, (*getattr(module, APPLIED, ()), (_Again(mark), mark.options.mesh)))


class _Again:
    """Function that applies `replicate` again to an unpickled module."""

    def __init__(self, mark: _Mark) -> None:
        self._mark = mark

    def _apply(self, module: Any, mesh: DeviceMesh) -> Any:
        _apply(module, self._mark)
        return module
