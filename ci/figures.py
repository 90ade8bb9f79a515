"""List the measured figures of the documentation with the commit of each, and the number of commits since then.

    python -m ci.figures [--older 200] [--strict]
    python -m ci.figures --write    # the sections that are generated from results in ci/ and benchmarks/

A stamp, such as ``2026-11-26 (`b2500a27`)``, holds the date and the commit of a measurement, or of the figure's entry
where nothing else is known. It covers its paragraph, and the tables, lists and code that follow directly. A stamp in a
comment, ``<!-- 2026-11-26, `b2500a27` -->``, covers all text up to the next heading.

Figures older than 200 commits, and commits that git does not know, are marked. Paragraphs that seem to have a measured
figure but no stamp are listed below. With ``--strict`` the exit status is 1 if there is any of these three.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ci import figure_tables

__all__ = ["Figure", "age", "pages", "stamps", "unstamped"]

ROOT = Path(__file__).resolve().parent.parent
#: Folders with pages, in addition to the root.
FOLDERS = ("benchmarks", "ci", "docs", "examples", "platform")
#: Pages that do not document the present state, or that have a stamp for a whole run.
LEFT_OUT = ("CHANGELOG.md", "benchmarks/results/")
STAMP = re.compile(r"(?P<date>\d{4}-\d{2}-\d{2}),?\s\(?`(?P<commit>[0-9a-f]{7,40})(?:\+changes)?`")
COMMENT = re.compile(rf"<!--\s*{STAMP.pattern}\s*-->")
#: Units of measured numbers; units that settings have too; and words that mark a number with such a unit as measured.
UNIT = re.compile(r"\d (?:ms|us|µs|GiB/s|(?:micro|milli)seconds)\b")
OTHER_UNIT = re.compile(r"\d (?:s|GB|seconds|minutes|hours)\b")
WORD = re.compile(r"\b(?:takes?|took|costs?|measured|medians?)\b", re.IGNORECASE)
#: A ratio of times; a table row with two numbers; a date, which tells when something was found.
RATIO = re.compile(r"\d\.\d+ (?:\([^)]*\) )?(?:times|of the time|of its time|of torch's time)\b")
ROW = re.compile(r"^\|(?:.*\| ?\**\d+\.\d\d?\b(?!\.)){2}", re.MULTILINE)
DATED = re.compile(r"(?<![\w#-])20\d\d-\d\d-\d\d\b")
#: (page, words) of numbers that look measured and are not -> their kind.
NO_FIGURE: dict[tuple[str, str], str] = {
    ("benchmarks/README.md", "a turn is about 10 ms"): "a setting of the benchmarks",
    ("docs/faults.md", "30 minutes"): "a time-out of torch's",
    ("docs/notes/mutants.md", "for about 25 s"): "a limit that is set",
    ("docs/mindspore.md", "after 30 s"): "a time-out of MindSpore's",
    ("docs/mindspore.md", "below 30 s"): "a time-out of msrun's",
}
#: Code, and text that a program generates and a test checks.
MADE = re.compile(r"<!-- (?:made by|begin).*?<!-- end.*?-->|^```.*?^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Figure:
    """A stamp on a page.

    Attributes:
        place: ``file:line``.
        commit, date: commit and date in the stamp.
    """

    place: str
    commit: str
    date: str


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages below ``root`` whose figures are checked."""
    found = [*root.glob("*.md"), *(page for folder in FOLDERS for page in (root / folder).rglob("*.md"))]
    return sorted(page for page in found if not page.relative_to(root).as_posix().startswith(LEFT_OUT))


def stamps(name: str, text: str) -> list[Figure]:
    """Return the stamps of a page, from top to bottom."""
    return [
        Figure(f"{name}:{text.count(chr(10), 0, found.start()) + 1}", found["commit"], found["date"])
        for found in STAMP.finditer(text)
    ]


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the blocks between empty lines, without generated text."""
    text = MADE.sub(lambda made: "\n" * made[0].count("\n"), text)
    for found in re.finditer(r"\S.*?(?=\n\s*\n|\Z)", text, re.DOTALL):
        yield text.count("\n", 0, found.start()) + 1, found[0]


def unstamped(name: str, text: str) -> list[str]:
    """Return ``file:line: figure`` of paragraphs that seem to have a measured figure which no stamp covers."""
    for page, words in NO_FIGURE:
        text = text.replace(words, re.sub(r"\d", "n", words)) if page == name else text
    found, covered, section = [], False, False
    for line, block in _blocks(text):
        if block.startswith("#"):
            covered = section = False
            continue
        section |= bool(COMMENT.search(block))
        goes_on = block.startswith(("|", "- ", "* ", "> ", "    ", "1. "))
        covered = section or bool(STAMP.search(block)) or (covered and goes_on)
        searched = [UNIT, RATIO, ROW, DATED, *([OTHER_UNIT] if WORD.search(block) else [])]
        figure = next(filter(None, (pattern.search(block) for pattern in searched)), None)
        if figure and not covered:
            at = line + block.count("\n", 0, figure.start())
            found.append(f"{name}:{at}: {text.splitlines()[at - 1].strip()}")
    return found


def age(root: Path, commit: str) -> int | None:
    """Return the number of commits in HEAD that ``commit`` lacks, or None if git does not know ``commit``."""
    command = ["git", "rev-list", "--count", f"{commit}..HEAD"]
    done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    return None if done.returncode else int(done.stdout)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ci.figures", description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    parser.add_argument("--older", type=int, default=200, metavar="N", help="mark those older than N commits")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where something is marked or has no stamp")
    parser.add_argument("--write", action="store_true", help="write the sections that programs make, and list nothing")
    arguments = parser.parse_args(argv)
    root, age_of = arguments.root, cache(age)
    if arguments.write:
        for path, text in figure_tables.renewed(root).items():
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(root)} is written")
        return 0
    figures, bare = [], []
    for page in pages(root):
        name, text = page.relative_to(root).as_posix(), page.read_text(encoding="utf-8")
        figures += stamps(name, text)
        bare += unstamped(name, text)
    marked = 0
    width = max((len(figure.place) for figure in figures), default=0)
    for figure in figures:
        commits = age_of(root, figure.commit)
        mark = "UNKNOWN" if commits is None else "OLD" if commits > arguments.older else ""
        marked += bool(mark)
        how_old = "" if commits is None else f"{commits} commits"
        print(f"{figure.place:<{width}}  {figure.commit:<10}  {figure.date}  {how_old:>12}  {mark}".rstrip())
    print(f"{len(figures)} with a commit, {marked} of them older than {arguments.older} commits or of an unknown one")
    if bare:
        print(f"\n{len(bare)} without a commit:", *bare, sep="\n")
    return int(arguments.strict and bool(marked or bare))


if __name__ == "__main__":
    sys.exit(main())
