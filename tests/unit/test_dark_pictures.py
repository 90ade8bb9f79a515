"""Pictures can be read on white pages and on dark ones: contrast of each text, and of each outline.

No browser is needed: colours are read from the pictures, and those of dark pages from their style.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hyper_parallel.debug.description import Description, ModuleDescription, TensorDescription
from hyper_parallel.debug.plan_picture import plan_picture
from hyper_parallel.debug.svg import COLOURS, DARK, WIDTH, Svg

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = sorted([*DOCS.glob("*.svg"), *(DOCS / "pictures").glob("*.svg")])
#: Least contrast of text, and of parts of a picture (WCAG 2.1, 1.4.3 and 1.4.11).
TEXT, PARTS = 4.5, 3.0
WHITE_PAGE, DARK_PAGE = False, True


def brightness(colour: str) -> float:
    """Relative luminance of a colour such as ``#fff``."""
    digits = "ffffff" if colour == "white" else colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    low, high = sorted((brightness(a), brightness(b)))
    return (high + 0.05) / (low + 0.05)


def faint(text: str, dark: bool) -> list[str]:
    """Texts and outlines of a picture with too little contrast to their background."""
    root = ElementTree.fromstring(text)
    rules = re.findall(r"\[(fill|stroke)='([^']+)'\]\{(?:fill|stroke):([^}]+)\}", text)
    mapped = {(kind, light): colour for kind, light, colour in rules}

    def colour(kind: str, given: str) -> str:
        return mapped.get((kind, given), given) if dark else given

    found, behind, ink = [], [], root.get("fill", "#000")
    for part in root:
        tag, fill, stroke = part.tag.rpartition("}")[2], part.get("fill", ink), part.get("stroke")
        x, y = float(part.get("x", 0)), float(part.get("y", 0))
        if tag == "rect":
            whole = part.get("width") == "100%"
            width, height = (1e9 if whole else float(part.get(side, 0)) for side in ("width", "height"))
            page = behind[0][-1] if behind else colour("fill", fill)
            if stroke and contrast(colour("stroke", stroke), page) < PARTS:
                found.append(f"an outline, {stroke}")
            if fill != "none":
                behind.append((x, y, x + width, y + height, colour("fill", fill)))
        elif tag == "text":
            over = next(
                c for left, top, right, low, c in reversed(behind) if left <= x <= right and top <= y - 4 <= low
            )
            if contrast(colour("fill", fill), over) < TEXT:
                found.append(f"{part.text!r}, {fill} on {over}")
    return found


def test_every_colour_carries_text_on_both_pages() -> None:
    picture = Svg()
    for i, colour in enumerate((*COLOURS, "#e8e8e8", "#ddd", "#fafafa", "#eaf4ea")):
        picture.box(20.0, 20.0 + 30 * i, 30, 20, colour, str(i))
        picture.text(60, 35 + 30 * i, "quiet", colour="#555")
    picture.text(60, 600, "good", colour="#070")
    for dark in (WHITE_PAGE, DARK_PAGE):
        assert faint(str(picture), dark) == []
    for light in DARK:
        drawn = Svg()
        drawn.box(0, 0, 9, 9, light)
        assert f"[fill='{light}']{{fill:{DARK[light]}}}" in str(drawn), "the style has the colours that are drawn"
    plain = Svg()
    plain.text(12, 24, "faint", colour="#777")
    assert faint(str(plain), WHITE_PAGE) == ["'faint', #777 on white"], "the test can fail"
    # A colour without a counterpart stays as it is on a dark page.
    plain = Svg()
    plain.text(12, 24, "black", colour="#111")
    assert faint(str(plain), WHITE_PAGE) == [] and len(faint(str(plain), DARK_PAGE)) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_committed_pictures(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    for dark in (WHITE_PAGE, DARK_PAGE):
        assert faint(text, dark) == []


def test_labels_of_near_dots_do_not_overlap() -> None:
    picture = Svg()
    near = [(100.0, 100.0), (104.0, 94.0), (130.0, 98.0), (300.0, 100.0)]
    picture.dots([(x, y, COLOURS[0], f"{i}2x2") for i, (x, y) in enumerate(near)])
    root = ElementTree.fromstring(str(picture))
    feet = [(float(x.get("x", 0)), float(x.get("y", 0))) for x in root if x.tag.endswith("text")]
    areas = [(x, y - 9, x + 4 * WIDTH, y) for x, y in feet]
    areas += [(x - 4, y - 4, x + 4, y + 4) for x, y in near]
    clash = [(a, b) for i, a in enumerate(areas[:4]) for b in areas[i + 1 :] if meet(a, b)]
    assert clash == [] and feet[3] == (307.0, 104.0), "a label with room stays on the right"


def meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def test_a_plan_is_drawn_with_lines_between_shards() -> None:
    weight = TensorDescription("w", "parameter", (8, 4), (2, 4), "float32", ("Shard(0)",), ("tp",), 128, 32, True)
    drawn = plan_picture(Description([ModuleDescription("up", "Linear", ("ColwiseParallel()",), [weight])]))
    root = ElementTree.fromstring(drawn)
    assert sum(x.tag.endswith("line") for x in root) == 3
    assert all(x.get(side) not in ("0.0", "0") for x in root for side in ("width", "height")), "not drawn by a viewer"
