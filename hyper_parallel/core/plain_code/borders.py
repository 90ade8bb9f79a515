"""Checks where plain code ends: inputs of styled modules and outputs of the model, compared with the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.plain_code.findings import Problem
from hyper_parallel.core.plain_code.marks import Mark, Ways, describe, partial_dims, ways_of
from hyper_parallel.platform.contract.modules import APPLIED


def misfit(mark: Mark | None, layout: Layout, shape: tuple[int, ...], trains: bool, computed: bool) -> Problem | None:
    """Return the problem of a plain tensor that becomes a DTensor of ``layout`` but has another placement, or None.

    Args:
        mark: mark of the tensor.
        layout: layout that the style or the program declares for the tensor.
        shape: local shape.
        trains: whether the tensor requires a gradient.
        computed: whether an operation computed the tensor. Inputs of the program are assumed to be right.
    """
    wanted = f"is taken for {', '.join(map(str, layout.placements))}"
    ranks = layout.mesh.shape
    if mark is None:
        cut = any(isinstance(p, Shard) and n > 1 for p, n in zip(layout.placements, ranks, strict=True))
        if not (computed and cut):
            return None
        text = f"a plain input of shape {shape}, which is the same on all ranks, {wanted}"
        return Problem("input", text, "Declare the input as replicated, with input_layouts=Replicate()", certain=False)
    if mark.layout.mesh is not layout.mesh:
        return None
    for d, (have, want) in enumerate(zip(mark.layout.placements, layout.placements, strict=True)):
        if ranks[d] == 1:
            continue
        if d in mark.summed and want is Replicate():
            if trains:
                text = f"{describe(mark, shape)} {wanted}: its gradient would be summed over the ranks twice"
                return Problem(
                    "input", text, "Remove the declaration of partial gradients from the source of this tensor"
                )
            continue
        if mark.merged or have is not want:
            remedy = f"Declare its placement with input_layouts={have!r}, or convert the tensor to {want!r} first"
            # Rows in another order are right where each row is computed independently, as in a router.
            return Problem("input", f"{describe(mark, shape)} {wanted}", remedy, certain=have is not want)
    return None


def keeps_parts(module: Any, ways: tuple[Mark | None, ...], layout: Layout) -> bool:
    """Return whether a style of ``module`` keeps the placement of its input, and the input's last dimension is
    unsharded.

    The answer is True for styles of norms. The style's ``layout`` and the followed input may be sharded along different
    dimensions. The last dimension must be unsharded in both.

    Args:
        module: module with styles.
        ways: marks of its input.
        layout: layout of the input that the style declares.
    """
    if not any(getattr(style, "output_layouts", ()) is None for style, _ in getattr(module, APPLIED, ())):
        return False
    placements = [layout.placements, *(() if mark is None else mark.layout.placements for mark in ways)]
    return all(
        bool(some) and all(isinstance(p, Shard) and p.dim < layout.ndim - 1 for p in some) for some in placements
    )


def output_problem(ways: Ways, shape: tuple[int, ...], source: str) -> Problem | None:
    """Return the problem of a model output that is a shard or partial, or None. ``ways`` are its possible placements,
    and ``source`` is the module that returned it."""
    if not isinstance(ways, tuple) or any(m is None or not (m.sharded or partial_dims(m.layout)) for m in ways):
        return None
    of = f" from {source!r}" if source else ""
    return Problem(
        "output",
        f"the model returns {describe(ways[0], shape)}{of}, and no style declares this placement",
        "Add PrepareModuleOutput for the last module to the plan, or a style that gathers or sums for the layer "
        "before it",
    )


@dataclass
class Rows:
    """This rank's rows of a styled module's input, if they are not consecutive in the global tensor.

    Attributes:
        count: global number of rows.
        merged: as in `Mark.merged`.
        problem: the problem of a module that takes the rows as consecutive rows; None if it does not.
    """

    count: int
    merged: int
    problem: Problem | None = None


def merged_rows(x: Any) -> Rows | None:
    """Return the rows of ``x``, or None if they are consecutive rows of the global tensor."""
    ways = () if x is None else ways_of(x)
    mark = ways[0] if isinstance(ways, tuple) and len(ways) == 1 else None
    if mark is None or not mark.merged or mark.layout.placements != (Shard(0),):
        return None
    return Rows(mark.layout.shape[0], mark.merged)
