"""Partial sums that an operation keeps, and the calls in which it must not keep them.

A rule names the operands in which an operation is linear, from shapes alone. A call may not be linear all the same:

* Summands may be far larger than their sum. A conversion to integers rounds them. A conversion to a dtype of a smaller
  range overflows. A conversion of integers loses digits.
* An infinite factor, or a divisor of zero, turns a zero summand into NaN. Summands of both signs become NaN too.

Such a call runs on the completed sums. Ranks agree about that without communication: all of them know dtypes and
numbers. Other conversions between floating point dtypes keep partial sums partial. Mixed precision converts between
float32 and bfloat16, so it needs no additional collective.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Partial
from hyper_parallel.core.operations.strategy import Strategy
from hyper_parallel.core.rules import CanonicalOp

#: Name of a floating point dtype -> the number of decimal places of its largest value.
_RANGES = {"float16": 5, "bfloat16": 39, "float32": 39, "float64": 309, "complex64": 39, "complex128": 309}
_RANGES_OF = Table(
    lambda platform: {platform.dtypes[name]: size for name, size in _RANGES.items() if name in platform.dtypes},
    1 << 4,
    "ranges of dtypes",
)


def kept_sums(canonical: CanonicalOp, layouts: tuple[Layout | None, ...], strategy: Strategy) -> tuple[int, ...]:
    """Return the operands, of ``layouts``, whose partial sums the operation keeps.

    A view keeps its values, and so has none.
    """
    if canonical.may_give_view:
        return ()
    return tuple(
        i
        for i, (have, read) in enumerate(zip(layouts, strategy.operands, strict=True))
        if have is not None
        and read is not None
        and any(p is q and isinstance(p, Partial) for p, q in zip(have.placements, read.placements, strict=True))
    )


def converts_linearly(platform: Any, before: Any, after: Any) -> bool:
    """Return whether a conversion of summands from the dtype ``before`` to ``after`` is one of their sum."""
    if before == after:
        return True
    ranges = _RANGES_OF[platform]
    return ranges.get(before, 1000) <= ranges.get(after, 0)
