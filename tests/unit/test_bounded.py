"""Dictionaries that do not grow without end."""

from __future__ import annotations

import copy

from hyper_parallel.core.dtensor.bounded import Bounded, Table


def test_emptied_when_full() -> None:
    kept = Bounded(2)
    kept["a"], kept["b"] = 1, 2
    assert kept == {"a": 1, "b": 2}
    kept["c"] = 3
    assert kept == {"c": 3}


def test_made_once() -> None:
    made: list[int] = []

    def make(key: int) -> int:
        made.append(key)
        return -key

    table = Table(make, most=2)
    assert [table[1], table[1], table[2], table[3], table[1]] == [-1, -1, -2, -3, -1]
    assert made == [1, 2, 3, 1]
    assert copy.deepcopy({"table": table})["table"] is table
