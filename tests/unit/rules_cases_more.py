"""Calls of operations on batches, diagonals, windows and index tensors, for `rules_cases`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hyper_parallel.platform.indexing import decode_index, encode_index
from tests.unit.rules_cases_selection import SELECTION
from tests.unit.rules_harness import Case

__all__ = ["MORE"]

_RNG = np.random.default_rng(7)


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape)


def _ints(high: int, *shape: int) -> np.ndarray:
    return _RNG.integers(0, high, shape)


# ---------------------------------------------------------------- NumPy versions
def _solve(operands: tuple, static_args: tuple) -> Any:
    a, b = operands
    assert a.size, "no matrix"
    return np.linalg.solve(a, b)


def _squared_singular_values(operands: tuple, static_args: tuple) -> Any:
    """Singular values of the product of a matrix and its transpose: two results without arbitrary signs."""
    (x,) = operands
    assert x.size, "no matrix"
    square = x.swapaxes(-1, -2) @ x
    return [np.linalg.det(square), np.linalg.inv(square + np.eye(square.shape[-1]))]


def _distances(operands: tuple, static_args: tuple) -> Any:
    x, y = operands
    assert x.size and y.size, "no rows"
    return np.linalg.norm(x[..., :, None, :] - y[..., None, :, :], axis=-1)


def _diag_embed(operands: tuple, static_args: tuple) -> Any:
    x, (offset, rows, columns) = operands[0], static_args
    size = x.shape[-1] + abs(offset)
    y = np.zeros((*x.shape[:-1], size, size))
    steps = np.arange(x.shape[-1])
    y[..., steps + max(-offset, 0), steps + max(offset, 0)] = x
    return np.moveaxis(y, (-2, -1), (rows, columns))


def _windows(operands: tuple, static_args: tuple) -> Any:
    x, (dim, size, step) = operands[0], static_args
    if not x.ndim:
        return np.repeat(x[None], size)
    found = np.lib.stride_tricks.sliding_window_view(x, size, axis=dim)
    return found[(slice(None),) * (dim % x.ndim) + (slice(None, None, step),)]


def _places(index: np.ndarray, dim: int) -> list[np.ndarray]:
    grid = list(np.indices(index.shape))
    grid[dim] = index
    return grid


def _scatter(operands: tuple, static_args: tuple) -> Any:
    x, index, source = (*operands, None)[:3]
    dim, how = static_args[:2]
    y, dim = x.copy(), dim % x.ndim
    assert all(n <= m for d, (n, m) in enumerate(zip(index.shape, x.shape, strict=True)) if d != dim)
    values: Any = 3.0
    if source is not None:
        assert all(n <= m for n, m in zip(index.shape, source.shape, strict=True))
        values = source[tuple(map(slice, index.shape))]
    places = tuple(_places(index, dim))
    if how == "replace":
        y[places] = values
    else:
        (np.add if how == "add" else np.maximum).at(y, places, values)
    return y


def _index_write(operands: tuple, static_args: tuple) -> Any:
    x, index, source = (*operands, None)[:3]
    dim, how = static_args[:2]
    y = np.atleast_1d(x.copy())
    values = 3.0 if source is None else source
    if source is not None and source.ndim:
        assert y.ndim == source.ndim and source.shape[dim] == index.size, "index and source"
    place = (slice(None),) * (dim % y.ndim) + (np.atleast_1d(index),)
    if how == "replace":
        y[place] = values
    else:
        (np.add if how == "add" else np.maximum).at(y, place, values)
    return y.reshape(x.shape)


def _setitem(operands: tuple, static_args: tuple) -> Any:
    x = operands[0].copy()
    x[decode_index(static_args[0], operands[2:])] = operands[1]
    return x


def _index_add(operands: tuple, static_args: tuple) -> Any:
    x = operands[0].copy()
    assert all(item[2] in (None, n) for item, n in zip(static_args[0], x.shape, strict=False) if item[0] == "slice")
    np.add.at(x, decode_index(static_args[0], operands[2:]), operands[1])
    return x


def _put(operands: tuple, static_args: tuple) -> Any:
    x, index, source = operands
    assert index.size == source.size
    y = x.copy().reshape(-1)
    if static_args[0] == "add":
        np.add.at(y, index.reshape(-1), source.reshape(-1))
    else:
        y[index.reshape(-1)] = source.reshape(-1)
    return y.reshape(x.shape)


def _searchsorted(operands: tuple, static_args: tuple) -> Any:
    sequences, values = operands[:2]
    if len(operands) > 2:
        sequences = np.take_along_axis(sequences, operands[2], -1)
    if sequences.ndim == 1:
        return np.searchsorted(sequences, values)
    assert sequences.shape[:-1] == values.shape[:-1]
    return (sequences[..., None, :] < values[..., :, None]).sum(-1)


def _count(operands: tuple, static_args: tuple) -> Any:
    x, weights = (*operands, None)[:2]
    return np.bincount(x.reshape(-1), None if weights is None else weights.reshape(-1), static_args[0])


def _quantile(operands: tuple, static_args: tuple) -> Any:
    x, wanted = (*operands, None)[:2]
    dim, keepdim = static_args
    assert x.size, "quantiles of nothing"
    return np.quantile(x, 0.3 if wanted is None else wanted, axis=dim, keepdims=keepdim)


def _index(*items: Any) -> tuple[tuple, tuple]:
    tensors, encoded = encode_index(items, lambda item: isinstance(item, np.ndarray), lambda item: item.dtype == bool)
    return tensors, encoded


def _at(op: str, labels: str, x: np.ndarray, value: np.ndarray, *items: Any) -> Case:
    tensors, encoded = _index(*items)
    return Case(op, labels, (x, value, *tensors), (encoded,), _setitem if op == "setitem" else _index_add)


_ALL = slice(None)
_ORDER = np.array([2, 0, 3, 1])

BATCHED = [
    Case("batched", "ab..,.b..->ab..", (_floats(5, 3, 2, 2), _floats(1, 3, 2, 4)), ((2, 2), ((2, 4),)), _solve),
    Case("batched", "a..->a,a..", (_floats(5, 3, 2),), ((2,), ((), (2, 2))), _squared_singular_values),
    Case("batched", "..->,..", (_floats(3, 2),), ((2,), ((), (2, 2))), _squared_singular_values),
    Case("pairs", "bi.,bj.->bij", (_floats(2, 5, 3), _floats(2, 4, 3)), (), _distances),
    Case("pairs", "i.,bj.->bij", (_floats(5, 3), _floats(3, 4, 3)), (), _distances),
]

ALONG_LINEAR = [
    Case("along_linear", "a.->a.", (_floats(5, 4),), ((-1,), None), lambda o, s: np.cumsum(o[0], axis=-1)),
    Case("along_linear", ".b->.b", (_floats(5, 4),), ((0,), (4, 4)), lambda o, s: np.diff(o[0], axis=0)),
    Case("along_linear", "..->..", (_floats(5, 4),), (None, None), lambda o, s: np.roll(o[0], 3)),
    Case("quantile", "a.->a", (_floats(5, 4),), (-1, False), _quantile),
    Case("quantile", "a.,q->qa.", (_floats(5, 4), np.array([0.1, 0.3, 0.9])), (1, True), _quantile),
    Case("quantile", ".b,->b", (_floats(5, 4), np.array(0.2)), (0, False), _quantile),
    Case("quantile", "..,_->", (_floats(5, 4), None), (None, False), _quantile),
]

DIAGONAL = [
    Case("diagonal", ".b.->b.", (_floats(5, 3, 4),), (1, 0, -1), lambda o, s: np.diagonal(o[0], *s)),
    Case("diagonal", "..c->c.", (_floats(4, 2, 5),), (-1, 0, 1), lambda o, s: np.diagonal(o[0], *s)),
    Case("diagonal", "..c->c.", (_floats(4, 2, 5),), (7, 0, 1), lambda o, s: np.diagonal(o[0], *s)),
    Case("diag_embed", "a.->a..", (_floats(5, 3),), (1, -2, -1), _diag_embed),
    Case("diag_embed", "a.->.a.", (_floats(5, 3),), (-2, 0, 2), _diag_embed),
]

WINDOWS = [
    Case("windows", "a.c->a.c.", (_floats(5, 7, 3),), (1, 3, 2), _windows),
    Case("windows", "->.", (_floats(),), (0, 1, 1), _windows),
    Case("real_pairs", "a->a.", (_floats(5) + 1j,), (), lambda o, s: np.stack([o[0].real, o[0].imag], -1)),
    Case("complex_pairs", "ab.->ab", (_floats(5, 3, 2),), (), lambda o, s: o[0][..., 0] + 1j * o[0][..., 1]),
]

SCATTER = [
    Case("scatter", "a.,at,at->a.", (_floats(5, 4), _ints(4, 5, 3), _floats(5, 3)), (1, "add"), _scatter),
    Case("scatter", ".b,.b,.b->.b", (_floats(5, 4), _ints(5, 3, 4), _floats(6, 4)), (0, "add"), _scatter),
    Case("scatter", "..,t.,t.->..", (_floats(5, 4), _ints(5, 3, 2), _floats(3, 2)), (0, "add"), _scatter),
    Case(
        "scatter", ".b,.b,.b->.b", (_floats(4, 5), np.stack([_ORDER] * 5, 1), _floats(4, 5)), (0, "replace"), _scatter
    ),
    Case("scatter", ".b,.b,_->.b", (_floats(4, 5), _ints(4, 6, 5), None), (-2, "add"), _scatter),
    Case("scatter", ".b,.b->.b", (_floats(4, 5), _ints(4, 6, 5)), (0, "replace"), _scatter),
    Case("scatter", ".b,.b,.b->.b", (_floats(4, 5), _ints(4, 6, 5), _floats(6, 5)), (0, "largest"), _scatter),
    Case("index_write", "a.c,t,atc->a.c", (_floats(5, 4, 3), _ints(4, 6), _floats(5, 6, 3)), (1, "add"), _index_write),
    Case("index_write", "a.,.,a.->a.", (_floats(5, 4), _ORDER[:3], _floats(5, 3)), (-1, "replace"), _index_write),
    Case("index_write", ".b,.,.b->.b", (_floats(5, 4), _ints(5, 3), _floats(3, 4)), (0, "largest"), _index_write),
    Case("index_write", "a.,.,_->a.", (_floats(5, 4), _ints(4, 2), None), (1, "replace"), _index_write),
    Case("index_write", "a.,.,->a.", (_floats(5, 4), _ints(4, 2), _floats()), (1, "replace"), _index_write),
    Case("index_write", ",.,.->", (_floats(), np.array([0]), _floats(1)), (0, "replace"), _index_write),
    _at("setitem", "ab,a.,.->ab", _floats(5, 4), _floats(5, 3), _ALL, _ORDER[:3]),
    _at("setitem", "ab,b,.->ab", _floats(4, 5), _floats(5), _ORDER[:2]),
    _at("index_add", "ab,at,t->ab", _floats(5, 4), _floats(5, 6), _ALL, _ints(4, 6)),
    _at("index_add", "ab,b,.->ab", _floats(4, 5), _floats(5), _ints(4, 7)),
    _at("index_add", "abc,tuc,tu,tu->abc", _floats(5, 4, 3), _floats(2, 3, 3), _ints(5, 2, 3), _ints(4, 2, 3)),
    _at("index_add", "abc,ab,->abc", _floats(5, 2, 3), _floats(5, 2), slice(0, 5), _ALL, np.array(1)),
    Case("take", "..,tu->tu", (_floats(5, 4), _ints(20, 3, 2)), (), lambda o, s: o[0].reshape(-1)[o[1]]),
    Case("put", "..,tu,tu->..", (_floats(5, 4), _ints(20, 3, 2), _floats(3, 2)), ("add",), _put),
    Case("put", "..,..,.->..", (_floats(5, 4), _ints(20, 3, 2), _floats(6)), ("add",), _put),
    Case("put", "..,.,.->..", (_floats(5, 4), _ORDER, _floats(4)), ("replace",), _put),
]

SEARCH = [
    Case("by_table", "ab,.->ab", (_floats(5, 4), np.sort(_floats(6))), (), lambda o, s: np.searchsorted(o[1], o[0])),
    Case("by_table", "a,.->a", (_ints(9, 5), np.array([3, 5, 3, 8])), (), lambda o, s: np.isin(*o)),
    Case("by_table", "a,_->a", (_floats(5), 0.5), (), lambda o, s: o[0] == o[1]),
    Case("searchsorted", ".,ab->ab", (np.sort(_floats(6)), _floats(5, 4)), (), _searchsorted),
    Case("searchsorted", "a.,ab->ab", (np.sort(_floats(5, 6)), _floats(5, 4)), (), _searchsorted),
    Case(
        "searchsorted",
        "a.,ab,a.->ab",
        (_floats(5, 4), _floats(5, 3), np.argsort(_floats(5, 4), -1)),
        (),
        _searchsorted,
    ),
    Case("count", "ab->.", (_ints(6, 5, 4),), (6,), _count),
    Case("count", "a,a->.", (_ints(6, 5), _floats(5)), (6,), _count),
]

MORE = [*BATCHED, *ALONG_LINEAR, *DIAGONAL, *WINDOWS, *SCATTER, *SEARCH, *SELECTION]
