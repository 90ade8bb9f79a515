"""Element-wise operations: dimensions broadcast, and every dimension can be sharded."""

from __future__ import annotations

import functools
from cmath import isfinite
from dataclasses import replace
from typing import Any

from hyper_parallel.core.layouts.strides import contiguous_only
from hyper_parallel.core.rules.labels import all_elements, broadcast
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import Rule, rule


def _elementwise(shapes: tuple, terms: tuple[tuple[int, ...], ...] = (), **more: Any) -> OpSharding | None:
    common = broadcast(shapes)
    if common is None:
        return None
    shape, labels, operands = common
    return OpSharding(operands=operands, results=(labels,), result_shapes=(shape,), terms=terms, **more)


def _in_place(function: Rule) -> Rule:
    """Return the rule of the in-place operation. Operand 0, which is overwritten, must have the shape of the result."""

    @functools.wraps(function)
    def in_place(shapes: tuple, static_args: Any) -> OpSharding | None:
        sharding = function(shapes, static_args)
        if sharding is None or shapes[0] is None or sharding.result_shapes[0] != tuple(shapes[0]):
            return None
        return sharding

    return in_place


def _sum_terms(shapes: tuple) -> tuple[tuple[int, ...], ...]:
    # Every rank would add a Python scalar once, so partial sums must be reduced if an operand is a scalar.
    return () if None in shapes else tuple((i,) for i in range(len(shapes)))


@rule("pointwise", "*xs", elementwise=True, memory="ordered")
def pointwise(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Any element-wise function: relu, pow, where, masked_fill, comparisons, conversion to integers."""
    return _elementwise(shapes)


rule("pointwise_", "*xs", elementwise=True)(_in_place(pointwise))


@rule("add", "*xs", elementwise=True, memory="ordered")
def add(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Sum of the operands, each with a constant factor."""
    return _elementwise(shapes, _sum_terms(shapes))


rule("add_", "*xs", elementwise=True)(_in_place(add))


@rule("mul", "*xs", elementwise=True, memory="ordered")
def mul(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Product of the operands."""
    factors = tuple(i for i, shape in enumerate(shapes) if shape is not None)
    return _elementwise(shapes, (factors,), linear_for=_are_finite)


def _are_finite(operands: tuple) -> bool:
    return all(isfinite(x) for x in operands if isinstance(x, (float, complex)))


@rule("mul_", "*xs", elementwise=True)
@_in_place
def mul_(shapes: tuple, static_args: Any) -> OpSharding | None:
    """`mul` in place. Operand 0 keeps its placement, so the result is partial exactly if operand 0 is partial."""
    return _elementwise(shapes, ((0,),), linear_for=_are_finite)


@rule("div", "x other | rounding_mode=None", repeatable=True, memory="ordered")
def div(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Quotient, which is linear in the dividend unless it is rounded."""
    rounding = static_args[0] if static_args else None
    terms = ((0,),) if rounding is None and shapes[0] is not None else ()
    return _elementwise(shapes, terms, linear_for=_is_no_tensor_and_no_zero)


@rule("div_", "x other | rounding_mode=None", repeatable=True)
@_in_place
def div_(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Quotient in place, which is linear in the dividend unless it is rounded.

    It keeps partial sums for a tensor as divisor too, because the result has the placement of operand 0.
    """
    sharding = div(shapes, static_args)
    return None if sharding is None else replace(sharding, linear_for=_is_not_zero)


def _is_no_tensor_and_no_zero(operands: tuple) -> bool:
    """Return whether the divisor is a number other than zero. A tensor may have zeros."""
    return isinstance(operands[1], (int, float, complex)) and operands[1] != 0


def _is_not_zero(operands: tuple) -> bool:
    return not isinstance(operands[1], (int, float, complex)) or operands[1] != 0


@rule("contiguous", elementwise=True, memory="contiguous", view_strides=contiguous_only)
@rule("alias", elementwise=True, memory="shared", view_index=all_elements)
@rule("linear_unary", elementwise=True, memory="ordered")
def linear_unary(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Linear functions of one operand: neg, clone, conversion to a floating dtype (`linear_unary`), detach
    (`alias`)."""
    return _elementwise(shapes, ((0,),))


@rule("linear_", "*xs", elementwise=True)
@_in_place
def linear_(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Linear function of the operands, written to operand 0. For example, ``copy_`` is 0 * self + source."""
    return _elementwise(shapes, _sum_terms(shapes))


@rule("like", elementwise=True, memory="ordered")
def like(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Tensor with the shape of x whose values do not depend on x.

    It is not a sum of products, so a partial x does not give a partial result. As x is not read, it need not be reduced
    either.
    """
    if len(shapes) != 1 or shapes[0] is None:
        return None
    sharding = _elementwise(shapes)
    return None if sharding is None else replace(sharding, unread=(0,))
