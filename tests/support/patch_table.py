"""The table of patches in docs/patches.md, made from the patches that `platform.patching` installs.

python -m tests.support.patch_table torch         # where torch is installed
python -m tests.support.patch_table mindspore     # where MindSpore is
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from hyper_parallel.platform.patching import Patch

__all__ = ["table", "with_table"]


def table(patches: Sequence[Patch]) -> str:
    """The patches as a table in Markdown; neighbours that differ in their targets only share a row."""
    lines = [
        "| target | without it | tested with | where it is not as expected |",
        "|---|---|---|---|",
    ]
    for (reason, versions, required, everywhere, after), group in groupby(
        patches, lambda p: (p.reason, p.versions, p.required, p.everywhere, p.after)
    ):
        names = dict.fromkeys(target for patch in group for target in patch.targets)
        targets = ", ".join(f"`{name}`" for name in _shortened(names))
        where = ", wherever the framework has it" if everywhere else ""
        where += ", when it is imported" if after else ""
        otherwise = "no DTensors" if required else "left out"
        lines.append(f"| {targets}{where} | {reason} | {versions} | {otherwise} |")
    return "\n".join(lines)


def _shortened(targets: Iterable[str]) -> Iterator[str]:
    """Targets that differ in one part of their names, one behind the other, in one: ``a.{b,c}.d``."""
    rest = list(targets)
    while rest:
        alike = [rest.pop(0)]
        position: int | None = None
        while rest:
            pairs = list(zip(alike[0].split("."), rest[0].split("."), strict=False))
            differing = [i for i, (a, b) in enumerate(pairs) if a != b]
            same_length = alike[0].count(".") == rest[0].count(".")
            if not same_length or len(differing) != 1 or position not in (None, differing[0]):
                break
            position = differing[0]
            alike.append(rest.pop(0))
        parts = alike[0].split(".")
        if position is not None:
            parts[position] = "{" + ", ".join(name.split(".")[position] for name in alike) + "}"
        yield ".".join(parts)


def with_table(page: str, framework: str, text: str) -> str:
    """``page`` with ``text`` as the table of ``framework``.

    Raises:
        ValueError: the page has no place for it.
    """
    begin = f"<!-- made by python -m tests.support.patch_table {framework}: do not edit -->"
    pattern = re.compile(f"({re.escape(begin)}\n).*?(<!-- end -->)", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"the page must have this line once, and <!-- end --> after it:\n{begin}")
    return pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.patch_table")
    parser.add_argument("framework", help="torch or mindspore: a folder of hyper_parallel/platform/")
    parser.add_argument("page", nargs="?", type=Path, default=Path("docs/patches.md"))
    arguments = parser.parse_args()
    patches = importlib.import_module(f"hyper_parallel.platform.{arguments.framework}.patches").PATCHES.patches
    page = arguments.page.read_text(encoding="utf-8")
    arguments.page.write_text(with_table(page, arguments.framework, table(patches)), encoding="utf-8")


if __name__ == "__main__":
    _main()
