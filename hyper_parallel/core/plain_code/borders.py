"""Borders of plain code: inputs of styled modules, and outputs of the model, against the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.plain_code.findings import Problem
from hyper_parallel.core.plain_code.marks import Mark, Ways, describe, partial_dims, ways_of
from hyper_parallel.platform.contract.modules import APPLIED


def misfit(mark: Mark | None, layout: Layout, shape: tuple[int, ...], trains: bool, computed: bool) -> Problem | None:
    """The problem of a plain tensor that is taken for ``layout``, None where there is none.

    Args:
        mark: of the tensor.
        layout: as the style or the program takes it.
        shape: local shape.
        trains: whether a gradient goes to it.
        computed: whether operations have computed it. The caller of the program knows its inputs.
    """
    wanted = f"is taken for {', '.join(map(str, layout.placements))}"
    ranks = layout.mesh.shape
    if mark is None:
        cut = any(isinstance(p, Shard) and n > 1 for p, n in zip(layout.placements, ranks, strict=True))
        if not (computed and cut):
            return None
        text = f"a plain input of shape {shape}, which is the same on all ranks, {wanted}"
        return Problem("input", text, "Say with input_layouts=Replicate() that it is whole", certain=False)
    if mark.layout.mesh is not layout.mesh:
        return None
    for d, (have, want) in enumerate(zip(mark.layout.placements, layout.placements, strict=True)):
        if ranks[d] == 1:
            continue
        if d in mark.summed and want is Replicate():
            if trains:
                text = f"{describe(mark, shape)} {wanted}: its gradient would be summed over the ranks once more"
                return Problem("input", text, "Do not say of its source that its gradients are summands")
            continue
        if mark.merged or have is not want:
            remedy = f"Say with input_layouts={have!r} how it lies, or bring it to {want!r} before"
            # Rows in another order are right where each is computed alone, as a router does.
            return Problem("input", f"{describe(mark, shape)} {wanted}", remedy, certain=have is not want)
    return None


def keeps_parts(module: Any, ways: tuple[Mark | None, ...], layout: Layout) -> bool:
    """Return whether a style of ``module`` gives parts as it takes them, and the last dimension is whole.

    Styles of norms do so. They may name another dimension, in ``layout``, than the one that is cut.

    Args:
        module: with styles.
        ways: marks of its input.
        layout: of the input, as the style takes it.
    """
    if not any(getattr(style, "output_layouts", ()) is None for style, _ in getattr(module, APPLIED, ())):
        return False
    placements = [layout.placements, *(() if mark is None else mark.layout.placements for mark in ways)]
    return all(
        bool(some) and all(isinstance(p, Shard) and p.dim < layout.ndim - 1 for p in some) for some in placements
    )


def output_problem(ways: Ways, shape: tuple[int, ...], source: str) -> Problem | None:
    """The problem of an output of the model that may stand for ``ways``, and comes from the module ``source``."""
    if not isinstance(ways, tuple) or any(m is None or not (m.sharded or partial_dims(m.layout)) for m in ways):
        return None
    of = f", which comes from {source!r}," if source else ""
    return Problem(
        "output",
        f"the model gives {describe(ways[0], shape)}{of} and no style says so",
        "Give the last module PrepareModuleOutput, or the layer before a style that gathers or sums",
    )


@dataclass
class Rows:
    """The rows that a styled module takes, in an order of their own: those of each sample that are on this rank.

    Attributes:
        count: how many there are on all ranks.
        merged: see `Mark.merged`.
        problem: the module takes them as consecutive ones. None where that does not matter.
    """

    count: int
    merged: int
    problem: Problem | None = None


def merged_rows(x: Any) -> Rows | None:
    """Return the rows of ``x``, None where they are in the order of the whole tensor."""
    ways = () if x is None else ways_of(x)
    mark = ways[0] if isinstance(ways, tuple) and len(ways) == 1 else None
    if mark is None or not mark.merged or mark.layout.placements != (Shard(0),):
        return None
    return Rows(mark.layout.shape[0], mark.merged)
