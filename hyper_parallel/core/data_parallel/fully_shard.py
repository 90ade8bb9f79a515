"""`fully_shard`: parameters, gradients and optimizer state are sharded over data-parallel ranks (ZeRO-3). Mirrors
``torch.distributed.fsdp.fully_shard``.

Each call makes a unit (`unit.py`) of the parameters below a module that belong to no unit yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from types import MethodType
from typing import Any

from hyper_parallel.core.data_parallel.flat_buffer import FlatBuffer
from hyper_parallel.core.data_parallel.hooks import refuse_compiling
from hyper_parallel.core.data_parallel.module_methods import FSDPModule
from hyper_parallel.core.data_parallel.options import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    data_parallel_mesh,
    fewer_ranks,
)
from hyper_parallel.core.data_parallel.places import Slot
from hyper_parallel.core.data_parallel.unit import Unit, is_unit, make_unit, unit_of
from hyper_parallel.core.data_parallel.unit_facts import CHECKED, UnitFacts, check_memory, refuse_added
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.nesting import nest
from hyper_parallel.core.layouts.placement_types import PackedShard, Placement, Replicate, Shard, own_placement
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.operations.operands import refuse_foreign
from hyper_parallel.core.operations.owners import remember_model
from hyper_parallel.core.tensor_parallel.styles.experts import has_its_gradients
from hyper_parallel.core.weak_table import WeakTable

__all__ = ["buffers_of", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

#: parameter -> its name in the unit that it belongs to.
_OWNED = WeakTable()
#: The parameters that `fully_shard` has left as they are, as keys.
_LEFT = WeakTable()


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Any], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - cannot be changed
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Iterable[Any] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of a module over data-parallel ranks (ZeRO-3), in place.

    The parameters below ``module`` that belong to no unit yet become one unit. Apply `fully_shard` to the blocks of a
    model, then to the model. Parameters, their gradients and the optimizer's state become DTensors, and each rank holds
    one shard of each. While the module runs, in forward and in backward, its parameters are unsharded. One all-gather
    for each dtype unshards them, and modules read each parameter as before `fully_shard`. In backward one
    reduce-scatter for each dtype averages the gradients over the ranks. Each rank has a local part of the batch and a
    local loss. If the batch consists of DTensors on ``mesh``, all ranks share one loss, and gradients are summed.

    With tensor parallelism: call `parallelize_module` first, over another dimension of the same mesh.

    Each rank shards its local values, so all ranks must start with the same values. If the module's forward sets an
    auxiliary loss as an attribute, add the auxiliary loss to the main loss. One backward has to serve both.

    Args:
        module: module of the selected platform, or a list of modules that are one unit. The parameters of a list are
            gathered when its first module runs. They are freed when all have run, or the outermost unit's forward ends.
        mesh: 1-D mesh that shards, or 2-D mesh whose first dimension replicates and whose second shards. None stands
            for the mesh entered with ``with mesh:``, or else for all ranks in one dimension.
        reshard_after_forward: free the unsharded parameters after forward, and gather them again in backward. None
            means True for all units but the outermost, where backward starts. A number n reshards them over groups of n
            consecutive ranks after forward, so that the gather in backward is faster. The number must divide the number
            of sharding ranks, and all ranks of the world must make this call then.
        shard_placement_fn: ``shard_placement_fn(parameter)`` returns the `Shard` placement of a parameter; None means
            ``Shard(0)``. Sizes need not be divisible.
        mp_policy: dtypes in which to compute and communicate.
        offload_policy: where shards are stored.
        ignored_params: parameters that stay unchanged.
        dp_mesh_dims: the dimensions of ``mesh`` that shard and replicate; ``mesh`` is the mesh of the whole job then.

    Returns:
        ``module``, which is now an `FSDPModule` too, as are the modules of a list.

    Raises:
        TypeError: for a module of another framework, and for arguments of other types. On MindSpore also when the
            module is called, if its result is anything but tensors in tuples, lists, dicts and dataclasses.
        ValueError: on all ranks, before anything is changed, for a mesh of more dimensions, a module that is a unit
            already, a parameter that belongs to another unit, a trained parameter that shares memory with another
            tensor of the module, and a number n that does not divide the number of ranks.
            When the module is called, before communication, if something else has replaced a parameter, or a trained
            parameter was added to the unit.
        RuntimeError: when a compiler traces the module's call, as `torch.export` does; for gradients of gradients of
            parameters; for a parameter that was changed between forward and backward.

    Example:
        >>> from torch import nn
        >>> from hyper_parallel import fully_shard, init_device_mesh
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> for block in model:
        ...     _ = fully_shard(block, mesh=mesh)
        >>> fully_shard(model, mesh=mesh)[0].weight.placements
        (Shard(dim=0),)

    Source: ``torch.distributed.fsdp.fully_shard``; Rajbhandari et al. 2020.
    """
    mesh = data_parallel_mesh(mesh, dp_mesh_dims)
    platform = bind_platform(mesh.platform)
    modules = _listed(module, platform)
    _check_options(mp_policy, offload_policy)
    mesh.require_member("fully_shard")
    name_of_unit = " and ".join(type(one).__name__ for one in modules)
    fewer = fewer_ranks(mesh, reshard_after_forward)
    ignored = {id(p) for p in ignored_params or ()}
    slots: list[Slot] = []
    placed: dict[int, tuple[int, Layout, Layout | None, int | None]] = {}  # by id: index, layouts, dimension
    parameters: list[tuple[Any, str, Any]] = []
    keeps_dtype: list[bool] = []
    left: list[tuple[str, str]] = []
    for root, path, holder in _modules_of(modules, platform):
        has_them = has_its_gradients(holder, mesh, "fully_shard")
        for name, p in platform.named_parameters(holder):
            if has_them or id(p) in ignored:
                left.append((path, name))
                _LEFT.set(p, True)
                continue
            what = f"fully_shard: parameter {_join(path, name)!r} of {type(modules[root]).__name__}"
            if id(p) not in placed:
                placed[id(p)] = (len(parameters), *_placement(p, mesh, shard_placement_fn, what))
                parameters.append((holder, name, p))
                keeps_dtype.append(mp_policy.keeps_dtype(p, what))
            index, layout, _, _ = placed[id(p)]
            slots.append(Slot(path, name, index, layout, root))
    check_memory(modules, [p for _, _, p in parameters], platform)
    entries = list(placed.values())
    shapes = [tuple(platform.shape_of(p)) for _, _, p in parameters]
    inner, dims = [entry[2] for entry in entries], [entry[3] for entry in entries]
    if not isinstance(reshard_after_forward, bool) and reshard_after_forward is not None:
        reshard_after_forward = reshard_after_forward > 1
    facts = UnitFacts(
        mesh, slots, inner, shapes, dims, reshard_after_forward, mp_policy, offload_policy, fewer, keeps_dtype, left
    )
    for (holder, name, p), (_, layout, _, dim) in zip(parameters, entries, strict=True):
        with platform.no_grad(), platform.no_dispatch():
            local = facts.stored(_shard_of(platform.detach(p), mesh, dim))
        platform.set_distributed_parameter(holder, name, local, layout)
        _OWNED.set(platform.own_parameters(holder)[name], f"{name!r} of {type(holder).__name__}")
    make_unit(modules, facts)
    for one in modules:
        remember_model(one)
    what = f"{name_of_unit} under fully_shard"
    for one in modules:
        platform.replace_forward(one, lambda forward: _sharded(forward, platform, what), FSDPModule)
    unit_of(modules[0]).move()
    return module


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Let a method of a module compute with unsharded parameters, as its forward does.

    Args:
        module: module to which `fully_shard` was applied. Any other module stays unchanged.
        method_name: name of the method.

    Raises:
        ValueError: for a method that the module does not have.

    Example:
        >>> import torch
        >>> from hyper_parallel import fully_shard, init_device_mesh, register_fsdp_forward_method
        >>> class Scale(torch.nn.Linear):
        ...     def total(self):
        ...         return self.weight.sum()
        >>> scale = fully_shard(Scale(4, 6), mesh=init_device_mesh("cpu", (1,)))
        >>> register_fsdp_forward_method(scale, "total")
        >>> type(scale.total()) is torch.Tensor
        True

    Source: ``torch.distributed.fsdp.register_fsdp_forward_method``.
    """
    if not is_unit(module):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_fsdp_forward_method: a {type(module).__name__} has no method {method_name!r}")
    own = getattr(method, "__self__", None) is module
    # The function is called with the module at hand, which may be a copy.
    function = method.__func__ if own else lambda _, *args, **kwargs: method(*args, **kwargs)

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return unit_of(self).run(self, function, args, kwargs)

    object.__setattr__(module, method_name, MethodType(run, module))


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Let several models share the state of their communication. The call changes nothing, because all models always
    share this state.

    Collectives run on the streams of their groups.

    Args:
        modules: modules to which `fully_shard` was applied.

    Raises:
        ValueError: for other modules.

    Source: ``torch.distributed.fsdp.share_comm_ctx``.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"share_comm_ctx takes modules to which fully_shard was applied, got a {type(module).__name__}"
            )


def _listed(module: Any, platform: Any) -> list[Any]:
    """Return the modules that shall form one unit, as a list.

    Raises:
        TypeError: for anything but modules.
        ValueError: for an empty list, a module inside another one, and a module that is a unit already.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for one in modules:
        if not isinstance(one, platform.Module):
            raise TypeError(
                f"fully_shard takes a {platform.Module.__name__} of the platform {platform.name!r}, or a list of them, "
                f"got {type(one).__name__}"
            )
        if is_unit(one):
            raise ValueError(f"fully_shard was applied to this {type(one).__name__} already")
    if not modules or _meet(modules, platform):
        raise ValueError(
            "fully_shard takes a list of distinct modules, none inside of another, got "
            f"{[type(one).__name__ for one in modules]}"
        )
    return modules


def _meet(modules: Sequence[Any], platform: Any) -> bool:
    """Return whether two of the modules are the same, or one contains another."""
    below = [{id(inner) for _, inner in platform.named_modules(one)} for one in modules]
    return any(id(one) in inner for i, one in enumerate(modules) for j, inner in enumerate(below) if i != j)


def buffers_of(module: Any) -> list[FlatBuffer]:
    """Return the flat buffers of a unit, one for each dtype; none before its first call."""
    return unit_of(module).parameters.buffers if is_unit(module) else []


def _sharded(forward: Callable[..., Any], platform: Any, what: str) -> Callable[..., Any]:
    """Return a function that runs ``forward(module, ...)`` with unsharded parameters."""

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_compiling(platform, what)
        unit = unit_of(module)
        if CHECKS or unit.parameters.settings.checked.get(id(module), 0) < CHECKED:
            _look_for_added(unit, module)
        return unit.run(module, forward, args, kwargs)

    return run


def _look_for_added(unit: Unit, module: Any) -> None:
    """Raise ValueError if a trained parameter was added to a module of a unit after `fully_shard`."""
    facts, checked, platform = unit.parameters.facts, unit.parameters.settings.checked, unit.platform
    new = (
        (_join(path, name), p)
        for _, path, holder in _modules_of([module], platform, module)
        for name, p in platform.named_parameters(holder)
        if (path, name) not in facts.known and _LEFT.get(p) is None
    )
    if refuse_added(new, facts.mesh, unit.what, "fully_shard", "ignored_params"):
        checked[id(module)] = checked.get(id(module), 0) + 1


def _check_options(mp_policy: Any, offload_policy: Any) -> None:
    for keyword, given, kind in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
    ):
        if not isinstance(given, kind):
            raise TypeError(
                f"fully_shard({keyword}=...) takes a hyper_parallel {kind.__name__}, got a {type(given).__module__}."
                f"{type(given).__name__}"
            )


def _modules_of(modules: Sequence[Any], platform: Any, called: Any = None) -> Iterator[tuple[int, str, Any]]:
    """Yield ``(root, path, module)`` for each module that belongs to no unit, or to the unit of ``called``.

    ``path`` leads from ``modules[root]`` to the yielded ``module``.
    """
    for root, module in enumerate(modules):
        inside: tuple[str, ...] = ()
        for path, submodule in platform.named_modules(module):
            if path.startswith(inside):
                continue
            if is_unit(submodule) and submodule is not called:
                inside = (*inside, f"{path}.")
            else:
                yield root, path, submodule


def _placement(
    p: Any, mesh: DeviceMesh, shard_placement_fn: Callable[[Any], Any] | None, what: str
) -> tuple[Layout, Layout | None, int | None]:
    """Return a parameter's new layout, its present layout (None if plain) and the sharded dimension (None if
    replicated)."""
    owner = _OWNED.get(p)
    if owner is not None:
        raise ValueError(
            f"{what} is sharded by fully_shard already, as {owner}: apply fully_shard once, to a module that contains "
            "all modules with this parameter"
        )
    refuse_foreign(p, mesh.platform, what)
    inner = p._layout if isinstance(p, DTensor) else None
    if inner is not None:
        _check_inner(inner, mesh, what)
    shape = tuple(p.shape)
    wanted = None if shard_placement_fn is None else own_placement(shard_placement_fn(p))
    if wanted is None:
        wanted = Shard(0) if shape else Replicate()
    elif not isinstance(wanted, Shard) or isinstance(wanted, PackedShard):
        raise TypeError(f"{what}: shard_placement_fn must return a Shard or None, got {wanted!r}")
    elif not -len(shape) <= wanted.dim < len(shape):
        raise ValueError(
            f"{what} has shape {shape}, but shard_placement_fn returned {wanted!r}: return a dimension of the parameter"
        )
    else:
        wanted = Shard(wanted.dim % len(shape))
    placements: tuple[Placement, ...] = (*(Replicate(),) * (mesh.ndim - 1), wanted)
    return nest(inner, mesh, placements, shape), inner, wanted.dim if isinstance(wanted, Shard) else None


def _check_inner(inner: Layout, mesh: DeviceMesh, what: str) -> None:
    """Raise ValueError unless the tensor-parallel mesh and ``mesh`` are different dimensions of one root mesh."""
    if not mesh.is_beside(inner.mesh):
        raise ValueError(
            f"{what} is placed {list(inner.placements)} on {inner.mesh}: fully_shard needs another dimension of the "
            f"same root mesh, got {mesh}. Make one mesh with init_device_mesh, with mesh_dim_names=('dp', 'tp'). Pass "
            "mesh['tp'] to parallelize_module and mesh['dp'] to fully_shard"
        )


def _shard_of(local: Any, mesh: DeviceMesh, dim: int | None) -> Any:
    """Return this rank's chunk of a plain tensor, as a new tensor on this rank's device."""
    platform = mesh.platform
    local = platform.to_device(local)
    if dim is not None:
        sizes = chunk_sizes(platform.shape_of(local)[dim], mesh.shape[-1])
        rank = mesh.get_local_rank(mesh.ndim - 1)
        local = platform.narrow(local, dim, sum(sizes[:rank]), sizes[rank])
    return platform.clone(local)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
