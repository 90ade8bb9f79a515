"""Calls of operations whose results have sizes that the data say, for `rules_cases`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit.rules_harness import Case

__all__ = ["SELECTION"]

_RNG = np.random.default_rng(11)


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape)


def _mask(*shape: int) -> np.ndarray:
    return _RNG.random(shape) > 0.4


def _set_at_mask(operands: tuple, static_args: tuple) -> Any:
    x = operands[0].copy()
    x[operands[2]] = static_args[1] if operands[1] is None else operands[1]
    return x


def _masked_select(operands: tuple, static_args: tuple) -> Any:
    x, mask = np.broadcast_arrays(*operands)
    return x[mask]


def _masked_scatter(operands: tuple, static_args: tuple) -> Any:
    x, mask = (np.array(part) for part in np.broadcast_arrays(*operands[:2]))
    x[mask] = operands[2].reshape(-1)[: mask.sum()]
    return x


def _nonzero(operands: tuple, static_args: tuple) -> Any:
    return np.argwhere(operands[0])


def _asked(static_args: tuple, values: Any, places: Any, counts: Any) -> Any:
    found = [values, *([places] if static_args[1] else []), *([counts] if static_args[2] else [])]
    return found if len(found) > 1 else values


def _unique(operands: tuple, static_args: tuple) -> Any:
    x, dim = operands[0], static_args[0]
    values, places, counts = np.unique(x, return_inverse=True, return_counts=True, axis=dim)
    return _asked(static_args, values, places.reshape(x.shape if dim is None else -1), counts)


def _in_order(operands: tuple, static_args: tuple) -> Any:
    """The elements that differ from the one before."""
    x, dim = operands[0], static_args[0]
    rows = x.reshape(-1) if dim is None else np.moveaxis(x, dim, 0)
    differs = np.array([i == 0 or (row != rows[i - 1]).any() for i, row in enumerate(rows)], bool)
    places = np.cumsum(differs) - 1
    values = rows[differs] if dim is None else np.moveaxis(rows[differs], 0, dim)
    return _asked(static_args, values, places.reshape(x.shape) if dim is None else places, np.bincount(places))


_X = np.array([[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 0.0, 0.0], [0.0] * 4, [1.0, 1.0, 0.0, 5.0], [0.0, 7.0, 7.0, 0.0]])
_ROWS = np.array([[1.0, 2.0], [1.0, 2.0], [0.0, 3.0], [1.0, 2.0], [0.0, 3.0]])

#: The index ``x[mask]``, encoded.
_AT_MASK = (("tensor", 0, 1, True),)

SELECTION = [
    Case("masked_select", "ab,ab->.", (_floats(5, 4), _mask(5, 4)), (), _masked_select),
    Case("masked_select", "a.c,bc->.", (_floats(3, 1, 5), _mask(4, 5)), (), _masked_select),
    Case("masked_select", "ab,ab->.", (_floats(2, 5), np.zeros((2, 5), bool)), (), _masked_select),
    Case("getitem", "abc,ab->.c", (_floats(5, 4, 3), _mask(5, 4)), (_AT_MASK,), lambda o, s: o[0][o[1]]),
    Case("setitem_", "abc,_,ab->abc", (_floats(5, 4, 3), None, _mask(5, 4)), (_AT_MASK, 2.0), _set_at_mask),
    Case("setitem_", "ab,,ab->ab", (_floats(5, 4), _floats(), _mask(5, 4)), (_AT_MASK, None), _set_at_mask),
    Case("getitem", "a,a->.", (_floats(5), _mask(5)), (_AT_MASK,), lambda o, s: o[0][o[1]]),
    Case("masked_scatter", "ab,ab,..->ab", (_floats(5, 4), _mask(5, 4), _floats(5, 4)), (), _masked_scatter),
    Case("masked_scatter", "ab,b,.->ab", (_floats(3, 5), _mask(5), _floats(15)), (), _masked_scatter),
    Case("nonzero", "ab->..", (_X,), (), _nonzero),
    Case("nonzero", "abc->..", (np.stack([_X, _X[::-1], 0 * _X]),), (), _nonzero),
    Case("nonzero", "a->..", (_X[0],), (), _nonzero),
    Case("unique", "ab->.", (_X,), (None, False, False), _unique),
    Case("unique", "ab->.,ab,.", (_X,), (None, True, True), _unique),
    Case("unique", "a.->..,.", (_ROWS,), (0, False, True), _unique),
    Case("unique", ".b->..,b,.", (_ROWS.T,), (-1, True, True), _unique),
    Case("unique_in_order", "a->.,.", (np.repeat(_X[0], 2),), (None, False, True), _in_order),
    Case("unique_in_order", "a.->.,a.,.", (_X[:, :2],), (None, True, True), _in_order),
    Case("unique_in_order", ".b->..,b,.", (_ROWS.T,), (1, True, True), _in_order),
]
