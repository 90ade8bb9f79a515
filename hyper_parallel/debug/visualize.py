"""Display of the shard of a tensor on each rank. Mirrors ``torch.distributed.tensor.debug.visualize_sharding``."""

from __future__ import annotations

from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.rectangles import held_rectangles
from hyper_parallel.debug.svg import COLOURS, Svg
from hyper_parallel.debug.text import format_table

__all__ = ["sharding_picture", "sharding_table", "visualize_sharding"]


def visualize_sharding(dtensor: Any, header: str = "", use_rich: bool = False, *, path: str | None = None) -> None:
    """Print which ranks hold which rows and columns, on the first rank of the mesh.

    Args:
        dtensor: `DTensor` of one or two dimensions. Nothing is printed for an empty one.
        header: a line to print before the table.
        use_rich: ignored. Torch has this argument, but here the table is plain text and needs no other package.
        path: path of an SVG file that the first rank writes as well.

    Raises:
        TypeError: if ``dtensor`` is no DTensor.
        ValueError: if it has no dimensions or more than two.

    Example:
        >>> from hyper_parallel import Shard, init_device_mesh, zeros
        >>> from hyper_parallel.debug import visualize_sharding
        >>> visualize_sharding(zeros(4, 2, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(0)]))
                 Col 0-1
        Row 0-3  cpu:0

    Source: ``torch.distributed.tensor.debug.visualize_sharding``.
    """
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"visualize_sharding takes a DTensor, got {type(dtensor).__name__}")
    layout: Layout = dtensor._layout
    if layout.ndim not in (1, 2):
        raise ValueError(
            f"visualize_sharding shows tensors of one or two dimensions, got a tensor of shape {tuple(layout.shape)}"
        )
    place = layout.mesh.get_coordinate()
    if 0 in layout.shape or place is None or any(place):
        return
    print(*([header] if header else []), sharding_table(layout), sep="\n")
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(sharding_picture(layout, header))


def _held(layout: Layout) -> dict[tuple[tuple[int, int], tuple[int, int]], list[int]]:
    """Return (first and last row, first and last column) -> the ranks that hold these elements."""
    cells: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
    for place, rank in np.ndenumerate(layout.mesh.ranks):
        for rectangle in held_rectangles(layout, place):
            spans = [(at, at + n - 1) for at, n in zip(rectangle.offsets, rectangle.sizes, strict=True)]
            rows, columns = spans if layout.ndim == 2 else (spans[0], (0, 0))
            cells.setdefault((rows, columns), []).append(int(rank))
    return cells


def sharding_picture(layout: Layout, header: str = "") -> str:
    """Return the picture of `visualize_sharding`: a rectangle for each shard, with the ranks that hold it.

    Lines separate the elements of a small tensor.
    """
    picture, cells = Svg(), _held(layout)
    top = 12.0
    if header:
        picture.text(12, 24, header, bold=True)
        top = 36.0
    rows, columns = (*layout.shape, 1)[:2]
    side = min(30.0, 300.0 / max(rows, columns))
    for ((top_row, bottom_row), (first, last)), ranks in sorted(cells.items()):
        left, width = 12 + first * side, (last - first + 1) * side
        y, height = top + top_row * side, (bottom_row - top_row + 1) * side
        # A tensor that every rank holds is grey, because there are no shards to distinguish.
        colour = "#e8e8e8" if len(ranks) == layout.mesh.size() > 1 else COLOURS[min(ranks) % len(COLOURS)]
        picture.box(left, y, width, height, colour, ", ".join(map(str, sorted(ranks))))
        if side >= 12:
            picture.grid(left, y, width, height, side)
    shape = " x ".join(map(str, layout.shape))
    picture.text(12, top + rows * side + 18, f"{shape} elements, and the ranks that hold them", colour="#555")
    return str(picture)


def sharding_table(layout: Layout) -> str:
    """Return the table of `visualize_sharding`: a row and a column for each range of indices of the shards."""
    cells = _held(layout)
    all_rows, all_columns = (sorted({cell[i] for cell in cells}) for i in (0, 1))
    kind = layout.mesh.device_type
    table = []
    for rows in all_rows:
        held = [cells.get((rows, columns), []) for columns in all_columns]
        names = [f"{kind}:{','.join(map(str, sorted(ranks)))}" if ranks else "" for ranks in held]
        table.append([f"Row {rows[0]}-{rows[1]}", *names])
    return format_table(("", *(f"Col {first}-{last}" for first, last in all_columns)), table)
