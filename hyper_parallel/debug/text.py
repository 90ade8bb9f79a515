"""Tables and sizes for terminals, in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["format_bytes", "format_seconds", "format_table"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(size: float) -> str:
    """Bytes with the unit in which they are a short number.

    Example:
        >>> format_bytes(0), format_bytes(1536), format_bytes(3 * 2**30)
        ('0 B', '1.5 KiB', '3 GiB')
    """
    unit = 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def format_seconds(seconds: float | None) -> str:
    """Seconds with the unit in which they are a short number; a dash where nobody knows.

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


def format_table(head: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell; those of the indices ``right`` end at one place.

    Example:
        >>> print(format_table(("module", "bytes"), [("up", 12), ("down", 4)], right=[1]))
        module  bytes
        up         12
        down        4
    """
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        line = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(line).rstrip())
    return "\n".join(lines)
