"""All programs, and the page of them, docs/mindspore_programs.md: ``python -m tests.mindspore.programs.table``."""

from __future__ import annotations

from pathlib import Path

from tests.mindspore.programs import cells, inside, loops, losses, optimizers
from tests.mindspore.programs.program import STEPS, WAYS, Program

__all__ = ["GROUPS", "PAGE", "PROGRAMS", "text"]

GROUPS: dict[str, dict[str, Program]] = {
    "Cells": cells.PROGRAMS,
    "Losses": losses.PROGRAMS,
    "Steps": optimizers.PROGRAMS,
    "Loops": loops.PROGRAMS,
    "Inside of cells": inside.PROGRAMS,
}
PROGRAMS: dict[str, Program] = {name: program for group in GROUPS.values() for name, program in group.items()}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "mindspore_programs.md"

_HEAD = f"""# Programs of MindSpore

Each of these {len(PROGRAMS)} programs is written as users of MindSpore write them. Each runs {STEPS} steps on one
device, and in four ways in parallel:

- tensor parallel on two ranks,
- under `fully_shard` on two ranks,
- under `replicate` on two ranks,
- tensor parallel under `fully_shard` on 2 x 2 ranks.

The losses, all gradients and all parameters afterwards are equal to those of the one device. Where a way is refused,
all ranks raise the same error, which names the remedy. `tests/mindspore/test_programs.py` runs the programs: all of
them in `make nightly`, some in `make test`.
"""


def text() -> str:
    """The page."""
    lines = [_HEAD]
    for group, programs in GROUPS.items():
        lines += [f"## {group}", "", "| program | has | " + " | ".join(WAYS) + " |", "|---|---|" + "---|" * len(WAYS)]
        for name, program in programs.items():
            ways = ("refused" if way in program.refused else "equal" for way in WAYS)
            lines.append(f"| {name} | {program.says} | {' | '.join(ways)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(text())
