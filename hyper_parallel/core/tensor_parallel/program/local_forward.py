"""The shorter way of a module with a single input, of which all is known when its style is applied."""

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
    """Functions that a module runs in place of its forward, depending on the class of its only input.

    Both give NotImplemented, having done nothing, for an input that they do not know. They do so too for a module whose
    parameters are not those of the plan any more. Others were put in their place, or are computed (a parametrization).

    Attributes:
        plain: ``plain(module, x)`` for a plain tensor, None where the style must look at it.
        distributed: ``distributed(module, x)`` for a DTensor.
        given: the placement that ``plain`` assumes of a plain tensor, where the ranks must compare theirs. They compare
            shards by their sizes, and replicated tensors by their values.
        gives: the placement of the output, None for one that a program cannot be followed with: see ``lost``.
        lost: the reason.
    """

    plain: Callable[[Any, Any], Any] | None
    distributed: Callable[[Any, Any], Any]
    given: Placement | None = None
    gives: Placement | None = None
    lost: str = UNEVEN


def layout_of_even_part(x: Any, mesh: DeviceMesh, placement: Placement) -> Layout:
    """Return the layout of the tensor of which ``x`` is this rank's part. All ranks of the 1-D ``mesh`` have parts of
    one size."""
    shape = list(x.shape)
    if isinstance(placement, Shard):
        placement = placement.with_dim(placement.dim % len(shape))
        shape[placement.dim] *= mesh.size()
    return get_layout(mesh, (placement,), tuple(shape))


def tell_output(local: LocalForward, y: Any, whole: tuple[int, ...], mesh: DeviceMesh) -> Any:
    """Return ``y``, the output of ``local``. Tell a followed program how a plain ``y`` is placed.

    Args:
        local: that has run.
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
