"""Tables and sizes for terminals, in plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

__all__ = ["TERMINAL", "fold_lines", "format_bytes", "format_seconds", "format_table"]

#: Columns of a terminal of the default width.
TERMINAL = 80
#: Minimum width to which a column is folded.
_NARROW = 16

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(size: float) -> str:
    """Return bytes as text, in the unit that gives a short number.

    Example:
        >>> format_bytes(0), format_bytes(1536), format_bytes(3 * 2**30)
        ('0 B', '1.5 KiB', '3 GiB')
    """
    unit = 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def format_seconds(seconds: float | None) -> str:
    """Return seconds as text, in the unit that gives a short number; a dash for None.

    Example:
        >>> format_seconds(0.00025), format_seconds(1.5), format_seconds(None)
        ('250 us', '1.5 s', '-')
    """
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = (), width: int | None = None
) -> str:
    """Return a table whose columns have the width of their widest cell. Columns with the indices ``right`` are
    right-aligned.

    Args:
        head: names of the columns.
        rows: cells.
        right: indices of the right-aligned columns.
        width: maximum width of a line. If a line is longer, the widest of the left-aligned columns is folded between
            words, and then the next widest.

    Example:
        >>> print(format_table(("module", "bytes"), [("up", 12), ("down", 4)], right=[1]))
        module  bytes
        up         12
        down        4
    """
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    folds = sorted((i for i in range(len(head)) if i not in right), key=lambda i: -widths[i])
    for i in folds:
        over = 0 if width is None else sum(widths) + 2 * (len(head) - 1) - width
        if over > 0 and widths[i] > _NARROW:
            widths[i] = max(widths[i] - over, _NARROW)
    lines = []
    for row in cells:
        folded = [_folded(c, w) if i in folds else [c] for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        for k in range(max(map(len, folded))):
            texts = [parts[k] if k < len(parts) else "" for parts in folded]
            line = [
                c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(texts, widths, strict=True))
            ]
            lines.append("  ".join(line).rstrip())
    return "\n".join(lines)


def _folded(cell: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a cell, folded if it is too wide. All lines but the first start with ``indent``."""
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def fold_lines(text: str, width: int) -> str:
    """Return ``text`` with lines longer than ``width`` folded between words. Continuation lines are indented by eight
    more columns than their line. A word longer than ``width`` is not divided.

    Example:
        >>> print(fold_lines("weight (8, 4) -> (4, 4), Shard(0) on tp", 32))
        weight (8, 4) -> (4, 4),
                Shard(0) on tp
    """
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += [line] if len(line) <= width else _folded(line, width, indent + " " * 8)
    return "\n".join(lines)
