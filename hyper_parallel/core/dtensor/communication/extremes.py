"""The largest and the smallest of elements that several ranks hold: ties and NaN.

Each rank finds the extreme value of its own elements, and `Partial("max")` or ``("min")`` says that the ranks are still
to be compared. Two things about a rank's elements are to be known then besides their extreme value: how many have it,
because all that tie share the gradient evenly, whichever rank they are on; and whether there is NaN among them, where a
kernel does not say so itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Extreme(NamedTuple):
    """What a rule says of an extreme value.

    Attributes:
        dims: the dimensions that are reduced, in ascending order.
        keepdim: whether they stay, with size 1.
        nan_ties: whether NaNs tie with each other, or the gradient is NaN where there is one.
    """

    dims: tuple[int, ...]
    keepdim: bool
    nan_ties: bool


def differs(x: Any, y: Any) -> Any:
    """Where ``x`` is not ``y``; NaN is NaN."""
    return (x != y) & ((x == x) | (y == y))


def bind_extreme(extreme: Extreme, op: str, platform: Any) -> Callable[[Any, Callable[[Any], Any], Any], Any]:
    """``finish(x, native, y)`` for the extreme value ``y = native(x)`` of local elements, still to be compared with
    those of other ranks: gives ``y``, with NaN where there is one, and counts ties where a gradient asks for them."""
    dims, keepdim, nan_ties = extreme
    keeps_nan, flag = platform.extremes_keep_nan, 1.0 if op == "max" else -1.0

    def finish(x: Any, native: Callable[[Any], Any], y: Any) -> Any:
        if not platform.is_floating_point(x):
            return y
        plain = platform.detach(x)
        if not keeps_nan:
            zeros = platform.zeros(platform.shape_of(plain), plain)
            has_nan = native(platform.masked_fill(zeros, plain != plain, flag)) != 0
            y = platform.masked_fill(y, has_nan, math.nan)
        if platform.requires_grad(x):
            found = platform.detach(y)
            if not keepdim:
                for dim in dims:
                    found = platform.unsqueeze(found, dim)
            ones = platform.ones(platform.shape_of(plain), plain)
            ties = platform.masked_fill(ones, differs(plain, found) if nan_ties else plain != found, 0.0)
            for dim in dims:
                ties = platform.sum_along(ties, dim)
            y._ties = ties.reshape(platform.shape_of(y))
        return y

    return finish
