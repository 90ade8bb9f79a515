"""Dictionaries that do not grow without end, and are emptied and counted together."""

from __future__ import annotations

import copy

from hyper_parallel.core.caches import Cache, Table, cache_sizes, clear_caches


def test_emptied_when_full() -> None:
    kept = Cache(2)
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


def test_those_with_a_name_are_emptied_and_counted_together() -> None:
    first, second, other = Cache(4, "of a test"), Table(str, 4, name="of a test"), Cache(4)
    first["a"], other["b"] = 1, 2
    assert second[3] == "3"
    assert cache_sizes()["of a test"] == 2
    clear_caches()
    assert (len(first), len(second), len(other)) == (0, 0, 1)
    assert cache_sizes()["of a test"] == 0
