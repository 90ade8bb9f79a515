"""Operators and methods of arrays, which are operations: set here, so that `array` needs not know those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy_backend import operations as o
from numpy_backend.array import Array

__all__ = ["METHODS"]


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: function(y, x)


def _sum(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return o.sum(x, (dim,) if isinstance(dim, int) else dim, keepdim)


#: name -> method of `Array`.
METHODS: dict[str, Callable[..., Any]] = {
    "__add__": o.add, "__radd__": _reflected(o.add), "__sub__": o.sub, "__rsub__": _reflected(o.sub),
    "__mul__": o.mul, "__rmul__": _reflected(o.mul), "__truediv__": o.div, "__rtruediv__": _reflected(o.div),
    "__mod__": o.remainder, "__pow__": o.power, "__neg__": o.neg, "__invert__": o.invert, "__matmul__": o.matmul,
    "__gt__": o.greater, "__ge__": o.greater_equal, "__lt__": o.less, "__le__": o.less_equal, "__eq__": o.equal,
    "__ne__": o.not_equal, "__and__": o.logical_and, "__or__": o.logical_or, "__iadd__": o.add_, "__isub__": o.sub_,
    "__imul__": o.mul_, "__getitem__": o.getitem, "__setitem__": o.setitem, "reshape": o.reshape, "sum": _sum,
    "any": o.any_,
}  # fmt: skip

for _name, _method in METHODS.items():
    setattr(Array, _name, _method)
