"""Smaller variants of chains of operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hyper_parallel import Replicate, Shard, StridedShard
from hyper_parallel.testing.fuzz.program import Program, Step, values_of

__all__ = ["smaller"]


def smaller(program: Program) -> Iterator[Program]:
    """Return valid smaller variants of a program, the most promising first."""
    return (found for found in _smaller(program) if _is_valid(found))


def _is_valid(program: Program) -> bool:
    try:
        return len(values_of(program)) > max(program.outputs)
    except Exception:
        return False


def _smaller(program: Program) -> Iterator[Program]:
    """Yield smaller variants of a program, the most promising first; some may be invalid."""
    if len(program.outputs) > 1:
        for i in program.outputs:
            yield replace(program, outputs=(i,))
    for at in reversed(range(len(program.steps))):
        shorter = _without_step(program, at)
        if shorter is not None:
            yield shorter
        yield from _past_step(program, at)
    used = {i for step in program.steps for i in step.inputs} | set(program.outputs)
    for at in reversed(range(len(program.leaves))):
        if at not in used and len(program.leaves) > 1:
            yield _without_leaf(program, at)
    for at, leaf in enumerate(program.leaves):
        changes = [replace(leaf, requires_grad=False)] if leaf.requires_grad else []
        changes += [
            replace(leaf, placements=_natural((*leaf.placements[:d], Replicate(), *leaf.placements[d + 1 :])))
            for d, placement in enumerate(leaf.placements)
            if placement is not Replicate()
        ]
        for change in changes:
            yield replace(program, leaves=(*program.leaves[:at], change, *program.leaves[at + 1 :]))
    if len(program.mesh) == 2:
        leaves = tuple(replace(leaf, placements=_natural(leaf.placements[:1])) for leaf in program.leaves)
        steps = tuple(
            replace(step, args=(_natural(step.args[0][:1]),)) if step.word == "redistribute" else step
            for step in program.steps
        )
        yield replace(program, mesh=(2,), leaves=leaves, steps=steps)


def _natural(placements: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the placements without `StridedShard`, so that mesh dimensions shard in their own order."""
    return tuple(Shard(p.dim) if isinstance(p, StridedShard) else p for p in placements)


def _without_step(program: Program, at: int) -> Program | None:
    """Return the program without one step and its results; None if the results are used."""
    counts = _results_of(program)
    start = len(program.leaves) + sum(counts[:at])
    gone, count = range(start, start + counts[at]), counts[at]
    rest = [*program.steps[:at], *program.steps[at + 1 :]]
    if any(i in gone for step in rest for i in step.inputs) or not set(program.outputs) - set(gone):
        return None
    return replace(
        program,
        steps=tuple(_renumbered(step, gone.stop, count) for step in rest),
        outputs=tuple(sorted({i - count if i >= gone.stop else i for i in program.outputs if i not in gone})),
    )


def _past_step(program: Program, at: int) -> Iterator[Program]:
    """Yield the program with the result of a step replaced by an operand of the same shape and dtype."""
    values, counts, step = values_of(program), _results_of(program), program.steps[at]
    start = len(program.leaves) + sum(counts[:at])
    if counts[at] != 1:
        return
    for i in dict.fromkeys(step.inputs):
        if values[i].shape != values[start].shape or values[i].dtype != values[start].dtype:
            continue
        steps = tuple(
            replace(later, inputs=tuple(i if n == start else n for n in later.inputs)) if k > at else later
            for k, later in enumerate(program.steps)
        )
        outputs = tuple(sorted({i if n == start else n for n in program.outputs}))
        past = replace(program, steps=steps, outputs=outputs)
        shorter = _without_step(past, at) if _is_valid(past) else None
        if shorter is not None:
            yield shorter


def _without_leaf(program: Program, at: int) -> Program:
    return replace(
        program,
        leaves=(*program.leaves[:at], *program.leaves[at + 1 :]),
        steps=tuple(_renumbered(step, at + 1, 1) for step in program.steps),
        outputs=tuple(i - 1 if i > at else i for i in program.outputs),
    )


def _renumbered(step: Step, start: int, count: int) -> Step:
    return replace(step, inputs=tuple(i - count if i >= start else i for i in step.inputs))


def _results_of(program: Program) -> list[int]:
    counts, known = [], len(program.leaves)
    for end in range(1, len(program.steps) + 1):
        total = len(values_of(replace(program, steps=program.steps[:end])))
        counts.append(total - known)
        known = total
    return counts
