"""Small SVG pictures: text, boxes and lines, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["COLOURS", "DARK", "Svg", "dark_style", "svg_of_lines"]

#: Colours that are readable on white and distinguishable, also for the colour-blind (Okabe and Ito 2008, lightened).
COLOURS = ("#9ecae9", "#f6c177", "#a3d9b1", "#f4a6a0", "#cdb7e9", "#f2e08a", "#b8c4ce", "#e5b8d0")
#: Colour on a white page -> colour of the same part on a dark page. The colours of boxes carry text in both.
DARK = {
    "white": "#16181d",
    "#fff": "#16181d",
    "#fafafa": "#1f2229",
    "#eaf4ea": "#18301c",
    "#e8e8e8": "#3a3d42",
    "#ddd": "#44474d",
    "#222": "#e8e8e8",
    "#555": "#b4b7bc",
    "#070": "#7ed07e",
    "#9ecae9": "#2b5f86",
    "#f6c177": "#825410",
    "#a3d9b1": "#2c6a3e",
    "#f4a6a0": "#8f3a34",
    "#cdb7e9": "#5d4289",
    "#f2e08a": "#655a12",
    "#b8c4ce": "#47535e",
    "#e5b8d0": "#7c3f60",
}
_FONT = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace' font-size='12'"
#: Width and height of a character of that font.
WIDTH, HEIGHT = 7.3, 18


class Svg:
    """An SVG picture that grows with its contents."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.width = self.height = 0.0

    def box(self, x: float, y: float, width: float, height: float, fill: str, label: str = "") -> None:
        """Draw a rectangle with a label in its middle."""
        self._parts.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{fill}' stroke='#555' "
            "stroke-width='0.7'/>"
        )
        self._grow(x + width, y + height)
        if label:
            self._parts.append(
                f"<text x='{x + width / 2:.1f}' y='{y + height / 2 + 4:.1f}' text-anchor='middle' fill='#222' {_FONT}>"
                f"{escape(label)}</text>"
            )

    def grid(self, x: float, y: float, width: float, height: float, side: float) -> None:
        """Draw thin lines that divide a rectangle into squares."""
        steps = [(x + i * side, y, x + i * side, y + height) for i in range(1, round(width / side))]
        steps += [(x, y + i * side, x + width, y + i * side) for i in range(1, round(height / side))]
        for x1, y1, x2, y2 in steps:
            self._parts.append(
                f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='#555' stroke-width='0.2'/>"
            )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a straight line."""
        self._parts.append(
            f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='#555' stroke-width='0.7'/>"
        )
        self._grow(max(x1, x2), max(y1, y2))

    def text(self, x: float, y: float, text: str, *, bold: bool = False, colour: str = "#222") -> None:
        """Draw a line of text; ``y`` is its baseline."""
        weight = " font-weight='bold'" if bold else ""
        self._parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}' xml:space='preserve'{weight} {_FONT}>{escape(text)}</text>"
        )
        self._grow(x + len(text) * WIDTH, y + 4)

    def dots(self, dots: Sequence[tuple[float, float, str, str]]) -> None:
        """Draw small squares with labels. If there is room, a label covers no square and no other label.

        Args:
            dots: x, y, colour and label of each square.
        """
        taken = [(x - 5, y - 5, x + 5, y + 5) for x, y, _, _ in dots]
        for x, y, colour, label in dots:
            self.box(x - 4, y - 4, 8, 8, colour)
            wide = len(label) * WIDTH
            places = [(x + 7, y + 4), (x - 7 - wide, y + 4), (x - wide / 2, y - 8), (x - wide / 2, y + 17)]
            areas = [(at, foot - 10, at + wide, foot + 2) for at, foot in places]
            best = next((i for i, area in enumerate(areas) if not any(_overlap(area, other) for other in taken)), 0)
            taken.append(areas[best])
            self.text(*places[best], label)

    def __str__(self) -> str:
        width, height = self.width + 12, self.height + 12
        drawn = f"<rect width='100%' height='100%' fill='white'/>{''.join(self._parts)}"
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' "
            f"height='{height:.0f}'>{dark_style(DARK, drawn)}{drawn}</svg>\n"
        )

    def _grow(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def dark_style(dark: Mapping[str, str], drawn: str) -> str:
    """Return the style element that gives a picture other colours on a dark page.

    A renderer without style sheets draws the attributes, which are the colours on a white page.

    Args:
        dark: colour on a white page -> colour on a dark page.
        drawn: elements of the picture. The style lists the colours that they have.
    """
    rules = "".join(
        f"[{kind}='{light}']{{{kind}:{colour}}}"
        for light, colour in dark.items()
        for kind in ("fill", "stroke")
        if f"{kind}='{light}'" in drawn or f'{kind}="{light}"' in drawn
    )
    return f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"


def svg_of_lines(lines: Sequence[str]) -> str:
    """Return lines of text as a picture. Lines that start with ``#`` are bold, without the ``#``."""
    picture = Svg()
    for i, line in enumerate(lines):
        bold = line.startswith("#")
        picture.text(12, 24 + i * HEIGHT, line.lstrip("# ") if bold else line, bold=bold)
    return str(picture)
