"""Test whether rectangles tile a tensor, in time and memory linear in their number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["is_tiling"]


def is_tiling(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether every element of a shape is in exactly one box.

    Along a dimension, the number of boxes that contain an element rises by one where a box starts. It falls by one
    where a box ends. Every element is in one box if these steps add up to the steps of the full tensor. For boxes on a
    grid most steps cancel.

    Args:
        shape: shape of the full tensor.
        boxes: offsets and sizes of the boxes, which are within the shape. Empty boxes are ignored.

    Raises:
        ValueError: for boxes so irregular that the test would take too long.
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
            raise ValueError(f"its shards divide {len(cut)} dimensions, but do not form a grid")
    return not any(steps.values())
