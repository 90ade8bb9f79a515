"""Two jobs that go on from one checkpoint save into one directory: every save that returned is there, and whole.

Jobs are processes, or threads of one; they overwrite, save parallel to the training, and are killed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.checkpoint import CheckpointError, async_save, latest, load, save
from hyper_parallel.checkpoint.directories import set_run
from hyper_parallel.testing.extent import in_gate
from tests.support.in_threads import failures_in_threads

FORK = multiprocessing.get_context("fork")
RUN = "0123456789abcdef"
#: The message of a save that came too late.
LATE = ("was not saved: ", "exists already")


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((64, 4), float(step)), "small": torch.full((2,), step), "step": step}


def check(path: Path, steps: set[int]) -> None:
    """A checkpoint is whole, and one of these."""
    found = load(state(-1), path)
    assert found["step"] in steps, (path.name, found["step"])
    assert (found["weight"] == found["step"]).all() and (found["small"] == found["step"]).all()


def work(directory: Path, job: int, count: int, aside: bool, returned: Callable[[str, int], None]) -> None:
    """Save under own names, under names that the other job has too, and again and again under one.

    Args:
        directory: of all of them.
        job: number of this one.
        count: saves of each kind.
        aside: whether every third save is an asynchronous one.
        returned: called with name and step of each save that has returned.
    """
    for i in range(count):
        step = 1_000_000 * job + i
        for name, overwrite in ((f"own-{step}", False), (f"both-{i}", False), ("last", True)):
            call = async_save if aside and (i + job) % 3 == 0 else save
            try:
                under_way = call(state(step), directory / name, overwrite=overwrite)
                if call is async_save:
                    under_way.result()
            except (CheckpointError, ValueError) as error:
                assert name[:3] != "own" and any(words in str(error) for words in LATE), f"{name}: {error}"
            else:
                returned(name, step)


def process(directory: Path, log: Path, job: int, count: int) -> None:
    """A job that writes down which of its saves have returned."""
    code = 0
    try:
        set_run(directory, RUN)
        with log.open("a", buffering=1) as file:
            work(directory, job, count, True, lambda name, step: print(json.dumps([name, step]), file=file) and None)
    except BaseException:
        traceback.print_exc()
        code = 4
    os._exit(code)


def check_all(directory: Path, returned: list[tuple[str, int]]) -> None:
    """Each save that returned can be loaded, but for those that were overwritten by one that returned later."""
    by_name: dict[str, set[int]] = {}
    for name, step in returned:
        by_name.setdefault(name, set()).add(step)
    for name, steps in by_name.items():
        assert name == "last" or len(steps) == 1, f"two saves of {name} have returned"
        check(directory / name, steps)
    path = latest(directory)
    assert path is not None and (path.name in by_name)


def read(*logs: Path) -> list[tuple[str, int]]:
    return [tuple(json.loads(line)) for log in logs for line in log.read_text().splitlines() if line.endswith("]")]


@pytest.mark.parametrize("count", in_gate([5, 67], [5]))
def test_two_processes(tmp_path: Path, count: int) -> None:
    """Two processes save at once: two hundred saves each, at night."""
    directory, logs = tmp_path / "run", [tmp_path / f"{job}" for job in (1, 2)]
    jobs = [FORK.Process(target=process, args=(directory, log, j, count)) for j, log in enumerate(logs, 1)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(600)
    assert [job.exitcode for job in jobs] == [0, 0]
    returned = read(*logs)
    assert sum(name.startswith("own-") for name, _ in returned) == 2 * count
    assert sum(name.startswith("both-") for name, _ in returned) == count, "of each pair one has returned"
    check_all(directory, returned)
    assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("count", in_gate([5, 67], [5]))
def test_two_threads(tmp_path: Path, count: int) -> None:
    directory, returned = tmp_path / "run", []

    def run(job: int) -> None:
        # The next save in a process raises the error of an asynchronous one: it would be that of the other thread.
        work(directory, job, count, False, lambda name, step: returned.append((name, step)))

    assert not failures_in_threads(run, (1, 2), 600)
    check_all(directory, returned)
    assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kills", in_gate([3, 100], [3]))
def test_one_is_killed_again_and_again(tmp_path: Path, kills: int) -> None:
    """The other one goes on, and the next save removes the files of the killed one."""
    directory, steady = tmp_path / "run", tmp_path / "steady"
    stays = FORK.Process(target=process, args=(directory, steady, 1, 5 if kills == 3 else 67))
    stays.start()
    logs = []
    for number in range(kills):
        logs.append(tmp_path / f"killed-{number}")
        killed = FORK.Process(target=process, args=(directory, logs[-1], 2 + number, 1000))
        killed.start()
        time.sleep(0.05 + 0.003 * (number % 50))
        killed.kill()
        killed.join()
    stays.join(600)
    assert stays.exitcode == 0
    save(state(-1), directory / "again")
    hidden = [path.name for path in directory.iterdir() if path.name.startswith(".")]
    assert all(name.endswith(".replaced") for name in hidden), hidden
    returned = read(steady, *(log for log in logs if log.exists()))
    by_name: dict[str, set[int]] = {}
    for name, step in returned:
        by_name.setdefault(name, set()).add(step)
    for name, steps in by_name.items():
        # A save that was killed between giving the name and returning is there, too.
        more = {1_000_000 * (2 + n) + i for n in range(kills) for i in range(1000)} if name == "last" else set()
        check(directory / name, steps | more)
