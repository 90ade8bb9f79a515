"""Styles as a backend with a compiler sees them: `platform.contract.compiled`, made of their data.

Where a layout cannot be said in these terms, the module stays outside of compiled code. Such are parts of parts, and
sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.placement_types import PackedShard, Placement, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.planned_parameters import planned_layouts
from hyper_parallel.core.tensor_parallel.program.uneven_shards import agree_on_shape
from hyper_parallel.platform.contract import Comparison, CompiledForward, CompiledInputs, Conversion, Cut

__all__ = ["describe", "describe_conversions", "describe_weight", "share_inputs"]


def is_cut(placement: Placement | None) -> bool:
    """Return whether a placement can be said as a `Cut`."""
    return placement is Replicate() or type(placement) is Shard


def cut_of(placement: Any) -> Cut:
    """The cut of a placement for which `is_cut` is true."""
    dim: Cut = None if placement is Replicate() else placement.dim
    return dim


@dataclass(frozen=True)
class _Comparing:
    """A `Comparison`."""

    mesh: DeviceMesh
    placement: Placement
    what: str

    def __call__(self, module: str, shape: tuple[int, ...]) -> None:
        agree_on_shape(shape, self.mesh, self.placement, f"{self.what} of {module!r}")


def comparison(mesh: DeviceMesh, placement: Placement | None, what: str) -> Comparison | None:
    """The comparison of plain shards between ranks, which messages call ``what`` of their module."""
    if placement is None or not placement.is_shard() or mesh.size() == 1:
        return None
    return _Comparing(mesh, placement, what)


def describe(
    style: Any, module: Any, mesh: DeviceMesh, kind: str, compares: bool = True, **more: Any
) -> CompiledForward | None:
    """The compiled forward of a module with one input and one output, whose layouts the ``style`` has.

    Args:
        style, module, mesh: the style, and the module and mesh that it was applied to.
        kind: see `CompiledForward`.
        compares: whether the ranks compare plain shards that they give the module.
        more: further attributes of it.
    """
    given = style.input_layouts[0]
    wanted = given if style.output_layouts is None else style.output_layouts[0]
    if not is_cut(given) or not is_cut(wanted) or mesh.get_coordinate() is None:
        return None
    return CompiledForward(
        kind=kind,
        mesh=mesh,
        group=mesh.platform_group(0),
        size=mesh.size(),
        rank=mesh.get_local_rank(0),
        given=cut_of(given),
        wanted=cut_of(wanted),
        local=style.use_local_output,
        layouts=planned_layouts(module),
        compare=comparison(mesh, given, "the input") if compares else None,
        **more,
    )


def describe_weight(style: Any, module: Any, mesh: DeviceMesh, kind: str) -> CompiledForward | None:
    """`describe` for a linear layer or an embedding whose weight the ranks share."""
    weight: Any = planned_layouts(module)[mesh.platform.kind_of(module).weight]
    (shard,) = weight.placements
    if not isinstance(shard, Shard):
        return None
    sizes = shard_sizes(shard, weight.shape[shard.dim], mesh.size())
    if 0 in sizes:
        return None  # as in eager mode: kernels for nothing are not to be relied on
    return describe(style, module, mesh, kind, sizes=tuple(sizes), packed=isinstance(shard, PackedShard))


def describe_conversions(
    slots: Sequence[tuple[Any, Placement | None, Placement | None]],
    mesh: DeviceMesh,
    count: int,
    use_local_output: bool,
    of_outputs: bool,
) -> CompiledInputs | None:
    """Describe the conversions of a hook.

    Args:
        slots: (position or keyword, placement of a plain one, placement wanted, or None for that which it has).
        mesh: 1-D mesh.
        count, use_local_output, of_outputs: see `CompiledInputs`.
    """
    wanted = [(key, given, given if desired is None else desired) for key, given, desired in slots]
    if mesh.get_coordinate() is None or not all(is_cut(given) and is_cut(to) for _, given, to in wanted):
        return None
    what = "output" if of_outputs else "input"
    conversions = [
        Conversion(key, cut_of(given), cut_of(to), comparison(mesh, given, f"{what} {key!r}"))
        for key, given, to in wanted
    ]
    return CompiledInputs(
        mesh=mesh,
        group=mesh.platform_group(0),
        size=mesh.size(),
        rank=mesh.get_local_rank(0),
        conversions=tuple(conversions),
        count=count,
        local=use_local_output,
        of_outputs=of_outputs,
    )


def share_inputs(matches: list[Any], modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Tell the backend which modules have several column-parallel linear layers directly below them."""
    platform, below = mesh.platform, Counter[str]()
    for path, module, style in matches:
        if path and platform.is_linear_module(module) and getattr(style, "reads_for_parts", False):
            below[path.rpartition(".")[0]] += 1
    for path, count in below.items():
        if count > 1:
            platform.share_compiled_inputs(modules[path])
