"""Zeros that a program concatenates with a partial tensor, or into which it writes a partial tensor. Zeros are correct
summands on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.plain_code.judge import Operand
from hyper_parallel.core.plain_code.marks import WHOLE, ways_of
from hyper_parallel.platform.contract import Platform

__all__ = ["joined_operands", "zeros_beside"]

#: Operations that put tensors side by side, or write one into another.
JOINING = frozenset({"cat", "index_add", "scatter_add", "setitem", "setitem_", "stack"})


def zeros_beside(name: str, values: Sequence[Any], platform: Platform) -> tuple[int, ...]:
    """Return the indices of operands of a `JOINING` operation that are zeros without a mark. Call this function before
    the operation runs.

    Zeros, such as padding, are correct summands on every rank.
    """
    if name not in JOINING or all(ways_of(value) is WHOLE for value in values):
        return ()
    return tuple(
        i
        for i, value in enumerate(values)
        if platform.is_tensor(value) and platform.is_floating_point(value) and ways_of(value) is WHOLE
        if platform.has_values(value) and not platform.requires_grad(value)
        if not np.asarray(platform.host_memory(value)).any()
    )


def joined_operands(described: Sequence[Operand | None], values: Sequence[Any], zeros: Sequence[int]) -> tuple:
    """Return the descriptions and values of the operands that an operation of `JOINING` joins.

    torch concatenates an empty 1-D tensor with any tensor, and caches start as empty tensors. ``zeros`` are the indices
    that `zeros_beside` returned. These operands get the mark of the partial tensor among the operands.
    """
    marks = (m for x in described if x is not None and isinstance(x.ways, tuple) for m in x.ways)
    summand = next((m for m in marks if m is not None and not m.sharded), None)
    kept = []
    for i, (x, value) in enumerate(zip(described, values, strict=True)):
        if x is not None and i in zeros and summand is not None:
            layout = get_layout(summand.layout.mesh, summand.layout.placements, x.shape)
            x = x._replace(ways=(summand._replace(layout=layout),))
        if x is None or x.shape != (0,):
            kept.append((x, value))
    return tuple(x for x, _ in kept), tuple(value for _, value in kept)
