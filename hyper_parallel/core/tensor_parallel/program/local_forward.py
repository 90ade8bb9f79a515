"""`LocalForward`: fast paths of a module with a single input, which are built when its style is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Placement, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.following import FOLLOWING, UNEVEN


@dataclass(frozen=True)
class LocalForward:
    """Functions that a module with a single input runs in place of its forward.

    Both functions return NotImplemented, without side effects, for an unsupported input. They also return
    NotImplemented if a parameter of the plan was replaced, or is computed by a parametrization.

    Attributes:
        plain: ``plain(module, x)`` for a plain tensor; None if plain tensors need the conversions of the style.
        distributed: ``distributed(module, x)`` for a DTensor.
        given: placement that ``plain`` assumes for a plain tensor, if ranks must compare their tensors; otherwise None.
            Ranks compare the sizes of shards, and the values of replicated tensors.
        gives: placement of the output, for followed programs; None if they cannot follow the output.
        lost: reason for reports, if the output cannot be followed.
    """

    plain: Callable[[Any, Any], Any] | None
    distributed: Callable[[Any, Any], Any]
    given: Placement | None = None
    gives: Placement | None = None
    lost: str = UNEVEN


def layout_of_even_part(x: Any, mesh: DeviceMesh, placement: Placement) -> Layout:
    """Return the global layout for a local tensor ``x``, assuming that all ranks have shards of one size."""
    shape = list(x.shape)
    if isinstance(placement, Shard):
        placement = placement.with_dim(placement.dim % len(shape))
        shape[placement.dim] *= mesh.size()
    return get_layout(mesh, (placement,), tuple(shape))


def tell_output(local: LocalForward, y: Any, whole: tuple[int, ...], mesh: DeviceMesh) -> Any:
    """Report the placement of a plain output ``y`` to `check_plain_code`, if it follows the program, and return ``y``.

    Args:
        local: fast path that computed ``y``.
        y: output.
        whole: global shape of the input.
        mesh: 1-D mesh.
    """
    if not FOLLOWING or type(y) is not mesh.platform.Tensor:
        return y
    gives, ndim = local.gives, len(whole)
    even = (
        isinstance(gives, Shard) and ndim > 0 and (gives.dim % ndim == ndim - 1 or whole[gives.dim] % mesh.size() == 0)
    )
    if gives is not None and (even or not isinstance(gives, Shard)):
        FOLLOWING[-1].given(y, layout_of_even_part(y, mesh, gives))
    else:
        FOLLOWING[-1].lose(y, local.lost, mesh)
    return y
