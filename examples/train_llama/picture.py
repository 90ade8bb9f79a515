"""A picture of both losses for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 60, 12


def picture_of(sharded: Sequence[float], unsharded: Sequence[float], first_step: int = 0) -> str:
    """Draw two curves of losses.

    Args:
        sharded: losses of the sharded model, drawn as ``o``.
        unsharded: as many of the unsharded model, drawn as ``.``; a place that both reach is a ``*``.
        first_step: steps before the first loss.

    Example:
        >>> print(picture_of([2.0, 1.0], [2.0, 1.0]).splitlines()[0])
            2.00 | *
    """
    low, high = min(*sharded, *unsharded), max(*sharded, *unsharded)
    width = min(WIDTH, len(sharded))
    rows = [[" "] * width for _ in range(HEIGHT)]
    for column in range(width):
        at = column * (len(sharded) - 1) // max(width - 1, 1)
        for loss, mark in ((unsharded[at], "."), (sharded[at], "o")):
            row = round((high - loss) / ((high - low) or 1) * (HEIGHT - 1))
            rows[row][column] = mark if rows[row][column] == " " else "*"
    step = (high - low) / (HEIGHT - 1)
    lines = [f"{high - i * step:8.2f} | {''.join(row)}".rstrip() for i, row in enumerate(rows)]
    ends = f"{first_step + 1:<{max(width - 5, 1)}}{first_step + len(sharded):>5}"
    return "\n".join([*lines, f"    step   {ends}", "    loss   o sharded   . unsharded   * both"])
