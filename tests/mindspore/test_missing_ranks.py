"""Finding the missing ranks when a collective fails: ranks that call the roll at a real store, at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from mindspore.mint import distributed as dist

from hyper_parallel.platform.mindspore.processes import lost_ranks
from hyper_parallel.platform.mindspore.processes.launch import GroupVerbs, World
from hyper_parallel.testing.pool import free_port

#: All that a test has made, until the process ends: MindSpore crashes now and then when it destroys a client.
STORES: list[Any] = []


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Any, int]]:
    """A store like that of rank 0, and its port."""
    port = free_port()
    yield store_at(port, is_master=True), port


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_ranks, "GRACE", 0.2)


def store_at(port: int, is_master: bool = False) -> Any:
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        world_size=1,
        is_master=is_master,
        timeout=timedelta(seconds=600),
        wait_for_workers=False,
    )
    STORES.append(store)
    return store


def on_rank(rank: int, store: Any) -> GroupVerbs:
    """The verbs of one rank of a world that has met at ``store``."""
    groups = GroupVerbs()
    groups._world = World(rank, 100, "world", store)
    return groups


def test_all_answer(server: tuple[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends as soon as all have answered, and each learns the state of all others."""
    monkeypatch.setattr(lost_ranks, "GRACE", 600.0)
    store, port = server
    answers: dict[int, Any] = {}

    def late() -> None:
        time.sleep(0.2)
        answers[11] = on_rank(11, store_at(port)).find_missing_ranks("group", (10, 11), "all_gather in 'up'")

    other = threading.Thread(target=late)
    started = time.monotonic()
    other.start()
    answers[10] = on_rank(10, store).find_missing_ranks("group", (10, 11), "all_reduce in 'down'")
    other.join()
    reports = {10: "all_reduce in 'down'", 11: "all_gather in 'up'"}
    assert answers == {10: (reports, ()), 11: (reports, ())}
    assert time.monotonic() - started < lost_ranks.GRACE


def test_some_are_missing(server: tuple[Any, int], short_grace: None) -> None:
    """A rank has failed in this group, another in a different group, and a third is silent."""
    store, port = server
    assert on_rank(21, store_at(port)).find_missing_ranks("group", (21,), "all_reduce") == ({21: "all_reduce"}, ())
    assert on_rank(22, store_at(port)).find_missing_ranks("other", (22,), "all_gather") == ({22: "all_gather"}, ())
    reports, missing = on_rank(20, store).find_missing_ranks("group", (20, 21, 22, 23), "broadcast") or ({}, ())
    assert reports == {20: "broadcast", 21: "all_reduce", 22: "all_gather"} and missing == (22, 23)


def test_no_way_to_find_out() -> None:
    """A program that initialises MindSpore itself has no store; before that there is no world."""
    assert on_rank(0, None).find_missing_ranks("group", (0, 1), "all_reduce") is None
    assert GroupVerbs().find_missing_ranks("group", (0, 1), "all_reduce") is None


def test_groups_know_errors_of_the_library() -> None:
    groups = GroupVerbs()
    assert groups.is_communication_failure(RuntimeError("AllReduce failed."))
    assert not groups.is_communication_failure(RuntimeError("AllReduce got a tensor of type bool"))
