"""A plot of ratios from a result: ``python -m benchmarks.plot benchmarks/results/NAME.json docs/benchmarks.svg``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from hyper_parallel.debug.svg import dark_style

__all__ = ["draw"]

CASES = ("mlp", "llama")
#: Titles of the tables that are drawn, from these cases.
PANELS = (
    "MLP: forward",
    "MLP: forward and backward",
    "Llama block: forward",
    "Llama block: forward and backward",
    "Llama block, sequence parallel: forward",
    "Llama block, sequence parallel: forward and backward",
)
COLUMN = "ratio to textbook"
LEAST, MOST = 0.4, 16.0
TICKS = (0.5, 1, 2, 4, 8, 16)
WIDTH, LABEL, RIGHT = 890, 360, 60
BAR, GAP, TITLE, TOP, BOTTOM = 14, 4, 34, 30, 34
COLOURS = {"unsharded": "#b0b0b0", "hand-written": "#7a7a7a", "hyper_parallel": "#2563a8", "torch": "#c8752d"}
#: Colour on a white page -> colour on a dark page.
DARK = {
    "#fff": "#16181d",
    "#111": "#f2f2f2",
    "#222": "#e8e8e8",
    "#444": "#c8c8c8",
    "#c33": "#ff7a7a",
    "#ddd": "#44474d",
    "#b0b0b0": "#6c7078",
    "#7a7a7a": "#a2a5aa",
    "#2563a8": "#5b9be0",
    "#c8752d": "#e09350",
}


def _x(ratio: float) -> float:
    """Position on the logarithmic axis."""
    part = math.log(ratio / LEAST) / math.log(MOST / LEAST)
    return LABEL + min(max(part, 0), 1) * (WIDTH - LABEL - RIGHT)


def _text(x: float, y: float, text: str, **attributes: Any) -> str:
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'


def _panel(table: Mapping[str, Any], y: float) -> tuple[list[str], float]:
    """A title and one bar a version, from 1 to its ratio, with its quartiles. The second value is where the next panel
    begins."""
    parts = [_text(8, y + TITLE - 10, table["title"], font_weight="bold")]
    y += TITLE
    column = table["columns"].index(COLUMN)
    for row in table["rows"]:
        name, ratio = row[0], row[column]
        colour = next(colour for start, colour in COLOURS.items() if name.startswith(start))
        one, end, middle = _x(1), _x(ratio["median"]), y + BAR / 2
        low, high = _x(ratio["lower_quartile"]), _x(ratio["upper_quartile"])
        parts += [
            _text(LABEL - 8, middle + 4, name, text_anchor="end"),
            f'<rect x="{min(one, end):.1f}" y="{y:.1f}" width="{abs(end - one):.1f}" height="{BAR}" fill="{colour}"/>',
            f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}" stroke="#111" stroke-width="2"/>',
            _text(max(one, high) + 6, middle + 4, f"{ratio['median']:.2f}"),
        ]
        y += BAR + GAP
    return parts, y


def draw(record: Mapping[str, Any]) -> str:
    """The SVG of a result file's content.

    Raises:
        ValueError: when the result has none of the tables that are drawn.
    """
    drawn = [result for result in record["results"] if result["case"] in CASES]
    tables = {table["title"]: table for result in drawn for table in result["tables"]}
    chosen = [tables[title] for title in PANELS if title in tables]
    if not chosen:
        raise ValueError("the result has no table of the cases mlp and llama")
    bars: list[str] = []
    y: float = TOP
    for table in chosen:
        parts, y = _panel(table, y)
        bars += parts
    axis = []
    for tick in TICKS:
        x = _x(tick)
        colour = "#c33" if tick == 1 else "#ddd"
        axis += [
            f'<path d="M{x:.1f} {TOP}V{y:.1f}" stroke="{colour}"/>',
            _text(x, y + 16, f"{tick:g}", text_anchor="middle"),
        ]
    environment = record["environment"]
    caption = (
        f"Time relative to hand-written Megatron code (1). {environment['processor']}, torch {environment['torch']}."
    )
    opened = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + BOTTOM:.0f}" fill="#222" '
        'font-family="sans-serif" font-size="12" role="img">'
    )
    drawn = ['<rect width="100%" height="100%" fill="#fff"/>', _text(8, 20, caption, fill="#444"), *axis, *bars]
    style = dark_style(DARK, "".join([opened, *drawn]))
    return "\n".join([opened, f"<title>{escape(caption)}</title>", style, *drawn, "</svg>", ""])


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(draw(json.loads(Path(source).read_text())))
