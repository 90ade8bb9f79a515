"""Creation of `Program` objects (`platform.contract.programs`) from the placements that styles declare.

Programs support replicated tensors, simple shards, and partial results of operations. A module whose inputs or outputs
have other placements has no program, and stays outside of compiled code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import PackedShard, Placement, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.planned_parameters import planned_layouts
from hyper_parallel.core.tensor_parallel.program.uneven_shards import agree_on_shape
from hyper_parallel.platform import Platform
from hyper_parallel.platform.contract.programs import KEPT, SUMMANDS, Comparison, Conversions, Cut, Program

__all__ = ["conversions_of", "placement_of", "program_of", "share_inputs"]


def is_cut(placement: Placement | None) -> bool:
    """Return whether a placement can be expressed as a `Cut`: whether it is `Replicate` or a plain `Shard`."""
    return placement is Replicate() or type(placement) is Shard


def cut_of(placement: Any) -> Cut:
    """Return the `Cut` of a placement for which `is_cut` is true: the sharded dimension, or None."""
    dim: Cut = None if placement is Replicate() else placement.dim
    return dim


def placement_of(cut: Cut) -> Placement:
    """Return the placement of a `Cut`. This is the inverse of `cut_of`."""
    return Replicate() if cut is None else Shard(cut)


@dataclass(frozen=True)
class _Comparing:
    """A `Comparison` of the shapes of plain shards between ranks. Equal arguments make equal objects."""

    mesh: DeviceMesh
    placement: Placement
    what: str

    def __call__(self, module: str, shape: tuple[int, ...]) -> None:
        agree_on_shape(shape, self.mesh, self.placement, f"{self.what} of {module!r}")


def comparison(mesh: DeviceMesh, placement: Placement | None, what: str) -> Comparison | None:
    """Return the comparison of plain shards between ranks, or None if ``placement`` does not shard.

    ``what`` is the role of the tensor in messages.
    """
    if placement is None or not placement.is_shard() or mesh.size() == 1:
        return None
    return _Comparing(mesh, placement, what)


def program_of(style: Any, module: Any, mesh: DeviceMesh) -> Program | None:
    """Return the program of a module with one input and one output, after ``style`` distributed its parameters.

    The result is None if the placements cannot be expressed in a program.
    """
    platform, layouts, wanted = mesh.platform, planned_layouts(module), style.output_layouts
    count = len(style.input_layouts), 1 if wanted is None else len(wanted), mesh.ndim
    if count != (1, 1, 1) or mesh.get_coordinate() is None:
        return None
    given, desired = style.input_placements(module, mesh)
    needed = given if desired is None else desired
    if platform.is_linear_module(module) or platform.is_embedding_module(module):
        known = _of_weight(module, platform, layouts)
    else:
        known = _of_parts(style, module, platform, layouts, needed)
    takes, own = known or (None, {})
    if (
        takes is None
        or needed is not takes
        or not (given is takes or is_cut(given))
        or not all(map(is_cut, wanted or ()))
    ):
        return None
    return _program(
        mesh,
        given,
        comparison(mesh, given, "the input") if style.compares_input else None,
        style.use_local_output,
        takes=KEPT if desired is None and own["gives"] == KEPT else cut_of(takes),
        wanted=KEPT if wanted is None else cut_of(wanted[0]),
        layouts=layouts,
        partial_features=style.partial_output_features,
        **own,
    )


def _program(
    mesh: DeviceMesh, given: Placement | None, compare: Comparison | None, local: bool, **facts: Any
) -> Program:
    """Return a program on the 1-D ``mesh``; ``facts`` are its further attributes."""
    group, size, rank = mesh.platform_group(0), mesh.size(), mesh.get_local_rank(0)
    return Program(
        mesh=mesh, group=group, size=size, rank=rank, given=cut_of(given), local=local, compare=compare, **facts
    )


#: The placement of the input that an operation needs, and the operation's fields of the program.
_Own: TypeAlias = "tuple[Placement, dict[str, Any]] | None"


def _of_weight(module: Any, platform: Platform, layouts: Mapping[str, Layout | None]) -> _Own:
    """Return the program fields of a linear layer or an embedding, from the placement of its weight."""
    kind, linear = platform.kind_of(module), platform.is_linear_module(module)
    held: list[Any] = [layouts.get(kind.weight), layouts.get(kind.bias or "")]
    placed: list[Any] = [None if layout is None else layout.placements[0] for layout in held]
    weight, bias = placed
    if weight is Replicate() and bias in (None, weight):
        return weight, {"gives": None}
    cut = isinstance(weight, Shard)
    columns = cut and weight.dim == (kind.out_dim if linear else 1)
    sizes = shard_sizes(weight, held[0].shape[weight.dim], held[0].mesh.size()) if cut else (0,)
    if 0 in sizes or bias not in (None, weight.with_dim(0) if columns else Replicate()):
        return None  # as in eager mode: kernels may fail for empty tensors
    return weight.with_dim(-1) if linear and not columns else Replicate(), {
        "gives": -1 if columns else SUMMANDS,
        "input_for_parts": linear and columns,
        "features": held[0].shape[1 - kind.out_dim] if linear else None,
        "sizes": tuple(sizes),
        "packed": isinstance(weight, PackedShard),
    }


def _of_parts(style: Any, module: Any, platform: Platform, layouts: Mapping[str, Layout | None], needed: Any) -> _Own:
    """Return the program fields of a module that is neither linear nor an embedding."""
    whole = all(layout is None or layout.placements[0] is Replicate() for layout in layouts.values())
    if needed is Replicate():
        return (needed, {"gives": None}) if whole else None
    dims = platform.normalized_dims(module) if style.whole_dims is None else style.whole_dims
    if dims is None or not whole:
        return needed, {"gives": KEPT, "distributed": True}
    return needed, {"gives": KEPT, "parameters_for_parts": True, "whole_dims": dims}


def conversions_of(
    slots: Sequence[tuple[Any, Placement | None, Placement | None]],
    mesh: DeviceMesh,
    count: int,
    use_local_output: bool,
    of_outputs: bool,
) -> Conversions | None:
    """Return the programs of a hook that converts inputs or outputs, or None if a placement is not a `Cut`.

    Args:
        slots: (position or keyword, placement of a plain tensor, desired placement) for each tensor. None as desired
            placement keeps the placement of the plain tensor.
        mesh: 1-D mesh.
        count: required number of outputs, or least number of positional inputs.
        use_local_output: whether the hook returns plain local tensors.
        of_outputs: whether the hook converts outputs.
    """
    wanted = [(key, given, given if desired is None else desired) for key, given, desired in slots]
    if mesh.get_coordinate() is None or not all(is_cut(given) and is_cut(to) for _, given, to in wanted):
        return None
    what, programs = "output" if of_outputs else "input", []
    for key, given, to in wanted:
        compare = comparison(mesh, given, f"{what} {key!r}")
        no_operation: Any = {"takes": cut_of(to), "gives": KEPT, "wanted": KEPT, "layouts": {}}
        programs.append((key, _program(mesh, given, compare, use_local_output, **no_operation)))
    return Conversions(mesh, tuple(programs), count, of_outputs)


def share_inputs(matches: list[Any], modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Report to the backend each module with several column-parallel linear layers as direct submodules."""
    platform, below = mesh.platform, Counter[str]()
    for path, module, style in matches:
        if path and platform.is_linear_module(module) and getattr(style, "reads_for_parts", False):
            below[path.rpartition(".")[0]] += 1
    for path, count in below.items():
        if count > 1:
            platform.share_compiled_inputs(modules[path])
