"""Errors for a lost rank: the error names the collective, its tensor, its ranks and the missing rank.

Failing functions replace the platform's collectives, because these tests are about core's errors. Each backend's own
tests lose real ranks, with processes that end or hang.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import CollectiveError, DTensor, Partial, check_ranks
from hyper_parallel.core.communication import collectives, errors, host_reads
from hyper_parallel.platform.logs import LOG
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.spmd import on_mesh

VERBS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "shift",
    "broadcast",
    "scatter",
    "all_gather_object",
)


def calls(mesh: Any) -> dict[str, Callable[[], Any]]:
    """Return a call of each collective of core, on a (2, 2) tensor."""
    x = get_adapter().tensor(np.ones((2, 2), np.float32))
    return {
        "all_reduce": lambda: collectives.all_reduce(x, mesh, 0),
        "all_gather": lambda: collectives.bind_all_gather(mesh, 0, 0, (2, 2))(x),
        "reduce_scatter": lambda: collectives.bind_reduce_scatter(mesh, 0, 0, (1, 1))(x),
        "all_to_all": lambda: collectives.bind_all_to_all(mesh, 0, 0, 1, (2, 2), (1, 1))(x),
        "shift": lambda: collectives.shift(x, mesh, 0),
        "broadcast": lambda: collectives.broadcast(x, mesh, 0, 0),
        "scatter": lambda: collectives.scatter(x, mesh, 0, 0, (1, 1), 0),
        "all_gather_object": lambda: collectives.all_gather_object("x", mesh, 0),
    }


@on_mesh(2, names=("lost",))
def failing(mesh: Any) -> dict[str, Any]:
    platform, found = mesh.platform, {}

    def fail(*args: Any) -> Any:
        raise RuntimeError("connection lost\nand more")

    with pytest.MonkeyPatch.context() as patch:
        for verb in VERBS:
            patch.setattr(platform, verb, fail)
        patch.setattr(platform, "is_communication_failure", lambda error: False)
        for call in calls(mesh).values():
            with pytest.raises(RuntimeError, match="connection lost") as other:
                call()
            assert type(other.value) is RuntimeError
        patch.setattr(platform, "is_communication_failure", lambda error: "connection" in str(error))
        for name, call in calls(mesh).items():
            patch.setattr(platform, "find_missing_ranks", lambda group, ranks, report: ({0: report}, (1,)))
            with pytest.raises(CollectiveError) as lost:
                call()
            error = lost.value
            found[name] = (str(error), error.collective, error.ranks, error.missing, str(error.__cause__))
        with pytest.raises(CollectiveError) as lost, check_ranks(mesh):
            call()
        found["check_ranks"] = str(lost.value)
        loss = DTensor.from_local(get_adapter().tensor(np.ones((), np.float32)), mesh, [Partial()])
        with pytest.raises(CollectiveError) as lost:
            loss.item()
        found["item"] = str(lost.value)
        with pytest.raises(CollectiveError) as lost:
            loss.full_tensor()
        found["full_tensor"] = str(lost.value)
        with pytest.raises(ValueError, match="own mistake"), check_ranks(mesh):
            raise ValueError("own mistake")  # the others cannot be told: they are lost
        for case, answer in {
            "unknown": None,
            "several": ({0: "x"}, (1, 2)),
            "none missing": ({}, ()),
            "elsewhere": ({1: "all_gather of something"}, (1,)),
        }.items():
            patch.setattr(platform, "find_missing_ranks", lambda group, ranks, report, answer=answer: answer)
            with pytest.raises(CollectiveError) as lost:
                calls(mesh)["all_reduce"]()
            found[case] = str(lost.value)
    return found


def test_lost_ranks_are_named(pool: Any) -> None:
    for rank, found in enumerate(pool.run(2, failing)):
        for name in VERBS:
            message, collective, ranks, missing, cause = found[name]
            # Where a backend has no scatter, core broadcasts, and says so.
            assert collective in (name, "broadcast" if name == "scatter" else name)
            assert (ranks, missing) == ((0, 1), (1,)) and cause.startswith("connection lost")
            first, line, last = message.splitlines()
            assert line.startswith("it was called at ") and "test_faults.py:" in line
            assert first.startswith(collective)
            assert ("float32" in first.lower()) == (name != "all_gather_object")
            assert " along mesh dimension 0 ('lost') among ranks 0, 1 failed on" in first
            assert first.endswith(f"on rank {rank}: rank 1 did not take part, and has ended, or hangs")
            assert last == "the backend says: connection lost"
        assert "of shape (2, 2) along" in found["all_reduce"][0]
        assert found["check_ranks"].startswith("the comparison of check_ranks() among ranks 0, 1 failed")
        assert "it is unknown which ranks did not take part" in found["unknown"]
        assert "ranks 1, 2 did not take part, and have ended, or hang\n" in found["several"]
        assert "all ranks are alive" in found["none missing"]
        assert f"failed on rank {rank}\nrank 1 failed in all_gather of something\n" in found["elsewhere"]
        for name in ("item", "full_tensor"):
            *_, line, _, remedy = found[name].splitlines()
            assert line.endswith(f": loss.{name}()") and "test_faults.py:" in line, found[name]
            assert remedy.startswith(f"{name}() of a tensor of shape (), placed [Partial(sum)], waits until all ranks")
            assert "call it on all ranks, or let all ranks call full_tensor() before the `if`" in remedy


@on_mesh(2, names=("slow",))
def waiting(mesh: Any) -> tuple[list[str], int]:
    """Return the messages about a short read and a long read, and the number of watching threads afterwards."""
    platform, said, seconds = mesh.platform, [], [0.0]
    reduce, listening = platform.all_reduce, logging.Handler()
    loss = DTensor.from_local(get_adapter().tensor(np.ones((), np.float32)), mesh, [Partial()])

    def late(*args: Any) -> Any:
        time.sleep(seconds[0])
        return reduce(*args)

    listening.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(listening)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(platform, "all_reduce", late)
            patch.setattr(host_reads, "SLOW", 0.3)
            patch.setattr(host_reads, "_PAUSE", 0.05)
            for seconds[0] in (0.0, 1.0):
                assert loss.item() == 2
            deadline = time.monotonic() + 60
            while (left := _watching()) and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        LOG.removeHandler(listening)
    return said, left


def _watching() -> int:
    return sum(thread.name == "hyper_parallel reads" for thread in threading.enumerate())


def test_a_long_read_is_told(pool: Any) -> None:
    for rank, (said, left) in enumerate(pool.run(2, waiting)):
        (message,) = said
        line, remedy = message.splitlines()
        assert line.startswith(f"rank {rank} has waited ") and "test_faults.py:" in line, message  # the line of `late`
        assert remedy.startswith(
            "item() of a tensor of shape (), placed [Partial(sum)], waits until all ranks of Device"
        )
        assert left == 0


def test_names_of_ranks() -> None:
    assert errors.names_of([3]) == "rank 3" and errors.names_of([1, 3]) == "ranks 1, 3"
