"""A comparison as a picture: the difference of each tensor, on a logarithmic scale, in the order of the run."""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.debug.svg import COLOURS, HEIGHT, WIDTH, Svg

__all__ = ["picture"]

#: Width of a power of ten in points, and the smallest power that is drawn.
_DECADE, _LEAST = 26, -9
_PARTS = (
    ("forward", ("parameter", "buffer", "input", "output")),
    ("backward", ("gradient", "parameter gradient", "update")),
)


def picture(comparison: Any) -> str:
    """Return the picture as SVG. A bar shows the difference of a tensor, and a vertical line shows its bound."""
    svg = Svg()
    first = comparison.first
    title = "the runs agree" if first is None else f"the runs part at {first.culprit}"
    svg.text(12, 24, f"{comparison.a} and {comparison.b}: {title}", bold=True)
    y = 24.0 + HEIGHT
    left = 24 + WIDTH * max(len(row.name) for row in comparison.rows)
    for part, kinds in _PARTS:
        rows = [row for row in comparison.rows if row.kind in kinds]
        if not rows:
            continue
        y += HEIGHT
        svg.text(12, y, part, bold=True)
        for power in range(_LEAST, 1, 3):
            svg.text(left + (power - _LEAST) * _DECADE, y, f"1e{power}", colour="#555")
        for row in rows:
            y += HEIGHT
            colour = COLOURS[3] if row.departs else COLOURS[2]
            svg.text(12, y, row.name, bold=row is first)
            svg.box(left, y - 11, _length(row.difference), 12, colour)
            svg.box(left + _length(row.bound), y - 13, 1, 16, "#555")
        y += HEIGHT / 2
    return str(svg)


def _length(x: float) -> float:
    if not x > 0:
        return 1.0
    power = math.log10(x) if math.isfinite(x) else 1.0
    return max(min(power, 1.0) - _LEAST, 0.0) * _DECADE + 1
