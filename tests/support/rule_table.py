"""The table of canonical operations in docs/rules.md, made from the rules.

    python -m tests.support.rule_table

writes it into the page.
"""

from __future__ import annotations

import inspect
import re
import sys
from itertools import groupby
from pathlib import Path

from hyper_parallel.core.rules import OPERATIONS, CanonicalOp
from hyper_parallel.core.rules.signature import MEANINGS, Argument

__all__ = ["PAGE", "main", "table", "with_table"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rules.md"
BEGIN = "<!-- made by python -m tests.support.rule_table: do not edit -->\n"
END = "<!-- end of the table -->"
_MEMORY = {
    "shared": "a view",
    "viewable": "a view or a copy, as strides allow",
    "contiguous": "x, or a copy that is contiguous",
    "ordered": "new, dimensions ordered as in x",
    "fresh": "new, contiguous",
    "": "new",
}


def table() -> str:
    """The table of static arguments, and one of operations for each module of rules."""
    own = [op for op in OPERATIONS.values() if not op.name.startswith("custom:")]
    modules = [_of_module(module, list(found)) for module, found in groupby(own, lambda op: op.rule.__module__)]
    return "\n".join([*_meanings(), *modules])


def _of_module(module: str, found: list[CanonicalOp]) -> str:
    title = _first_sentence(inspect.getdoc(sys.modules[module]))
    lines = [
        f"**`{module.rpartition('.')[2]}.py`.** {title}",
        "",
        "| operation | meaning | operands | static arguments | result | calls remembered |",
        "|---|---|---|---|---|---|",
    ]
    for op in found:
        in_memory = "written over the first operand" if op.name.endswith("_") else _MEMORY[op.memory]
        cells = (
            f"`{op.name}`",
            _first_sentence(inspect.getdoc(op.rule)),
            _words(op.signature.operands),
            "make no difference" if op.elementwise else _words(op.signature.static),
            "" if op.gathers else in_memory,
            "yes" if op.elementwise or op.repeatable else "",
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def _words(arguments: tuple[Argument, ...]) -> str:
    return ", ".join(f"`{word}`" if (word := str(x)) else "" for x in arguments)


def _meanings() -> list[str]:
    lines = ["| static argument | meaning |", "|---|---|"]
    return [*lines, *(f"| `{name}` | {meaning} |" for name, meaning in MEANINGS.items()), ""]


def _first_sentence(text: str | None) -> str:
    text = " ".join((text or "").partition("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<!\.)\.(?:\s|$)", text)[0] + "."


def with_table(page: str) -> str:
    """``page`` with the table between its markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
