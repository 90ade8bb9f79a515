"""A comparison as text for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.debug.text import format_table

__all__ = ["report", "table"]

#: Maximum number of names shown in each list of leftover tensors.
_SHOWN = 4


def table(rows: Sequence[Any]) -> str:
    """Return rows of a comparison as a table."""
    steps = any(row.step for row in rows)
    head = (*(("step",) if steps else ()), "tensor", "shape", "difference", "rounding", "")
    cells = [
        (
            *((row.step,) if steps else ()),
            row.name,
            "x".join(map(str, row.shape)) or "1",
            f"{row.difference:.1e}",
            f"{row.bound:.1e}",
            "departs" if row.departs else "",
        )
        for row in rows
    ]
    return format_table(head, cells, right=tuple(i + steps for i in (2, 3)))


def report(comparison: Any) -> str:
    """Return a text that says where two runs first differ, with the rows around that tensor."""
    rows, first = comparison.rows, comparison.first
    lines = []
    if first is None:
        nearest = max(rows, key=lambda row: row.difference / row.bound if row.bound else 0.0)
        lines.append(
            f"The runs agree: rounding explains the differences of all {len(rows)} tensors. The largest, in relation "
            f"to its bound, is that of the {nearest.name}: {nearest.difference:.1e} of {nearest.bound:.1e}."
        )
    else:
        step = f" in step {first.step}" if any(row.step for row in rows) else ""
        lines.append(f"The runs part at {first.culprit}.")
        lines.append(
            f"First to depart{step}: the {first.name}, by {first.difference:.1e}, where rounding explains "
            f"{first.bound:.1e}."
        )
        if first.how:
            lines.append(first.how)
        gradient = comparison.first_gradient
        if gradient is not None and gradient is not first:
            lines.append(f"First gradient to depart: the {gradient.name}, by {gradient.difference:.1e}.")
        place = rows.index(first)
        lines += ["", table(rows[max(place - 4, 0) : place + 5])]
        count = sum(row.departs for row in rows)
        lines += ["", f"{count} of {len(rows)} tensors depart."]
    lines += _left_out(comparison)
    return "\n".join(lines)


def _left_out(comparison: Any) -> list[str]:
    found = []
    for text, names in (
        (f"only in {comparison.a}", comparison.only_a),
        (f"only in {comparison.b}", comparison.only_b),
        ("not compared, of other shapes", comparison.unfit),
        ("not recorded", comparison.notes),
    ):
        if names:
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            found.append(f"{text}: {'; '.join(names[:_SHOWN])}{more}")
    by_order = comparison.names.get("by_order")
    if by_order:
        found.append("aligned by order and shape: " + ", ".join(f"{a} = {b}" for a, b in by_order.items()))
    assumed = list(dict.fromkeys(row.how for row in comparison.rows if row.how))
    if assumed:
        found.append(f"assumed, of plain tensors: {'; '.join(assumed[:_SHOWN])}")
    return ["", *found] if found else []
