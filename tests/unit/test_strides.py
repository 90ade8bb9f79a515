"""Strides worked out from shapes, against NumPy's."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.core.layouts import memory_order
from hyper_parallel.core.layouts.strides import (
    contiguous_strides,
    dense_strides,
    indexed_strides,
    is_contiguous,
    reshaped_strides,
    spaced_strides,
)
from hyper_parallel.core.rules import OPERATIONS

X = np.arange(120.0).reshape(4, 5, 6)
TENSORS = {
    "contiguous": X,
    "permuted": X.transpose(2, 0, 1),
    "sliced": X[:, 1:4],
    "stepped": X[::2, :, ::3],
    "one row": X[1:2],
    "one column": X[:, :, 2:3],
    "flat": X.reshape(-1),
    "stretched": np.broadcast_to(X[:1], X.shape),
    "number": X[0, 0, 0:1].reshape(()),
}


def strides_of(x: np.ndarray) -> tuple[int, ...]:
    return tuple(n // x.itemsize for n in x.strides)


def agree(x: np.ndarray, found: tuple[int, ...]) -> bool:
    """Equal but for dimensions of size 1, of which strides mean nothing."""
    return all(size == 1 or a == b for size, a, b in zip(x.shape, strides_of(x), found, strict=True))


@pytest.mark.parametrize("name", TENSORS)
def test_contiguous(name: str) -> None:
    x = TENSORS[name]
    assert is_contiguous(x.shape, strides_of(x)) == x.flags.c_contiguous
    assert agree(np.ascontiguousarray(x).reshape(x.shape), contiguous_strides(x.shape))


@pytest.mark.parametrize("name", TENSORS)
def test_reshape(name: str) -> None:
    """Every way to cut the elements into up to three dimensions: a view where NumPy gives one, else a copy."""
    x = TENSORS[name]
    views = copies = 0
    for shape in itertools.product(range(1, 121), repeat=3):
        if shape[0] * shape[1] * shape[2] != x.size:
            continue
        y = x.reshape(shape)
        found = reshaped_strides((), x.shape, strides_of(x), shape)
        if np.shares_memory(x, y):
            views += 1
            assert found is not None, shape
            assert agree(y, found), shape
        else:
            copies += 1
            assert found is None, shape
    assert views
    assert copies or name in ("contiguous", "one row", "flat", "number", "one column")


def view_strides(name: str, static_args: tuple, x: np.ndarray, y: np.ndarray) -> tuple[int, ...] | None:
    """Strides of the first view that a canonical operation gives of ``x``, which has the shape of ``y``."""
    op = OPERATIONS[name]
    if op.view_strides is not None:
        return op.view_strides(static_args, x.shape, strides_of(x), y.shape)
    assert op.view_index is not None
    index = op.view_index(static_args, x.shape, [y.shape])
    assert index is not None
    return indexed_strides(x.shape, strides_of(x), index[0])


CALLS = {
    "permute": ("permute", ((2, -3, 1),), lambda x: x.transpose(2, 0, 1)),
    "narrow": ("narrow", (1, 1, 2), lambda x: x[:, 1:3]),
    "unsqueeze": ("unsqueeze", (-1,), lambda x: x[..., None]),
    "unbind": ("unbind", (1,), lambda x: x[:, 0]),
    "int": ("getitem", ((("slice", None, None, None), 1),), lambda x: x[:, 1]),
    "dots": ("getitem", ((..., ("slice", 0, None, 2)),), lambda x: x[..., 0::2]),
    "none": ("getitem", ((None, ("slice", 0, 1, None), ..., 0),), lambda x: x[None, 0:1, ..., 0]),
}


@pytest.mark.parametrize("name", ["contiguous", "permuted", "sliced", "stepped", "stretched"])
@pytest.mark.parametrize("call", CALLS)
def test_views(name: str, call: str) -> None:
    x = TENSORS[name]
    operation, static_args, function = CALLS[call]
    y = function(x)
    found = view_strides(operation, static_args, x, y)
    assert found is not None
    assert agree(y, found)


def test_squeeze_and_expand() -> None:
    x = X[:, 1:2, :][:, :, 3:4]
    for dims in (1,), (2,), (1, 2), None:
        y = x.squeeze(dims)
        found = view_strides("squeeze", (dims,), x, y)
        assert found is not None and agree(y, found)
    y = np.broadcast_to(x, (3, 4, 5, 6))
    found = view_strides("expand", ((3, -1, 5, 6),), x, y)
    assert found == strides_of(y)


def test_no_elements() -> None:
    assert reshaped_strides((), (0, 3), (1, 7), (3, 0)) == (1, 1)
    assert is_contiguous((0, 3), (1, 7))


@pytest.mark.parametrize("name", ["contiguous", "permuted", "sliced", "stepped"])
def test_order_is_kept(name: str) -> None:
    """An element-wise operation gives a new array in the order of its operand."""
    x = TENSORS[name]
    assert dense_strides(x.shape, strides_of(x)) == strides_of(x * 2)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_strides_of_a_shard(order: tuple[int, ...]) -> None:
    """Strides of the whole tensor from those of a part: of one dimension, and of two at once."""
    whole = np.zeros((4, 6, 8)).transpose(order)
    for cut in itertools.product((1, 2), repeat=3):
        shape = tuple(n // c for n, c in zip((4, 6, 8), cut, strict=True))
        local = np.zeros(shape).transpose(order)
        layout = SimpleNamespace(
            tells_strides=True,
            shape=whole.shape,
            local_shape=local.shape,
            ndim=3,
            mesh=SimpleNamespace(platform=SimpleNamespace(strides=strides_of)),
        )
        assert memory_order.strides_of(local, layout) == strides_of(whole), cut


# ---------------------------------------------------------------------------- the order of new tensors, and of shards
def test_dense_strides_are_those_of_numpy() -> None:
    """Strides of tensors without stretched dimensions, where NumPy's and torch's rules agree."""
    for order in itertools.permutations(range(3)):
        for index in ((slice(None),) * 3, (slice(0, 2), slice(None), slice(0, 4, 2)), (slice(0, 1), ...)):
            x = X.transpose(order)[index]
            assert agree(x * 2, dense_strides(x.shape, strides_of(x))), (order, index)


def test_dense_strides_leave_stretched_dimensions_where_they_are() -> None:
    """Stretched dimensions keep their place, as in torch: ``ones(1, 4).expand(3, 4) * 2`` is contiguous, and so are the
    dimensions next to a permuted one."""
    assert dense_strides((3, 4), (0, 1)) == (4, 1)
    assert dense_strides((4, 3), (1, 0)) == (3, 1)
    assert dense_strides((2, 2, 3), (1, 0, 2)) == (1, 2, 4)
    assert dense_strides((3, 4), (1, 3), (3, 2)) == (1, 3)


PARTS = ((4, 5, 6), (2, 5, 6), (4, 2, 6), (4, 5, 3), (2, 3, 2))


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_spaced_strides_tell_those_of_the_whole(part: tuple[int, ...]) -> None:
    """A shard with these strides is contiguous where the whole is, and its dimensions merge where the whole's do."""
    seen = set()
    for order in itertools.permutations(range(3)):
        for cut in itertools.product((1, 2), repeat=3):
            # Each dimension in a larger one, at steps of `cut` elements.
            strides, step = [0] * 3, 1
            for dim in reversed(order):
                strides[dim] = step * cut[dim]
                step *= cut[dim] * X.shape[dim]
            found = spaced_strides(X.shape, tuple(strides), part)
            assert is_contiguous(part, found) == is_contiguous(X.shape, tuple(strides))
            for inner, outer in itertools.permutations(range(3), 2):
                merge = strides[outer] == strides[inner] * X.shape[inner]
                assert merge == (found[outer] == found[inner] * part[inner]), (strides, found)
                seen.add(merge)
            last = 1 + sum((n - 1) * s for n, s in zip(part, found, strict=True))
            places = {sum(i * s for i, s in zip(at, found, strict=True)) for at in np.ndindex(*part)}
            assert len(places) == np.prod(part) and max(places) < last
            layout = SimpleNamespace(ndim=3, shape=X.shape, local_shape=part)
            whole = memory_order.whole_strides(layout, found)
            assert whole == spaced_strides(X.shape, tuple(strides), X.shape)
    assert seen == {True, False}
