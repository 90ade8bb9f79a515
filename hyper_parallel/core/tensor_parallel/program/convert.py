"""Turning the inputs and outputs of a module into distributed tensors and back: the one path that all styles share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hyper_parallel.core.caches import Cache
from hyper_parallel.core.communication.errors import RankMismatchError
from hyper_parallel.core.communication.redistribute import redistribute
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.layout import Layout, requested_layout
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate, Shard, own_placement
from hyper_parallel.core.lookalikes import import_hint
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.core.tensor_parallel.program.distributed_batches import OtherMeshError
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label
from hyper_parallel.core.tensor_parallel.program.uneven_shards import COMPARED, HANDED_OUT, compare_shapes

#: A placement for each input or output, None for one that stays as it is.
Slots: TypeAlias = "tuple[Placement | None, ...]"

_WHOLE = (Replicate(),)
#: MindSpore's limit. Torch has none that is as low, and no layer that a style is for comes near it.
_MOST_DIMS = 8
#: (layout, placement wanted) -> layout, of earlier redistributions.
_TARGETS: dict[tuple[Layout, Placement | None], Layout] = Cache(1 << 14, "targets of styles")


def to_placement(
    x: Any,
    mesh: DeviceMesh,
    layout: Placement | None,
    desired: Placement | None,
    what: str,
    size: int | None = None,
    taker: Any = None,
) -> Any:
    """Make ``x`` a DTensor laid out as ``desired``.

    Args:
        x: plain tensor, laid out as ``layout``; or a DTensor, whose own placement counts.
        mesh: 1-D mesh.
        layout: placement of a plain ``x``.
        desired: placement wanted; None keeps ``layout``.
        what: names the tensor in messages.
        size: global size of the dimension that ``layout`` shards, where it is known; otherwise shards are equal.
        taker: module whose input or output it is; with it, shards of which the size is not known are compared.

    Raises:
        TypeError: when ``x`` is no tensor.
        ValueError: when ``x`` is distributed over another mesh.
    """
    if isinstance(x, DTensor):
        if x.device_mesh is not mesh:
            raise OtherMeshError(
                f"{what} is distributed over {x.device_mesh}, the style works on {mesh}: apply fully_shard or "
                "replicate over the other dimension to a model that takes a distributed batch, or pass to_local()"
            )
    elif mesh.platform.is_tensor(x):
        known: Layout | None = None
        if size is not None and isinstance(layout, Shard):
            shape = list(x.shape)
            shape[layout.dim] = size
            own = shard_sizes(layout, size, mesh.size())[mesh.get_local_rank()]
            if x.shape[layout.dim] != own:
                raise ValueError(
                    f"{what} has {x.shape[layout.dim]} features, and the weight takes {own} on this rank, its part "
                    f"of {size} as {layout!r}: give the shard, or give the placement of the input with "
                    "input_layouts=..."
                )
            known = requested_layout(mesh, (layout,), shape, what)
        elif (
            taker is not None
            and isinstance(layout, Shard)
            and (mesh._has_uneven_shards or what not in taker.__dict__.get(COMPARED, ()))
        ):
            compare_shapes(x, mesh, layout, what, taker)
        try:
            if known is None:
                x = DTensor.from_local(x, mesh, _WHOLE if layout is None else (layout,))
            else:
                x = DTensor._of_part(x, known)
        except RankMismatchError as error:
            raise RankMismatchError(f"{what}: {error}", error.ranks) from None
        except ValueError as error:
            raise ValueError(f"{what} is not placed as the plan says: {error}") from None
    else:
        raise TypeError(f"{what} has a layout in the plan and must be a tensor, got {type(x).__name__}")
    return x if desired is None else _redistribute(x, desired, what)


def to_known_placement(x: Any, mesh: DeviceMesh, desired: Placement | None) -> DTensor | None:
    """`to_placement` of a DTensor whose layout came before; else None."""
    target = _TARGETS.get((x._layout, desired))
    if target is None or target.mesh is not mesh:
        return None
    with mesh.platform.no_dispatch():
        return redistribute(x, target)


def _redistribute(x: Any, desired: Placement, what: str) -> Any:
    known = to_known_placement(x, x.device_mesh, desired)
    if known is not None:
        return known
    try:
        placed = x.redistribute(placements=(desired,))
        _TARGETS[x._layout, desired] = placed._layout
        return placed
    except ValueError as error:
        differs = isinstance(error, RankMismatchError)  # which names the place, and the ranks
        raise error if differs else ValueError(f"{what} cannot be placed as the plan says: {error}") from None


def to_output(y: Any, mesh: DeviceMesh, desired: Placement | None, use_local: bool, what: str) -> Any:
    """Bring an output to ``desired`` and, with ``use_local``, back to a plain local tensor."""
    if not isinstance(y, DTensor):
        raise TypeError(f"{what} must be a DTensor here, got {type(y).__name__}")
    if desired is not None:
        y = _redistribute(y, desired, what)
    if not use_local:
        return y
    HANDED_OUT[y._layout]
    return y.to_local()


def read_by_parts(y: Any, mesh: DeviceMesh, features: int = -1) -> Any:
    """A plain tensor that is the same on all ranks of a 1-D mesh. Each rank computes a part of its gradient.

    Args:
        y: the tensor.
        mesh: 1-D mesh.
        features: that holds for the last so many features alone; -1 is all of ``y``.

    Returns:
        A plain tensor whose gradient is summed over the ranks.
    """
    if mesh.size() == 1:
        return y
    if features < 0 or features == y.shape[-1]:
        return DTensor.from_local(y, mesh, (Replicate(),)).to_local(grad_placements=(Partial(),))
    before, read = y[..., :-features], y[..., -features:]
    pieces = before, read_by_parts(read, mesh)
    joined = mesh.platform.cat(pieces, -1)
    if FOLLOWING:
        FOLLOWING[-1].joined(joined, pieces, -1)
    return joined


def too_few_inputs(module: Any, args: tuple, layouts: Sequence[Any], style: Any) -> ValueError:
    """The error for a module that was called with fewer positional inputs than its style has layouts."""
    return ValueError(
        f"{module_label(module)} was called with {len(args)} positional input(s), {type(style).__name__} has "
        f"{len(layouts)} input_layouts: give the rest positionally, or use input_kwarg_layouts for inputs by keyword"
    )


def convert_outputs(
    module: Any,
    output: Any,
    layouts: Sequence[Placement | None],
    convert: Callable[[Any, Any, int, str, DeviceMesh], Any],
    style: Any,
    mesh: DeviceMesh,
) -> Any:
    """The output of a module, or each of several, converted by ``convert(module, y, i, what, mesh)``. An output without
    a layout stays as it is.

    Raises:
        ValueError: when there are more or fewer outputs than layouts.
    """
    name, several = module_label(module), isinstance(output, (tuple, list))
    outputs = output if several else (output,)
    if len(outputs) != len(layouts):
        raise ValueError(
            f"{name} returned {len(outputs)} output(s), {type(style).__name__} has {len(layouts)} output_layouts: give "
            "one for each output, None for one that stays as it is"
        )
    new = [
        y
        if layout is None or y is None
        else convert(module, y, i, f"output {i} of {name}" if several else f"the output of {name}", mesh)
        for i, (y, layout) in enumerate(zip(outputs, layouts, strict=True))
    ]
    return type(output)(new) if several else new[0]


def as_slots(value: Any, keyword: str, style: str) -> Slots:
    """A layout keyword as a tuple: a single placement is a tuple of one.

    Raises:
        TypeError: for anything but placements and None.
    """
    slots = tuple(map(own_placement, value if isinstance(value, (tuple, list)) else (value,)))
    for slot in slots:
        if slot is not None:
            check_placement(slot, keyword, style)
    return slots


def as_single(value: Any, keyword: str, style: str) -> Placement | None:
    """A layout keyword that takes one placement: itself, or alone in a tuple.

    Raises:
        TypeError: for anything but placements and None. ValueError: for more than one.
    """
    slots = as_slots(value, keyword, style)
    if len(slots) != 1:
        raise ValueError(f"{style}({keyword}=...) takes one placement, got {len(slots)}")
    return slots[0]


def as_named(value: Any, keyword: str, style: str) -> dict[str, Placement | None]:
    """A layout keyword that maps names to placements; None is none of them.

    Raises:
        TypeError: for anything but a dict of placements and None.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"{style}({keyword}=...) takes a dict from names of inputs to placements, got {value!r}")
    return dict(zip(value, as_slots(tuple(value.values()), keyword, style), strict=True))


def check_placement(value: Any, keyword: str, style: str) -> None:
    """Raise TypeError unless ``value`` is a placement, ValueError for one of a dimension that no tensor has."""
    if not isinstance(value, Placement):
        raise TypeError(
            f"{style}({keyword}=...) takes placements such as Shard(0) or Replicate(), got {value!r}"
            f"{import_hint(value)}"
        )
    if isinstance(value, Shard):
        check_tensor_dim(value.dim, f"{style}({keyword}={value!r})")


def check_tensor_dim(dim: int, what: str) -> None:
    """Raise ValueError for a dimension beyond those of any input or output of a module."""
    if not -_MOST_DIMS <= dim < _MOST_DIMS:
        raise ValueError(f"{what}: tensors have at most {_MOST_DIMS} dimensions; Shard(-1) is the last one")


def as_pairs(given: Any, desired: Any, keyword: str, style: str) -> tuple[Slots, Slots]:
    """A layout keyword and ``desired_<keyword>`` as tuples of one length.

    Raises:
        TypeError: for anything but placements and None. ValueError: for more entries in one than in the other.
    """
    pair = as_slots(given, keyword, style), as_slots(desired, f"desired_{keyword}", style)
    if len(pair[0]) != len(pair[1]):
        raise ValueError(
            f"{style}: {keyword} has {len(pair[0])} entries and desired_{keyword} has {len(pair[1])}; give one for "
            "each tensor, None for one that stays as it is"
        )
    return pair
