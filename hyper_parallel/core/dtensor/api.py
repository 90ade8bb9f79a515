"""Functions that distribute full tensors, parameters and modules. Mirrors functions of ``torch.distributed.tensor``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.shard_steps import by_rank
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform
from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.cuts import in_order
from hyper_parallel.core.layouts.layout import Layout, requested_layout
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.operations.operands import refuse_foreign
from hyper_parallel.core.operations.owners import remember_model


def distribute_tensor(
    tensor: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Distribute a full tensor over a mesh.

    Args:
        tensor: plain tensor of the global shape and any dtype, on every rank. It is copied to the mesh's device if
            necessary. A DTensor with these placements is returned unchanged.
        device_mesh: the mesh; None is the one entered with ``with mesh:``.
        placements: `Shard` or `Replicate` for each mesh dimension; None for `Replicate` everywhere. With `Partial`, the
            first rank along the mesh dimension holds the value. The other ranks hold neutral values: zeros for a sum,
            ones for a product, and the value itself for other reductions.
        src_data_rank: source rank of the data, as an index along each mesh dimension. Each mesh dimension takes one
            scatter or broadcast. With None, each rank uses its local data, without communication.

    Returns:
        A DTensor of the same global shape, dtype and ``requires_grad``. It is a leaf of the autograd graph.

    Raises:
        TypeError: when ``tensor`` is not a tensor of the platform, or is another library's distributed tensor.
        ValueError: for wrong placements, a ``src_data_rank`` outside the mesh, or a DTensor with other placements.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh
        >>> distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)]).placements
        (Shard(dim=0),)

    Source: ``torch.distributed.tensor.distribute_tensor``.
    """
    mesh = resolve_mesh(device_mesh, "distribute_tensor")
    platform = bind_platform(mesh.platform)
    if not platform.is_tensor(tensor):
        raise TypeError(f"distribute_tensor takes a tensor of the platform, got {type(tensor).__name__}")
    refuse_foreign(tensor, platform, "distribute_tensor")
    shape = tuple(tensor.shape)
    layout = requested_layout(mesh, placements, shape, f"a tensor of shape {shape}")
    if isinstance(tensor, DTensor):
        if tensor._layout is not layout:
            raise ValueError(
                f"distribute_tensor got a DTensor placed {list(tensor.placements)} on {tensor.device_mesh}, and "
                f"cannot place it {list(layout.placements)} on {mesh}: use tensor.redistribute(placements=...)"
            )
        return tensor
    check_src_data_rank(src_data_rank, mesh)
    x = platform.wrap(shard_of(tensor, layout, src_data_rank), layout)
    if platform.requires_grad(tensor):
        x.requires_grad_(True)
    return x


def distribute_parameter(
    module: Any,
    name: str,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    *,
    src_data_rank: int | None = 0,
) -> None:
    """Distribute the parameter ``module.<name>`` in place. Its name, its ``requires_grad`` and ties to other modules
    are preserved.

    Args:
        module: module that owns the parameter directly.
        name: name of the parameter in ``module``, such as ``"weight"``.
        device_mesh: the mesh.
        placements: `Shard` or `Replicate` for each mesh dimension; None for `Replicate` everywhere. A parameter that is
            distributed already, because another module shares it, must have these placements.
        src_data_rank: as in `distribute_tensor`.

    Raises:
        KeyError: when ``module`` has no parameter of that name.
        ValueError: for wrong placements, or a tied parameter with other placements.

    Example:
        >>> from torch import nn
        >>> from hyper_parallel import Shard, distribute_parameter, init_device_mesh
        >>> linear = nn.Linear(4, 6)
        >>> distribute_parameter(linear, "weight", init_device_mesh("cpu", (1,)), [Shard(0)])
        >>> linear.weight.placements
        (Shard(dim=0),)
    """
    device_mesh = resolve_mesh(device_mesh, "distribute_parameter")
    platform = bind_platform(device_mesh.platform)
    parameter = dict(platform.named_parameters(module))[name]
    refuse_foreign(parameter, platform, f"distribute_parameter({name!r}) of {type(module).__name__}")
    layout = requested_layout(device_mesh, placements, tuple(parameter.shape), f"parameter {name!r}")
    if isinstance(parameter, DTensor):
        if parameter._layout is not layout:
            raise ValueError(
                f"parameter {name!r} of {type(module).__name__} is placed {list(parameter.placements)} on "
                f"{parameter.device_mesh} already and cannot be placed {list(layout.placements)} on {device_mesh}: "
                "modules that share a parameter need styles that shard it the same way"
            )
        return
    check_src_data_rank(src_data_rank, device_mesh)
    platform.set_distributed_parameter(module, name, shard_of(parameter, layout, src_data_rank), layout)


def distribute_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, Any, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Distribute the parameters and buffers of a module and, with hooks, its inputs and outputs.

    Args:
        module: module of the framework; it is changed in place.
        device_mesh: the mesh; None is the one entered with ``with mesh:``.
        partition_fn: ``partition_fn(path, submodule, mesh)`` is called for every submodule, and for ``module`` itself.
            It distributes parameters, for example with `distribute_parameter`. Remaining plain parameters are
            replicated.
        input_fn: ``input_fn(module, args, mesh)`` returns the new positional inputs;
            ``input_fn(module, args, kwargs, mesh)`` returns ``(args, kwargs)``. Torch's older ``input_fn(args, mesh)``
            is supported too.
        output_fn: ``output_fn(module, output, mesh)`` returns the new output. The older ``output_fn(output, mesh)`` is
            supported too.
        src_data_rank: as in `distribute_tensor`.

    Returns:
        ``module``.

    Raises:
        ValueError: when ``input_fn`` or ``output_fn`` takes another number of arguments. The module is unchanged then.

    Example:
        >>> from torch import nn
        >>> from hyper_parallel import Shard, distribute_module, distribute_parameter, init_device_mesh
        >>> def by_rows(path, module, mesh):
        ...     if isinstance(module, nn.Linear):
        ...         distribute_parameter(module, "weight", mesh, [Shard(0)])
        >>> model = distribute_module(nn.Sequential(nn.Linear(4, 6)), init_device_mesh("cpu", (1,)), by_rows)
        >>> model[0].weight.placements, model[0].bias.placements
        ((Shard(dim=0),), (Replicate(),))

    Source: ``torch.distributed.tensor.distribute_module``.
    """
    mesh = resolve_mesh(device_mesh, "distribute_module")
    platform = bind_platform(mesh.platform)
    pre_hook = None if input_fn is None else _input_hook(input_fn, mesh)
    hook = None if output_fn is None else _output_hook(output_fn, mesh)
    for path, submodule in list(platform.named_modules(module)):
        if partition_fn is not None:
            partition_fn(path, submodule, mesh)
        replicate_undistributed(submodule, mesh, src_data_rank)
    if pre_hook is not None:
        platform.register_forward_pre_hook(module, pre_hook, with_kwargs=True)
    if hook is not None:
        platform.register_forward_hook(module, hook)
    remember_model(module)
    return module


def replicate_undistributed(module: Any, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replicate the plain parameters and buffers that ``module`` owns directly."""
    platform = mesh.platform
    for name, parameter in list(platform.named_parameters(module)):
        if not isinstance(parameter, DTensor):
            distribute_parameter(module, name, mesh, None, src_data_rank=src_data_rank)
    for name, buffer in list(platform.named_buffers(module)):
        if not isinstance(buffer, DTensor):
            platform.set_buffer(module, name, distribute_tensor(buffer, mesh, src_data_rank=src_data_rank))


def check_src_data_rank(src_data_rank: int | None, mesh: DeviceMesh) -> None:
    """Raise unless ``src_data_rank`` is None or an index along every mesh dimension."""
    if src_data_rank is not None and (not isinstance(src_data_rank, int) or isinstance(src_data_rank, bool)):
        raise TypeError(f"src_data_rank is an int, or None to communicate nothing, got {src_data_rank!r}")
    if src_data_rank is not None and not 0 <= src_data_rank < min(mesh.shape):
        raise ValueError(
            f"src_data_rank={src_data_rank} is not an index along every dimension of {mesh}: use 0 to "
            f"{min(mesh.shape) - 1}, or None to communicate nothing"
        )


def shard_of(tensor: Any, layout: Layout, src_data_rank: int | None) -> Any:
    """Return this rank's shard of a full plain tensor, as a new plain tensor."""
    mesh, platform = layout.mesh, layout.mesh.platform
    if platform.is_meta(tensor) and not platform.keeps_meta:
        shape = (0,) if mesh.get_coordinate() is None else layout.local_shape
        return platform.factory("full", shape, math.nan if platform.is_floating_point(tensor) else 0, tensor.dtype)
    with platform.no_dispatch(), platform.no_grad():
        local = platform.to_device(platform.detach(tensor))
        if mesh.get_coordinate() is None:
            return platform.zeros((0,), local)
        source = None if platform.is_meta(local) else src_data_rank
        for mesh_dim in in_order(layout.placements, mesh.shape):
            placement, rank = layout.placements[mesh_dim], mesh.get_local_rank(mesh_dim)
            if isinstance(placement, Shard):
                sizes = shard_sizes(placement, platform.shape_of(local)[placement.dim], mesh.shape[mesh_dim])
                local = by_rank(local, placement, mesh.shape[mesh_dim], platform)
                if source is not None:
                    local = collectives.scatter(local, mesh, mesh_dim, placement.dim, sizes, source)
                else:
                    local = platform.narrow(local, placement.dim, sum(sizes[:rank]), sizes[rank])
            elif source is not None:
                local = collectives.broadcast(platform.clone(local), mesh, mesh_dim, source)
            if rank != 0 and (placement is Partial() or placement is Partial("product")):
                neutral = platform.zeros if placement is Partial() else platform.ones
                local = neutral(platform.shape_of(local), local)
        return platform.clone(local)


def _input_hook(input_fn: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    arity = _arity(input_fn)
    if arity == 4:
        return lambda module, args, kwargs: input_fn(module, args, kwargs, mesh)
    if arity not in (2, 3):
        raise ValueError(
            f"input_fn must take (module, args, mesh) or (module, args, kwargs, mesh), it takes {arity} argument(s)"
        )

    def hook(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        new = input_fn(module, args, mesh) if arity == 3 else input_fn(args, mesh)
        if new is None:
            return args, kwargs
        return (new if isinstance(new, tuple) else (new,)), kwargs

    return hook


def _output_hook(output_fn: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    arity = _arity(output_fn)
    if arity == 2:
        return lambda module, args, output: output_fn(output, mesh)
    if arity != 3:
        raise ValueError(f"output_fn must take (module, output, mesh), it takes {arity} argument(s)")
    return lambda module, args, output: output_fn(module, output, mesh)


def _arity(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)
