"""Conversion of a module's inputs to DTensors and of its outputs back to plain tensors, which all styles share."""

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

#: A placement for each input or output; None leaves a tensor unchanged.
Slots: TypeAlias = "tuple[Placement | None, ...]"

_WHOLE = (Replicate(),)
#: Most dimensions of a tensor: MindSpore's limit. Torch allows more, but no layer with a style uses so many.
_MOST_DIMS = 8
#: (layout of a DTensor, desired placement) -> layout after redistribution, from earlier calls.
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
    """Convert ``x`` to a DTensor with the placement ``desired``.

    Args:
        x: plain tensor with the placement ``layout``, or a DTensor, which has its own placement.
        mesh: 1-D mesh.
        layout: placement of a plain ``x``.
        desired: desired placement; None keeps the placement of ``x``.
        what: name of the tensor in messages.
        size: global size of the dimension that ``layout`` shards. None assumes that all shards have one size.
        taker: module whose input or output ``x`` is. If it is given, ranks compare shards of unknown global size.

    Raises:
        TypeError: if ``x`` is not a tensor.
        ValueError: if ``x`` is distributed over another mesh, or does not have the placement of the plan.
    """
    if isinstance(x, DTensor):
        if x.device_mesh is not mesh:
            raise OtherMeshError(
                f"{what} is distributed over {x.device_mesh}, but the style is applied to {mesh}. For a distributed "
                "batch, apply fully_shard or replicate to the model over the other dimension. Otherwise pass "
                "to_local()"
            )
    elif mesh.platform.is_tensor(x):
        known: Layout | None = None
        if size is not None and isinstance(layout, Shard):
            shape = list(x.shape)
            shape[layout.dim] = size
            own = shard_sizes(layout, size, mesh.size())[mesh.get_local_rank()]
            if x.shape[layout.dim] != own:
                raise ValueError(
                    f"{what} has {x.shape[layout.dim]} features, but this rank's shard of the weight takes {own} of "
                    f"the {size} features, since the input is declared as {layout!r}. Pass this rank's shard, or "
                    "declare the placement of the input with input_layouts=..."
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
        raise TypeError(f"{what} has a placement in the plan and must be a tensor, got {type(x).__name__}")
    return x if desired is None else _redistribute(x, desired, what)


def to_known_placement(x: Any, mesh: DeviceMesh, desired: Placement | None) -> DTensor | None:
    """Return ``x`` redistributed to ``desired`` if the new layout is cached; otherwise return None."""
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
        differs = isinstance(error, RankMismatchError)  # its message names the ranks already
        raise error if differs else ValueError(f"{what} cannot be placed as the plan says: {error}") from None


def to_output(y: Any, mesh: DeviceMesh, desired: Placement | None, use_local: bool, what: str) -> Any:
    """Redistribute an output to ``desired``, and with ``use_local`` return its local tensor."""
    if not isinstance(y, DTensor):
        raise TypeError(f"{what} must be a DTensor here, got {type(y).__name__}")
    if desired is not None:
        y = _redistribute(y, desired, what)
    if not use_local:
        return y
    HANDED_OUT[y._layout]
    return y.to_local()


def read_by_parts(y: Any, mesh: DeviceMesh, features: int = -1) -> Any:
    """Return a replicated plain tensor whose gradient is partial: backward sums the gradient over the ranks.

    Args:
        y: plain tensor, the same on all ranks.
        mesh: 1-D mesh.
        features: number of last features with a partial gradient; -1 for all features.

    Returns:
        A plain tensor with the values of ``y``.
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
    """Return the error for a module that was called with fewer positional inputs than its style has layouts."""
    return ValueError(
        f"{module_label(module)} was called with {len(args)} positional input(s), but {type(style).__name__} has "
        f"{len(layouts)} input_layouts: pass all these inputs by position, or use input_kwarg_layouts for keyword "
        "inputs"
    )


def convert_outputs(
    module: Any,
    output: Any,
    layouts: Sequence[Placement | None],
    convert: Callable[[Any, Any, int, str, DeviceMesh], Any],
    style: Any,
    mesh: DeviceMesh,
) -> Any:
    """Return the output or outputs of a module, converted by ``convert(module, y, i, what, mesh)``.

    An output without a layout is unchanged.

    Raises:
        ValueError: if the numbers of outputs and layouts differ.
    """
    name, several = module_label(module), isinstance(output, (tuple, list))
    outputs = output if several else (output,)
    if len(outputs) != len(layouts):
        raise ValueError(
            f"{name} returned {len(outputs)} output(s), but {type(style).__name__} has {len(layouts)} output_layouts: "
            "list one placement for each output, and None for an unchanged output"
        )
    new = [
        y
        if layout is None or y is None
        else convert(module, y, i, f"output {i} of {name}" if several else f"the output of {name}", mesh)
        for i, (y, layout) in enumerate(zip(outputs, layouts, strict=True))
    ]
    return type(output)(new) if several else new[0]


def as_slots(value: Any, keyword: str, style: str) -> Slots:
    """Return the value of a layout keyword as a tuple. A single placement becomes a tuple with one entry.

    Raises:
        TypeError: for anything but placements and None.
    """
    slots = tuple(map(own_placement, value if isinstance(value, (tuple, list)) else (value,)))
    for slot in slots:
        if slot is not None:
            check_placement(slot, keyword, style)
    return slots


def as_single(value: Any, keyword: str, style: str) -> Placement | None:
    """Return the value of a layout keyword that takes one placement, which may be alone in a tuple.

    Raises:
        TypeError: for anything but placements and None.
        ValueError: for more than one placement.
    """
    slots = as_slots(value, keyword, style)
    if len(slots) != 1:
        raise ValueError(f"{style}({keyword}=...) takes one placement, got {len(slots)}")
    return slots[0]


def as_named(value: Any, keyword: str, style: str) -> dict[str, Placement | None]:
    """Return the value of a layout keyword that maps names to placements. None becomes an empty dict.

    Raises:
        TypeError: for anything but a dict of placements and None.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"{style}({keyword}=...) takes a dict from names of inputs to placements, got {value!r}")
    return dict(zip(value, as_slots(tuple(value.values()), keyword, style), strict=True))


def check_placement(value: Any, keyword: str, style: str) -> None:
    """Raise TypeError unless ``value`` is a placement, and ValueError for a `Shard` of an impossible dimension."""
    if not isinstance(value, Placement):
        raise TypeError(
            f"{style}({keyword}=...) takes placements such as Shard(0) or Replicate(), got {value!r}"
            f"{import_hint(value)}"
        )
    if isinstance(value, Shard):
        check_tensor_dim(value.dim, f"{style}({keyword}={value!r})")


def check_tensor_dim(dim: int, what: str) -> None:
    """Raise ValueError for a dimension that no tensor can have."""
    if not -_MOST_DIMS <= dim < _MOST_DIMS:
        raise ValueError(f"{what}: tensors have at most {_MOST_DIMS} dimensions; Shard(-1) is the last one")


def as_pairs(given: Any, desired: Any, keyword: str, style: str) -> tuple[Slots, Slots]:
    """Return a layout keyword and ``desired_<keyword>`` as tuples of equal length.

    Raises:
        TypeError: for anything but placements and None.
        ValueError: if their lengths differ.
    """
    pair = as_slots(given, keyword, style), as_slots(desired, f"desired_{keyword}", style)
    if len(pair[0]) != len(pair[1]):
        raise ValueError(
            f"{style}: {keyword} has {len(pair[0])} entries, but desired_{keyword} has {len(pair[1])}: list one "
            "placement for each tensor, and None for an unchanged tensor"
        )
    return pair
