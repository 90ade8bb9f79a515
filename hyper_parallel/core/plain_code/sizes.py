"""Numbers that a program reads from the shape of a shard. On a single device, these numbers would be larger. A local
size is right in a reshape or a slice of local tensors. It is wrong in arithmetic with tensor values. So each number
also stores the number that a single device would have, and arithmetic in the program updates both.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hyper_parallel.core.plain_code.findings import Problem
from hyper_parallel.core.plain_code.marks import Ways
from hyper_parallel.platform.contract import Platform

__all__ = ["Roots", "number_problems", "sizes_of_part"]

_REMEDY = "Take the size of the whole tensor, from the configuration of the model"


#: Square root, or inverse square root, of a local size that was converted to a float -> the size.
Roots: TypeAlias = "dict[float, PartSize]"


def _plain(x: Any) -> Any:
    return int(x) if type(x) is PartSize else float.__float__(x) if type(x) is PartNumber else x


def _of_part(here: Any, whole: Any, read: tuple[int, int], roots: Roots) -> Any:
    """Return ``here``, a number computed from the size of a shard, with ``whole``, the number on a single device,
    attached."""
    if here == whole or type(here) not in (int, float):
        return here
    found: Any = (PartSize if type(here) is int else PartNumber)(here)
    found.whole, found.read, found.roots = whole, read, roots
    return found


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(x, (int, float)) for x in others):
            return NotImplemented
        here = function(_plain(self), *map(_plain, others))
        try:
            whole = function(*(getattr(x, "whole", x) for x in (self, *others)))
        except (ArithmeticError, ValueError):
            return here
        found = _of_part(here, whole, self.read, self.roots)
        if found is not here:
            # The program may have multiplied by the number of ranks, which gives the global size.
            times = function in (operator.mul, _swapped_mul) and here == self.read[1]
            found.sure = not times and all(getattr(x, "sure", True) for x in (self, *others))
        return found

    return method


def _swapped_mul(a: Any, b: Any) -> Any:
    return b * a


def _both(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the method of a binary operator, and the reflected method, such as ``__add__`` and ``__radd__``."""
    swapped = _swapped_mul if function is operator.mul else lambda a, b: function(b, a)
    return _method(function), _method(swapped)


class _OfPart:
    """A number that was computed from the size of a sharded dimension.

    Attributes:
        whole: the number that a single device computes.
        read: local and global size of the dimension.
        roots: see `Roots`.
        sure: whether the number differs from that of a single device.
    """

    whole: float
    read: tuple[int, int]
    roots: Roots
    sure: bool = True

    __add__, __radd__ = _both(operator.add)
    __sub__, __rsub__ = _both(operator.sub)
    __mul__, __rmul__ = _both(operator.mul)
    __truediv__, __rtruediv__ = _both(operator.truediv)
    __floordiv__, __rfloordiv__ = _both(operator.floordiv)
    __mod__, __rmod__ = _both(operator.mod)
    __pow__, __rpow__ = _both(operator.pow)
    __neg__ = _method(operator.neg)
    __abs__ = _method(operator.abs)


class PartSize(_OfPart, int):
    """An integer computed from the size of a shard. ``whole`` is the integer that a single device would have."""

    def __float__(self) -> float:
        found = int.__float__(self)
        if found > 0:  # the usual reason is a square root, by a function that gives a plain float
            self.roots[math.sqrt(found)] = self.roots[1 / math.sqrt(found)] = self
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class PartNumber(_OfPart, float):
    """A float computed from the size of a shard. ``whole`` is the float that a single device would have."""

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float.__float__(self),)


def sizes_of_part(ways: Ways, given: Sequence[int], roots: Roots) -> tuple[int, ...]:
    """Return the local shape of a tensor, with sizes that remember the global sizes of sharded dimensions.

    Args:
        ways: possible placements of the tensor.
        given: the local shape.
        roots: see `Roots`.
    """
    marks = ways if isinstance(ways, tuple) else ()
    if not marks or any(mark is None for mark in marks):
        return tuple(given)
    found = []
    for dim, here in enumerate(given):
        wholes = {mark.layout.shape[dim] for mark in marks if mark is not None}
        whole = wholes.pop()
        found.append(here if wholes else _of_part(here, whole, (here, whole), roots))
    return tuple(found)


def number_problems(
    title: str, operands: Sequence[Any], roots: Roots, platform: Platform, result: Any
) -> tuple[Problem, ...]:
    """Return the problem of an operation that uses a number from a local size as a value.

    The result is a tuple of one problem or none.

    Args:
        title: native name of the operation.
        operands: its operands, with Python numbers.
        roots: see `Roots`. A number that equals one of the roots may come from another computation.
        platform: platform of the tensors.
        result: a result of the operation. Integers may be local indices.
    """
    for x in operands:
        found = x if type(x) in (PartSize, PartNumber) else roots.get(x) if type(x) is float else None
        if found is None:
            continue
        here, whole = found.read
        one = f", and with {found.whole:.6g} on one device" if found is x else ""
        text = f"{title} computes with {_plain(x):.6g}{one}: a number from the size of a part, {here} of {whole}"
        certain = found is x and found.sure and platform.is_floating_point(result)
        return (Problem("size", text, _REMEDY, certain=certain),)
    return ()
