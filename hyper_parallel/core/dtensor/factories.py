"""Distributed tensors made from nothing. Mirrors the factories of ``torch.distributed.tensor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.dtensor.layouts.layout import get_layout, normalize_placements
from hyper_parallel.core.dtensor.operations.random import synchronize, take_part
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.dtensor.tensor import bind_platform

__all__ = ["empty", "full", "ones", "rand", "randn", "zeros"]


def zeros(*size: Any, **options: Any) -> Any:
    """A DTensor of zeros.

    Args:
        size: global shape, as one sequence or as ints.
        dtype: dtype; None is the framework's default.
        requires_grad: whether the result records gradients.
        device_mesh: mesh; None is the one entered with ``with mesh:``.
        placements: `Shard` or `Replicate` per mesh dimension; None is `Replicate` everywhere.

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
    """A DTensor of ones; arguments as for `zeros`."""
    return _make("ones", size, 1.0, **options)


def empty(*size: Any, **options: Any) -> Any:
    """A DTensor with any values; arguments as for `zeros`."""
    return _make("empty", size, None, **options)


def full(size: Sequence[int], fill_value: Any, **options: Any) -> Any:
    """A DTensor full of ``fill_value``; the other arguments as for `zeros`."""
    return _make("full", (size,), fill_value, **options)


def rand(*size: Any, **options: Any) -> Any:
    """Uniform numbers from [0, 1): the ones the framework's generator gives a single device with this seed, whatever
    the number of ranks. Arguments as for `zeros`."""
    return _make("rand", size, None, **options)


def randn(*size: Any, **options: Any) -> Any:
    """Standard normal numbers, as `rand`."""
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
    layout = get_layout(mesh, normalize_placements(placements, mesh, len(shape), f"a tensor of shape {shape}"), shape)
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
