"""Factory functions for distributed tensors. Mirrors the factories of ``torch.distributed.tensor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.api import shard_of
from hyper_parallel.core.dtensor.tensor import bind_platform
from hyper_parallel.core.layouts.layout import requested_layout
from hyper_parallel.core.layouts.placement_types import Placement
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.rules import counter
from hyper_parallel.core.rules.random import synchronize, take_part

#: Frameworks' other names of device types -> this library's names.
_DEVICE_NAMES = {"ascend": "npu", "gpu": "cuda"}


def zeros(*size: Any, **options: Any) -> Any:
    """Return a DTensor of zeros. Nothing is communicated, and each rank allocates only its shard.

    Args:
        size: global shape, as one sequence or as ints.
        dtype: dtype of the framework; None for the framework's default.
        layout: None or the framework's dense memory layout (``torch.strided``).
        device: None or the mesh's device. Only its type is compared.
        requires_grad: whether autograd records operations on the result.
        device_mesh: the mesh; None for the mesh entered with ``with mesh:``.
        placements: `Shard` or `Replicate` for each mesh dimension; None for `Replicate` everywhere.

    Returns:
        A DTensor of the shape ``size`` on the mesh's device.

    Raises:
        ValueError: for wrong placements (`Partial` included), a negative size, another layout or another device.
        TypeError: for an option that does not exist.

    Example:
        >>> from hyper_parallel import Shard, init_device_mesh, zeros
        >>> zeros(4, 2, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(0)]).placements
        (Shard(dim=0),)

    Source: ``torch.distributed.tensor.zeros``.
    """
    return _make("zeros", size, 0.0, **options)


def ones(*size: Any, **options: Any) -> Any:
    """Return a DTensor of ones. Arguments and errors are those of `zeros`."""
    return _make("ones", size, 1.0, **options)


def empty(*size: Any, **options: Any) -> Any:
    """Return an uninitialised DTensor. Arguments and errors are those of `zeros`."""
    return _make("empty", size, None, **options)


def full(size: Sequence[int], fill_value: Any, **options: Any) -> Any:
    """Return a DTensor in which every element is ``fill_value``.

    Args:
        size: global shape, as a sequence.
        fill_value: a Python number. It determines the dtype unless ``dtype`` is passed.
        options: ``dtype``, ``layout``, ``device``, ``requires_grad``, ``device_mesh`` and ``placements`` of `zeros`.

    Example:
        >>> from hyper_parallel import full, init_device_mesh
        >>> full((2,), 1.5, device_mesh=init_device_mesh("cpu", (1,))).full_tensor()
        tensor([1.5000, 1.5000])
    """
    return _make("full", (size,), fill_value, **options)


def rand(*size: Any, **options: Any) -> Any:
    """Return a DTensor of random numbers, uniform in [0, 1).

    The numbers equal those of the framework's generator on a single device with the same seed. This holds for any
    number of ranks and any placements. Every rank draws the full tensor and keeps its shard. If the generators of the
    ranks differ, all ranks use the first rank's state.

    Each rank draws only its shard if `manual_seed` was called with that option. Arguments and errors are those of
    `zeros`.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, init_device_mesh, manual_seed, rand
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> manual_seed(0, mesh)
        >>> x = rand(4, 2, device_mesh=mesh, placements=[Shard(0)])
        >>> torch.equal(x.full_tensor(), torch.rand(4, 2, generator=torch.Generator().manual_seed(0)))
        True
    """
    return _make("rand", size, None, **options)


def randn(*size: Any, **options: Any) -> Any:
    """Return a DTensor of random numbers with the standard normal distribution, drawn like those of `rand`."""
    return _make("randn", size, None, **options)


def linspace(start: float, end: float, steps: int, **options: Any) -> Any:
    """Return a 1-D DTensor of ``steps`` evenly spaced numbers from ``start`` to ``end``, equal to those of a single
    device.

    Args:
        start, end: the first number and the last one.
        steps: number of elements.
        options: options of `full`.

    Raises:
        ValueError, TypeError: as in `zeros`.

    Example:
        >>> from hyper_parallel import Shard, init_device_mesh, linspace
        >>> linspace(0, 1, 3, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(0)]).full_tensor()
        tensor([0.0000, 0.5000, 1.0000])

    Source: ``torch.distributed.tensor.linspace``.
    """
    return _make("linspace", (steps,), (start, end), **options)


def logspace(start: float, end: float, steps: int, base: float = 10.0, **options: Any) -> Any:
    """Return a 1-D DTensor of powers of ``base``, whose exponents are the numbers of `linspace`.

    Arguments and errors are those of `linspace`.

    Example:
        >>> from hyper_parallel import init_device_mesh, logspace
        >>> logspace(0, 2, 3, base=2.0, device_mesh=init_device_mesh("cpu", (1,))).full_tensor()
        tensor([1., 2., 4.])

    Source: ``torch.distributed.tensor.logspace``.
    """
    return _make("logspace", (steps,), (start, end, base), **options)


def _make(
    name: str,
    size: tuple,
    fill_value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Any:
    mesh = resolve_mesh(device_mesh, name)
    platform = bind_platform(mesh.platform)
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    if any(n < 0 for n in shape):
        raise ValueError(f"{name}: sizes must not be negative, got {shape}")
    if layout is not None and layout is not platform.dense_layout:
        raise ValueError(f"{name} makes strided tensors, got layout={layout!r}: leave layout out")
    kind = str(mesh.device_type if device is None else device).lower().partition(":")[0]
    if _DEVICE_NAMES.get(kind, kind) != mesh.device_type:
        raise ValueError(
            f"{name}: a tensor on {mesh} has the device type {mesh.device_type!r}, got device={device!r}: leave "
            "device out, or make a mesh of that device type"
        )
    whole = requested_layout(mesh, placements, shape, f"a tensor of shape {shape}")
    if any(p.is_partial() for p in whole.placements):
        raise ValueError(f"{name} makes sharded or replicated tensors, got placements {list(whole.placements)}")
    with platform.no_dispatch():
        if name in ("rand", "randn") and mesh.get_coordinate() is not None:
            synchronize(mesh)
            if counter.draws_by_counter(mesh):
                dtype = platform.dtype_of(platform.factory("empty", (0,), None, None)) if dtype is None else dtype
                local = counter.numbers("uniform" if name == "rand" else "normal", whole, dtype)
            else:
                # Every rank draws the full tensor and keeps its shard, so that the numbers are those of a single
                # device.
                local = take_part(platform.factory(name, shape, fill_value, dtype), whole)
        elif name in ("linspace", "logspace"):
            local = shard_of(platform.factory(name, shape, fill_value, dtype), whole, None)
        else:
            kind = "full" if fill_value is not None else name
            local = platform.factory(kind, whole.local_shape, fill_value, dtype)
    x = platform.wrap(local, whole)
    if requires_grad:
        x.requires_grad_(True)
    return x
