"""docs/operators.md: one table for each framework, written anew from the findings."""

from __future__ import annotations

import datetime
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from hyper_parallel.testing.fuzz.record import commit_of
from tests.support.operator_table.table import ORDER, worst

__all__ = ["PAGE", "read", "said", "section", "write"]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operators.md"
WIDTH = 120
FORMS = ("forward", "backward", "in place", "sum in place", "out=")
_NO_KERNEL = re.compile(r"unregistered|[Nn]ot found op|supports? Ascend|Create kernelmod|Not implement exception|: -+$")

_FIRST = "|".join(form.capitalize() for form in FORMS)
_PARAGRAPH = re.compile(rf"^\*\*((?:{_FIRST}) .+?)\*\* \(\d+\):(.+?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)
_VERDICT = re.compile(rf"(?:^|, )({'|'.join(FORMS)}) ({'|'.join(ORDER)})")


_UNTRIED = re.compile(r"^\*\*Not tried,\s(.+?)\*\* \(\d+\):(.+?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)
_STAMP = re.compile(r"samples\s+each\s+\(([^)]+)\)\.")
#: Why an operator was not tried -> a text for which `_reason` gives that.
_TEXTS = {
    "since there is no kernel for CPU": "unregistered",
    "since there are no samples": "no samples",
    "since no operand is a tensor": "no tensors",
    "since one device cannot compute the samples": "one device",
}


def write(platform: str, found: dict[str, Any], samples: int, title: str, all_anew: bool = True) -> None:
    """Put the section of ``platform`` into the page, with date and commit of the oldest operator in it.

    Args:
        all_anew: whether all operators were tried now. If not, date and commit stay.
    """
    page = PAGE.read_text(encoding="utf-8")
    before = _STAMP.search(page.partition(f"<!-- begin {platform} -->")[2])
    if all_anew or before is None:
        stamp = f"{datetime.date.today().isoformat()}, `{commit_of(PAGE.parents[1])}`"
    else:
        stamp = before[1]
    begin, end = f"<!-- begin {platform} -->\n", f"<!-- end {platform} -->"
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    PAGE.write_text(before + begin + section(platform, found, samples, title, stamp) + end + after, encoding="utf-8")


def read(platform: str) -> dict[str, dict[str, str]]:
    """The content of the page: operator -> form -> verdict."""
    text = PAGE.read_text(encoding="utf-8").partition(f"<!-- begin {platform} -->")[2]
    said = {}
    for heading, names in _PARAGRAPH.findall(text.partition(f"<!-- end {platform} -->")[0]):
        verdicts = dict(_VERDICT.findall(" ".join(heading.lower().split())))
        said.update(dict.fromkeys(re.findall(r"`([^`]+)`", names), verdicts))
    return said


def said(platform: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """The page's verdicts on these operators, in the form of the findings of a trial. New operators have none."""
    text = PAGE.read_text(encoding="utf-8").partition(f"<!-- begin {platform} -->")[2]
    text = text.partition(f"<!-- end {platform} -->")[0]
    lines: dict[str, dict[str, Any]] = {}
    for name, forms in read(platform).items():
        lines[name] = {"found": {form: {verdict: []} for form, verdict in forms.items()}}
    for reason, listed in _UNTRIED.findall(text):
        lines |= {name: {"untried": _TEXTS[reason]} for name in re.findall(r"`([^`]+)`", listed)}
    return {name: lines[name] for name in names if name in lines}


def section(platform: str, found: dict[str, Any], samples: int, title: str, stamp: str) -> str:
    """The table of one platform. ``stamp`` has the date and the commit in the form that pages have."""
    tried = {name: line for name, line in found.items() if "found" in line}
    counts = {form: Counter(filter(None, (worst(line, form) for line in tried.values()))) for form in FORMS}
    title = title[0].upper() + title[1:]
    first = f"{title}: {len(found)} operators, {len(tried)} of them tried, with up to {samples} samples each ({stamp})."
    lines = ["", textwrap.fill(first, WIDTH), ""]
    lines.append(f"| | {' | '.join(FORMS)} |\n|---|{'---:|' * len(FORMS)}")
    lines += [f"| {verdict} | {' | '.join(str(counts[form][verdict]) for form in FORMS)} |" for verdict in ORDER]
    lines.append("")
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, line in tried.items():
        groups.setdefault(tuple(worst(line, form) for form in FORMS), []).append(name)
    for key in sorted(groups, key=lambda key: [ORDER.index(v) if v else -1 for v in key]):
        lines.append(_paragraph(_heading(key), groups[key]))
    reasons: dict[str, list[str]] = {}
    for name, line in found.items():
        if "untried" in line:
            reasons.setdefault(_reason(line["untried"]), []).append(name)
    for reason, names in sorted(reasons.items()):
        lines.append(_paragraph(f"Not tried, {reason}", names))
    return "\n".join(lines) + "\n"


def _heading(key: tuple[str, ...]) -> str:
    parts = [f"{form} {verdict}" for form, verdict in zip(FORMS, key, strict=True) if verdict]
    return ", ".join(parts)


def _paragraph(heading: str, names: list[str]) -> str:
    text = f"**{heading[0].upper()}{heading[1:]}** ({len(names)}): " + ", ".join(f"`{n}`" for n in sorted(names))
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def _reason(text: str) -> str:
    if _NO_KERNEL.search(text):
        return "since there is no kernel for CPU"
    if text.startswith("no samples"):
        return "since there are no samples"
    if text.startswith("no tensors"):
        return "since no operand is a tensor"
    return "since one device cannot compute the samples"
