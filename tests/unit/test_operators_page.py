"""docs/operators.md is the output of its generator: every category is counted, and the counts are those of the
names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ci.figures import STAMP
from tests.support.operator_table.page import FORMS, PAGE, section
from tests.support.operator_table.table import ORDER

#: A text of `judge` for each reason why operators are not tried.
UNTRIED = {
    "since there is no kernel for CPU": "one device: RuntimeError at x.py:1: The kernel Abs unregistered",
    "since there are no samples": "no samples",
    "since no operand is a tensor": "no tensors",
    "since one device cannot compute the samples": "one device: ValueError at x.py:1: no",
}
FRAMEWORKS = ("torch-cpu", "mindspore")


def written(platform: str) -> str:
    """The section of the page."""
    return PAGE.read_text(encoding="utf-8").partition(f"<!-- begin {platform} -->\n")[2].partition("<!-- end")[0]


def read_back(text: str) -> dict[str, Any]:
    """Read the findings back from the paragraphs of a section."""
    found: dict[str, Any] = {}
    for heading, count, listed in re.findall(r"^\*\*([^*]+)\*\*\s\((\d+)\):\s([^*]+)$", text, re.MULTILINE):
        heading = " ".join(heading.split())  # long ones have a second line
        names = re.findall(r"`(\S+)`", listed)
        assert len(names) == int(count), heading
        if heading.startswith("Not tried, "):
            found.update({name: {"untried": UNTRIED[heading.removeprefix("Not tried, ")]} for name in names})
            continue
        forms = {}
        for part in heading.split(", "):
            form = next(form for form in FORMS if part.lower().startswith(f"{form} "))
            forms[form] = {part[len(form) + 1 :]: [""]}
        found.update({name: {"found": forms} for name in names})
    return found


@pytest.mark.parametrize("platform", FRAMEWORKS)
def test_the_page_is_what_the_generator_makes(platform: str) -> None:
    text = written(platform)
    first = " ".join(text.strip().partition("\n\n")[0].split())
    heading = re.fullmatch(r"(.+): (\d+) operators, .* with up to (\d+) samples each \((.+)\)\.", first)
    assert heading is not None, "the tool has not written this section"
    title, operators, samples, stamp = heading.groups()
    found = read_back(text)
    assert len(found) == int(operators)
    assert text == section(platform, found, int(samples), title, stamp)
    assert int(samples) == 6 and STAMP.fullmatch(stamp)


@pytest.mark.parametrize("platform", FRAMEWORKS)
def test_every_category_is_counted_and_none_is_bad(platform: str) -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| ([\d |]+) \|$", written(platform), re.MULTILINE))
    assert list(rows) == list(ORDER)
    for bad in ("wrong", "hanging"):
        assert set(rows[bad].split(" | ")) == {"0"}, bad
    explained = re.findall(r"^\| ([a-z ]+) \| .*[a-z]", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(ORDER) <= set(explained)


def test_the_worst_counts() -> None:
    found = {
        "a": {"found": {"forward": {"own rule": [""], "hanging": ["x"]}, "out=": {"refused": ["x"]}}},
        "b": {"found": {"forward": {"unsteady": ["", ""]}, "backward": {"wrong": ["x"], "gathered": [""]}}},
        "c": {"untried": "no tensors"},
    }
    text = section("torch-cpu", found, 6, "A list", "2026-11-25, `dc9abd3e`")
    assert "A list: 3 operators, 2 of them tried" in text
    for line in (
        "| hanging | 1 | 0 | 0 | 0 | 0 |",
        "| unsteady | 1 | 0 | 0 | 0 | 0 |",
        "| wrong | 0 | 1 | 0 | 0 | 0 |",
    ):
        assert line in text
    assert "**Forward hanging, out= refused** (1): `a`" in text
    assert "**Not tried, since no operand is a tensor** (1): `c`" in text
    assert read_back(text).keys() == found.keys()
