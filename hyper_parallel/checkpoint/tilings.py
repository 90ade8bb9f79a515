"""Test of rectangles that are to make up a tensor, in time and memory linear in their number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["is_tiling"]


def is_tiling(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether every element of a shape is in exactly one box.

    How often elements are in a box is a sum of steps: up where a box begins in a dimension, down where it ends. It is
    once everywhere if the steps of all boxes are those of the whole. Where boxes lie on a grid most steps cancel.

    Args:
        shape: of the whole.
        boxes: offsets and sizes, which are within the shape. Those without elements do not matter.

    Raises:
        ValueError: for boxes that lie so wildly that to know it would take too long.
    """
    held = [(offsets, sizes) for offsets, sizes in boxes if 0 not in sizes]
    cut = [d for d, n in enumerate(shape) if any(sizes[d] != n for _, sizes in held)]
    steps: dict[tuple[Any, ...], int] = {tuple((0, shape[d]) for d in cut): -1}
    for offsets, sizes in held:
        box = tuple((offsets[d], offsets[d] + sizes[d]) for d in cut)
        steps[box] = steps.get(box, 0) + 1
    for _ in cut:
        after: dict[tuple[Any, ...], int] = {}
        for (ends, *others), count in steps.items():
            begin, end = ends
            for place, change in ((begin, count), (end, -count)):
                key = (*others, place)
                after[key] = after.get(key, 0) + change
        steps = {key: count for key, count in after.items() if count}
        if len(steps) > 8 * len(held) + 4096:
            raise ValueError(f"the parts are cut in {len(cut)} dimensions, and not along a grid")
    return not any(steps.values())
