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


def tell_input(x: Any, mesh: DeviceMesh, given: Placement | None) -> None:
    """Tell a followed program what a plain tensor ``x`` is taken for, where ranks have parts of one size."""
    if given is not None and len(x.shape):
        FOLLOWING[-1].taken(x, layout_of_even_part(x, mesh, given))


def tell_output(local: LocalForward, x: Any, y: Any, given: Placement | None, mesh: DeviceMesh) -> Any:
    """Return ``y``, the output of ``local``. Tell a followed program how a plain ``y`` is placed.

    Args:
        local: that has run.
        x: plain, or a DTensor.
        y: output for ``x``.
        given: the placement of a plain ``x``.
        mesh: 1-D mesh.
    """
    if not FOLLOWING or type(y) is not mesh.platform.Tensor:
        return y
    plain = type(x) is mesh.platform.Tensor
    whole = layout_of_even_part(x, mesh, given).shape if plain and given is not None and len(x.shape) else x.shape
    if _gives_even_parts(local, tuple(whole), mesh):
        FOLLOWING[-1].given(y, layout_of_even_part(y, mesh, local.gives))  # type: ignore[arg-type]
    else:
        FOLLOWING[-1].lose(y, local.lost, mesh)
    return y


def _gives_even_parts(local: LocalForward, whole: tuple[int, ...], mesh: DeviceMesh) -> bool:
    """Return whether all ranks get outputs of one size for an input of the global shape ``whole``. Its last dimension
    is that of the features, for which `LocalForward.gives` speaks."""
    gives, ndim = local.gives, len(whole)
    if gives is None or not ndim:
        return False
    return not isinstance(gives, Shard) or gives.dim % ndim == ndim - 1 or whole[gives.dim] % mesh.size() == 0
