"""Every style on every module with every layout, on 1 to 4 ranks, with even and uneven shards.

Outputs and all gradients equal the single-device model's. Collectives are the same as in hand-written code. `expected`
lists them, and the table in docs/styles.md is made from this list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    NoParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.comparisons import compare, floats
from hyper_parallel.testing.extent import everything, on_ranks

R, P = "R", "P"
Counts = tuple[Counter, Counter]


def change(source: Any, target: Any) -> Counts:
    """Return the collectives of (forward, backward) between two placements.

    A placement is `R`, `P` or a sharded dimension, where -1 is the features. The target ``"f"`` is a replicated input
    for which each rank then computes a partial gradient.
    """
    if source == target:
        return Counter(), Counter()
    if target == "f":
        return (
            (Counter(), Counter(["all_reduce"]))
            if source == R
            else (Counter(["all_gather"]), Counter(["reduce_scatter"]))
        )
    if source == P:
        return (
            (Counter(["all_reduce"]), Counter())
            if target == R
            else (Counter(["reduce_scatter"]), Counter(["all_gather"]))
        )
    if source == R:
        return Counter(), Counter(["all_gather"])
    if target == R:
        return Counter(["all_gather"]), Counter()
    return Counter(["all_to_all"]), Counter(["all_to_all"])


def expected(style: str, module: str, given: Any, wanted: Any) -> Counts:
    """Return the communication of hand-written code for one style on one module.

    Args:
        style: ``"colwise"``, ``"rowwise"``, ``"sequence"``, ``"whole"`` (NoParallel), or ``"input"``, ``"output"`` and
            ``"both"`` for the styles that prepare these.
        module: ``"linear"``, ``"embedding"`` or ``"norm"``.
        given: placement of the input: `R` or a dimension.
        wanted: placement of the output.
    """
    if style == "colwise":
        # Ids have no gradient.
        before, after = change(given, "f" if module == "linear" else R), change(-1, wanted)
    elif style == "rowwise":
        before, after = change(given, -1 if module == "linear" else R), change(P, wanted)
    elif style == "sequence":
        # The gradients of weight and bias.
        before, after = (Counter(), Counter(["all_reduce", "all_reduce"])), (Counter(), Counter())
    else:
        before, after = change(given, R), change(R, wanted)
    return before[0] + after[0], _without_ids(before[1], module) + after[1]


def _without_ids(counts: Counter, module: str) -> Counter:
    return Counter() if module == "embedding" else counts


def placement(name: Any) -> Any:
    return Replicate() if name == R else Shard(name)


def table() -> list[str]:
    """Return the rows of the table in docs/styles.md."""
    names = {R: "`Replicate()`", 0: "`Shard(0)`", 1: "`Shard(1)`", 2: "`Shard(2)`", -1: "`Shard(-1)`"}
    classes = {"colwise": "`ColwiseParallel`", "rowwise": "`RowwiseParallel`", "whole": "`NoParallel`"}
    rows = ["| style | module | input | output | forward | backward |", "|---|---|---|---|---|---|"]
    for style, module in MATRIX[:6]:
        for given in (R, 1, -1) if module == "linear" else (R,):
            for wanted in (R, 1, -1):
                cells = [classes[style], module, names[given], names[wanted]]
                cells += [
                    ", ".join(sorted(counts.elements())) or "-" for counts in expected(style, module, given, wanted)
                ]
                rows.append(f"| {' | '.join(cells)} |")
    return rows


@spmd.on_mesh()
def many(mesh: Any, style: str, module: str, even: bool) -> list[tuple[Any, Any, bool, Any]]:
    """Run one style on one module with all layouts. Return (given, wanted, distributed input, collectives) of each."""
    return [
        (given, wanted, distributed, compare(*call, mesh, distributed_input=distributed, **layouts))
        for given, wanted, distributed, call, layouts in cases(style, module, even, mesh.size())
    ]


def cases(style: str, module: str, even: bool, size: int) -> Iterator[tuple[Any, Any, bool, tuple, dict]]:
    n_in, n_out, length = (12, 24, 12) if even else (7, 5, 11)
    shape = {"linear": (12, length, n_in), "embedding": (12, length), "norm": (12, length, n_in)}[module]
    build: Callable[[Any], Any] = {
        "linear": lambda adapter: adapter.linear_module(n_in, n_out),
        "embedding": lambda adapter: adapter.embedding_module(n_in, n_out),
        "norm": lambda adapter: adapter.norm_module(n_in),
    }[module]
    ids = np.random.default_rng(8).integers(0, n_in, shape).astype(np.int64)
    array = ids if module == "embedding" else floats(*shape)
    for given in (R, *range(len(shape))):
        if module == "linear" and style in ("colwise", "rowwise") and given == 2:
            given = -1
        for wanted in (R, 0, 1, -1):
            plan = plan_of(style, given, wanted)
            if plan is None:
                continue
            layouts = {"takes": placement(given), "gives": placement(wanted)}
            # Plain shards say nothing about the whole: they are taken to be equal, but for the features of a weight.
            if even or given in (R, 0) or (given == -1 and style == "rowwise") or size == 1:
                yield given, wanted, False, (build, plan, array), layouts
            # Without a style for its input the module computes on the given one. Uneven sizes show all of it.
            if style != "output" and (everything() or not even):
                yield given, wanted, True, (build, plan, array), layouts


def plan_of(style: str, given: Any, wanted: Any) -> Any:
    takes, gives, r = placement(given), placement(wanted), Replicate()
    if style == "colwise":
        return ColwiseParallel(input_layouts=takes, output_layouts=gives)
    if style == "rowwise":
        return RowwiseParallel(input_layouts=takes, output_layouts=gives)
    if style == "whole":
        return NoParallel(input_layout=takes, output_layout=gives)
    if style == "sequence":
        return SequenceParallel(sequence_dim=given, use_local_output=True) if given == wanted != R else None
    if style == "both":
        prepared = PrepareModuleInputOutput(
            input_layouts=takes,
            desired_input_layouts=r,
            use_local_input=True,
            output_layouts=r,
            desired_output_layouts=gives,
        )
        return {"": prepared}
    return (
        {
            "": PrepareModuleInput(input_layouts=takes, desired_input_layouts=r, use_local_output=True)
            if style == "input"
            else PrepareModuleOutput(output_layouts=r, desired_output_layouts=gives)
        }
        if (wanted if style == "input" else given) == R
        else None
    )


MATRIX = [
    *((style, module) for style in ("colwise", "rowwise", "whole") for module in ("linear", "embedding")),
    ("whole", "norm"),
    ("sequence", "norm"),
    *((style, "linear") for style in ("input", "output", "both")),
]


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize(("style", "module"), MATRIX, ids=lambda x: x)
@on_ranks(1, 2, 3, 4)
def test_every_layout(pool: Any, world_size: int, style: str, module: str, even: bool) -> None:
    for found in pool.run(world_size, many, style, module, even):
        assert found
        for given, wanted, distributed, counts in found:
            forward, backward = expected(style, module, given, wanted) if world_size > 1 else ({}, {})
            assert counts == {"forward": dict(forward), "backward": dict(backward)}, (given, wanted, distributed)
