"""Factories of distributed tensors. Mirrors the factories of ``torch.distributed.tensor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.dtensor.layouts.layout import requested_layout
from hyper_parallel.core.dtensor.operations.random import synchronize, take_part
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.dtensor.tensor import bind_platform


def zeros(*size: Any, **options: Any) -> Any:
    """A DTensor of zeros. Nothing is communicated, and each rank allocates its own part only.

    Args:
        size: global shape, as one sequence or as ints.
        dtype: dtype of the framework; None is the framework's default.
        requires_grad: whether gradients with respect to the result are recorded.
        device_mesh: the mesh; None is the one entered with ``with mesh:``.
        placements: `Shard` or `Replicate` for each mesh dimension; None is `Replicate` everywhere.

    Returns:
        A DTensor of the shape ``size`` on the mesh's device.

    Raises:
        ValueError: for wrong placements (`Partial` included) or a negative size.
        TypeError: for an option that does not exist.

    Example:
        >>> from hyper_parallel import Shard, init_device_mesh, zeros
        >>> zeros(4, 2, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(0)]).placements
        (Shard(dim=0),)

    Source: ``torch.distributed.tensor.zeros``.
    """
    return _make("zeros", size, 0.0, **options)


def ones(*size: Any, **options: Any) -> Any:
    """A DTensor of ones. Arguments and errors are those of `zeros`."""
    return _make("ones", size, 1.0, **options)


def empty(*size: Any, **options: Any) -> Any:
    """A DTensor whose values are not set. Arguments and errors are those of `zeros`."""
    return _make("empty", size, None, **options)


def full(size: Sequence[int], fill_value: Any, **options: Any) -> Any:
    """A DTensor in which every element is ``fill_value``.

    Args:
        size: global shape, as a sequence.
        fill_value: a Python number, from which the dtype follows unless ``dtype`` is given.
        options: ``dtype``, ``requires_grad``, ``device_mesh`` and ``placements``, as in `zeros`.

    Example:
        >>> from hyper_parallel import full, init_device_mesh
        >>> full((2,), 1.5, device_mesh=init_device_mesh("cpu", (1,))).full_tensor()
        tensor([1.5000, 1.5000])
    """
    return _make("full", (size,), fill_value, **options)


def rand(*size: Any, **options: Any) -> Any:
    """A DTensor of random numbers, uniform in [0, 1).

    They are the numbers that the framework's generator gives to a single device with the same seed, for any number of
    ranks and any placements: every rank draws the whole tensor and keeps its part. Where the generators of the ranks
    differ, the first rank's state counts (`manual_seed`). Arguments and errors are those of `zeros`.

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
    """A DTensor of random numbers with the standard normal distribution, drawn as `rand` draws them."""
    return _make("randn", size, None, **options)


def _make(
    name: str,
    size: tuple,
    fill_value: Any,
    *,
    dtype: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Any:
    mesh = resolve_mesh(device_mesh, name)
    platform = bind_platform(mesh.platform)
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    if any(n < 0 for n in shape):
        raise ValueError(f"{name}: sizes must not be negative, got {shape}")
    layout = requested_layout(mesh, placements, shape, f"a tensor of shape {shape}")
    if any(p.is_partial() for p in layout.placements):
        raise ValueError(f"{name} makes sharded or replicated tensors, got placements {list(layout.placements)}")
    with platform.no_dispatch():
        if name in ("rand", "randn") and mesh.get_coordinate() is not None:
            # Every rank draws the whole tensor and keeps its part: the numbers are those of a single device.
            synchronize(mesh)
            local = take_part(platform.factory(name, shape, fill_value, dtype), layout)
        else:
            kind = "full" if fill_value is not None else name
            local = platform.factory(kind, layout.local_shape, fill_value, dtype)
    x = platform.wrap(local, layout)
    if requires_grad:
        x.requires_grad_(True)
    return x
