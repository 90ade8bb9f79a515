"""Bounds on the difference between two runs that rounding explains."""

from __future__ import annotations

import math

__all__ = ["GROWTH", "Rounding", "roundoff"]

#: dtype -> its unit roundoff: the largest relative error of rounding to that dtype.
_ROUNDOFF = {
    "float64": 2.0**-53,
    "complex128": 2.0**-53,
    "float32": 2.0**-24,
    "complex64": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
#: Maximum factor by which one module may amplify the differences of its inputs.
GROWTH = 8.0
#: Rounding error of an operation, in units of roundoff. Functions such as exp have an error of several units.
_OPERATIONS = 4.0


def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype; 0 if it is not floating point."""
    return _ROUNDOFF.get(dtype, 2.0**-3 if dtype.startswith("float8") else 0.0)


class Rounding:
    """The bound for the next tensor, computed from the previous tensors.

    A module adds rounding errors of four units of the coarsest dtype so far. Sums add the square root of their greatest
    length, in units of float32 or of a finer common dtype. The module amplifies the differences of its inputs by up to
    `GROWTH`.

    Source: Higham and Mary, "A new approach to probabilistic rounding error analysis" (2019): errors of sums grow as
    the square root of their length.
    """

    def __init__(self) -> None:
        self._unit, self._longest, self._largest = 0.0, 1, 0.0

    def see(self, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Update the bound with dtypes and shape of a tensor."""
        self._unit = max(self._unit, *map(roundoff, dtypes))
        self._longest = max(self._longest, *shape, 1)

    @property
    def own(self) -> float:
        """Return the rounding error that one module adds."""
        summed = min(self._unit, 2.0**-24)
        return _OPERATIONS * (self._unit + summed * math.sqrt(self._longest))

    @property
    def bound(self) -> float:
        """Return the largest relative difference that rounding explains here."""
        return min(self.own + GROWTH * self._largest, 1.0)

    def agree(self, difference: float) -> None:
        """Update the bound with the difference of a tensor that agrees."""
        self._largest = max(self._largest, difference)
