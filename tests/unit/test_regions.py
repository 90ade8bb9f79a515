"""Encoded indices, and the regions of a tensor that they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.platform.indexing import FULL_SLICE, Place, decode_index, encode_index, has_empty_slice, region_of

X = np.arange(60).reshape(3, 4, 5)


def encoded(*index: Any) -> tuple:
    return encode_index(index, lambda item: isinstance(item, np.ndarray), lambda item: item.dtype == bool)[1]


@pytest.mark.parametrize(
    "index",
    [(1,), (slice(1, 3), ..., -1), (None, slice(None, None, 2)), (..., slice(3, 1, -1), None), (slice(2, 2),), ()],
    ids=str,
)
def test_a_region_has_the_elements_of_the_index(index: tuple) -> None:
    region = region_of(encoded(*index), X.shape)
    picked = [place.picked for place in region if place.dim is not None]
    assert [place.dim for place in region if place.dim is not None] == [0, 1, 2]
    shape = [1 if p.dim is None else len(p.picked or ()) for p in region if p.dim is None or p.is_slice]
    assert X[np.ix_(*picked)].reshape(shape).tolist() == X[index].tolist()  # type: ignore[arg-type]
    assert has_empty_slice(encoded(*index), X.shape) == (X[index].size == 0)


def test_tensors_and_masks_take_dimensions() -> None:
    mask, numbers = np.ones((3, 4), bool), np.array([0, 1])
    region = region_of(encoded(mask, slice(2, 2)), X.shape)
    assert [(p.dim, p.tensor, p.picked) for p in region] == [(0, 0, None), (2, None, range(2, 2))]
    assert has_empty_slice(encoded(mask, slice(2, 2)), X.shape)
    region = region_of(encoded(0, numbers), X.shape)
    assert [(p.dim, p.tensor) for p in region] == [(0, None), (1, 0), (2, None)]


def test_what_is_not_there_is_not_picked() -> None:
    assert region_of((7,), (3,)) == (Place(7, 0, None),)
    assert region_of((0, FULL_SLICE), (3,)) == (Place(0, 0, range(1)), Place(FULL_SLICE, 1, None))


def test_truth_values_are_no_numbers() -> None:
    """As keys of plans True and 1 would be equal, and ``x[True]`` would give ``x[1]``."""
    assert encoded(True) != encoded(1) and decode_index(encoded(True, 0), ()) == (True, 0)
    assert region_of(encoded(True), (3,)) == (Place(("bool", True), None, None), Place(FULL_SLICE, 0, range(3)))
