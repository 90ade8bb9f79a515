"""Numbers from the sizes of shards: their arithmetic, and operations that compute with them."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from hyper_parallel.core.plain_code.marks import Lost
from hyper_parallel.core.plain_code.sizes import PartNumber, PartSize, number_problems, sizes_of_part


def mark(*whole: int) -> Any:
    return SimpleNamespace(layout=SimpleNamespace(shape=whole))


def sizes(roots: Any = None) -> tuple[int, ...]:
    """The shape of a part, 12 of 24 features of 5 tokens."""
    return sizes_of_part((mark(5, 24),), (5, 12), {} if roots is None else roots)


@pytest.mark.parametrize(
    ("compute", "whole"),
    [
        (lambda n: n**-0.5, 24**-0.5),
        (lambda n: 1 / n, 1 / 24),
        (lambda n: 2 * n + 1, 49),
        (lambda n: n // 3 - n * 0.5, -4.0),
        (lambda n: -abs(n - 30), -6),
        (lambda n: 7 % n, 7),
        (lambda n: n % 12, 0),
        (lambda n: math.prod((2, n, 3)), 144),
        (lambda n: 2**n, 2**24),
    ],
)
def test_arithmetic_has_the_numbers_of_one_device(compute: Any, whole: float) -> None:
    tokens, n = sizes()
    found = compute(n)
    assert type(tokens) is int and type(n) is PartSize and found == compute(12)
    assert getattr(found, "whole", found) == pytest.approx(whole)
    assert (type(found) in (PartSize, PartNumber)) is (compute(12) != whole)


def test_numbers_that_are_no_more_of_a_part() -> None:
    _, n = sizes()
    assert type(copy.deepcopy(n)) is int and type(pickle.loads(pickle.dumps(n * 0.5))) is float
    assert type(1 / (n - 24)) is float  # on one device that is an error, and no number
    assert type(n * 1j) is complex and [0] * n == [0] * 12 and range(24)[n] == 12
    # A tensor that may lie in several ways, is whole, or is not followed.
    assert list(map(type, sizes_of_part((mark(5, 24), mark(10, 12)), (5, 12), {}))) == [int, int]
    assert list(map(type, sizes_of_part((mark(5, 24), None), (5, 12), {}))) == [int, int]
    assert sizes_of_part(Lost("why"), (5, 12), {}) == (5, 12)


def test_problems() -> None:
    roots: Any = {}
    _, n = sizes(roots)
    platform: Any = SimpleNamespace(is_floating_point=lambda x: x == "floats")

    def problem(x: Any, result: str = "floats") -> Any:
        return next(iter(number_problems("mul", ("tensor", x), roots, platform, result)), None)

    assert problem(12) is None and problem(12.0) is None and problem(math.sqrt(12)) is None
    found = problem(n * 3)
    assert found.certain and "computes with 36, and with 72 on one device" in found.text and "12 of 24" in found.text
    assert not problem(n, "integers").certain  # which may be places in this rank's part
    assert not problem(2 * n).certain and not problem(2 * n + 1).certain  # perhaps by the number of ranks
    root = math.sqrt(n)
    assert type(root) is float and not problem(root).certain and not problem(1 / root).certain
    assert float(n - 12) == 0.0
