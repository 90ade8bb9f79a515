"""A save that is cut short at any step loses nothing: ranks are killed, or the disk is full, at each step in turn.

Ranks are processes that talk through files, as in an asynchronous save, which takes no process group; what they do to
the disk is the same in every save.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.checkpoint import CheckpointError, disk, jobs, latest, load, plan, ranks
from hyper_parallel.checkpoint.directories import set_run
from hyper_parallel.checkpoint.ranks import Alone, ThroughFiles
from hyper_parallel.platform import get_platform

RANKS = 2
FORK = multiprocessing.get_context("fork")
RUN = "0123456789abcdef"


def state(step: int) -> dict[str, Any]:
    """Of tensors that ranks share the writing of, and of values."""
    return {"weight": torch.full((8, 4), float(step)), "small": torch.full((2,), step), "step": step}


class Asked:
    """The ranks that a program has, before any file is there for them."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank, self.members = rank, tuple(range(RANKS))
        directory.mkdir(exist_ok=True)
        self._through = ThroughFiles(directory, self)
        self.gather = self._through.gather


def save_as(rank: int, path: Path, step: int, talk: Path, patience: float, exchange: bool = False) -> None:
    """What rank ``rank`` of a save does; an asynchronous one where ``exchange``."""
    ranks._PATIENCE, plan.SHARED_FROM = patience, 16
    set_run(path.parent, RUN)
    asked = Asked(rank, talk)
    job = jobs.prepare(state(step), path, asked, get_platform(), 2, path.exists(), False, exchange)
    if not exchange:
        jobs.write(job, asked)
        return
    beside = ThroughFiles(job.draft.exchange, asked)
    try:
        jobs.write(job, beside)
    finally:
        beside.leave()


class Group:
    """The ranks of one save, each in a process of its own."""

    def __init__(self, path: Path, step: int, talk: Path, at: Callable[[int, int, str, Path], None], **options: Any):
        self.failures = FORK.SimpleQueue()
        self.processes = [
            FORK.Process(target=self._run, args=(rank, path, step, talk, at, options)) for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()

    def _run(self, rank: int, path: Path, step: int, talk: Path, at: Any, options: dict[str, Any]) -> None:
        count = 0

        def watch(kind: str, about: Path) -> None:
            nonlocal count
            count += 1
            at(rank, count, kind, about)

        disk.watcher = watch
        try:
            save_as(rank, path, step, talk, **{"patience": 0.3, **options})
        except CheckpointError as error:
            self.failures.put((rank, str(error)))
            os._exit(3)
        except BaseException:
            traceback.print_exc()
            os._exit(4)
        os._exit(0)

    def kill(self) -> None:
        """All of them at once."""
        for process in self.processes:
            process.kill()

    def join(self) -> list[int]:
        """Exit codes, of all ranks."""
        for process in self.processes:
            process.join(30)
            assert process.exitcode is not None, "a rank hangs"
        return [process.exitcode for process in self.processes]


def steps_of(tmp_path: Path, **options: Any) -> list[list[tuple[str, str]]]:
    """What each rank does in a save, step by step."""
    log = tmp_path / "steps"
    log.mkdir()

    def note(rank: int, count: int, kind: str, about: Path) -> None:
        with (log / str(rank)).open("a") as file:
            file.write(f"{kind} {about.name}\n")

    run = tmp_path / "recorded"
    Group(run / "step-1", 1, tmp_path / "recorded-1", lambda *_: None, patience=20.0, **options).join()
    Group(run / "step-2", 2, tmp_path / "recorded-2", lambda *_: None, patience=20.0, **options).join()
    assert Group(run / "step-3", 3, tmp_path / "recorded-3", note, patience=20.0, **options).join() == [0] * RANKS
    return [
        [tuple(line.split(" ", 1)) for line in (log / str(rank)).read_text().splitlines()]  # type: ignore[misc]
        for rank in range(RANKS)
    ]


def check(directory: Path, newest: int) -> None:
    """The checkpoint of step ``newest``, or a later one that is whole, is found; each that is there can be loaded."""
    path = latest(directory)
    assert path is not None
    new = load(state(0), path)
    assert new["step"] >= newest and path.name in (f"step-{new['step']}", path.name)
    assert (new["weight"] == new["step"]).all() and (new["small"] == new["step"]).all()
    assert new["step"] in (newest, newest + 1)


@pytest.fixture(params=[False, True], ids=["save", "async_save"])
def exchange(request: pytest.FixtureRequest) -> bool:
    return request.param


def first_two(directory: Path, tmp_path: Path) -> None:
    """Two checkpoints of a run, copied from those that `steps_of` made."""
    directory.mkdir()
    for step in (2, 3):
        saved = tmp_path / "recorded" / f"step-{step}"
        shutil.copytree(saved, directory / saved.name)


def test_steps(tmp_path: Path, exchange: bool) -> None:
    """What there is to be killed at."""
    first, second = steps_of(tmp_path, exchange=exchange)
    kinds = [kind for kind, _ in first]
    assert {"make", "open", "write", "sync", "rename", "remove", "barrier"} == set(kinds)
    assert {"open", "write", "sync", "barrier"} == {kind for kind, _ in second}
    assert [kind for kind, name in first if name.startswith("rank-")] == ["open", *["write"] * 3, "sync"]
    assert [kind for kind, name in first if name == "index.json"] == ["open", "write", "sync"]


@pytest.mark.parametrize("killed", [0, 1])
def test_one_rank_is_killed(tmp_path: Path, killed: int) -> None:
    """At every step; the other one fails, and the next save of the run works and removes what was left."""
    recorded = steps_of(tmp_path, exchange=True)
    for number in range(1, len(recorded[killed]) + 1):

        def at(rank: int, count: int, kind: str, about: Path, number: int = number) -> None:
            if rank == killed and count == number:
                if kind == "write":
                    with about.open("ab") as file:  # a torn write
                        file.write(b"torn")
                os.kill(os.getpid(), signal.SIGKILL)

        directory = tmp_path / f"run-{number}"
        first_two(directory, tmp_path)
        codes = Group(directory / "step-4", 4, tmp_path / f"talk-{number}", at, exchange=True).join()
        assert codes[killed] == -signal.SIGKILL and codes[1 - killed] in (0, 3), codes
        check(directory, 3)
        if killed == 0:
            save_one_more(directory, tmp_path / f"again-{number}")
            left = {path.name for path in directory.iterdir()}
            assert left in ({"step-3", "step-5"}, {"step-4", "step-5"}), (number, left)


def test_the_whole_group_is_killed(tmp_path: Path) -> None:
    """When any rank is at any step."""
    recorded = steps_of(tmp_path, exchange=True)
    for first, steps in enumerate(recorded):
        for number in range(1, len(steps) + 1):
            here = FORK.Event()

            def at(
                rank: int, count: int, kind: str, about: Path, here: Any = here, place: Any = (first, number)
            ) -> None:
                if (rank, count) == place:
                    here.set()
                    signal.pause()

            directory = tmp_path / f"run-{first}-{number}"
            first_two(directory, tmp_path)
            talk = tmp_path / f"talk-{first}-{number}"
            group = Group(directory / "step-4", 4, talk, at, exchange=True, patience=20.0)
            assert here.wait(20)
            group.kill()
            assert -signal.SIGKILL in group.join()
            check(directory, 3)


def save_one_more(directory: Path, talk: Path) -> None:
    """The next save of the run works, whatever the one before has left."""
    done = Group(directory / "step-5", 5, talk, lambda *_: None, patience=20.0).join()
    assert done == [0] * RANKS
    check(directory, 5)


def test_killed_while_one_is_replaced(tmp_path: Path) -> None:
    """The one that was there, or the new one, is found by its name at every moment."""
    recorded = steps_of(tmp_path)
    seen = set()
    for number in range(1, len(recorded[0]) + 3):

        def at(rank: int, count: int, kind: str, about: Path, number: int = number) -> None:
            if rank == 0 and count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        directory = tmp_path / f"run-{number}"
        first_two(directory, tmp_path)
        codes = Group(directory / "step-3", 4, tmp_path / f"talk-{number}", at).join()
        check(directory, 3)
        got = load({"step": 0}, directory / "step-3")["step"]
        seen.add((got, (directory / "step-3").exists()))
        assert got in (3, 4) and (codes[0] != 0 or got == 4)
        save_one_more(directory, tmp_path / f"again-{number}")
    assert seen == {(3, True), (3, False), (4, True)}


@pytest.mark.parametrize("failing", [0, 1])
def test_full_disk(tmp_path: Path, exchange: bool, failing: int) -> None:
    """Every step that can fail does in turn: an error on all ranks that names the file, and nothing is left behind."""
    recorded = steps_of(tmp_path, exchange=exchange)
    for number, (kind, name) in enumerate(recorded[failing], 1):
        if kind in ("barrier", "remove"):
            continue

        def at(rank: int, count: int, kind: str, about: Path, number: int = number) -> None:
            if rank == failing and count == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        directory = tmp_path / f"run-{number}"
        first_two(directory, tmp_path)
        group = Group(directory / "step-4", 4, tmp_path / f"talk-{number}", at, exchange=exchange, patience=20.0)
        codes = group.join()
        check(directory, 3)
        left = {path.name for path in directory.iterdir()}
        if (kind, name) == ("rename", "step-1"):  # of the oldest one: a warning says so
            assert codes == [0] * RANKS and left == {"step-2", "step-3", "step-4"}
            continue
        assert codes == [3] * RANKS, (kind, name)
        messages = dict(group.failures.get() for _ in range(RANKS))
        assert len(set(messages.values())) == 1 and "No space left" in messages[0]
        if kind in ("open", "write"):
            assert f"{name} cannot be written" in messages[0]
        # Once the new one has its name, all that can fail is writing down that it has.
        assert left == {"step-2", "step-3"} or (kind == "sync" and left == {"step-2", "step-3", "step-4"}), (kind, name)


def test_the_system_says_that_the_disk_is_full(tmp_path: Path) -> None:
    """The same by the system: a limit on the size of files."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        job = jobs.prepare(
            {"x": torch.ones(100_000)}, tmp_path / "a", Alone(), get_platform(), None, False, False, False
        )
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors cannot be written: File too large"):
            jobs.write(job, Alone())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert [*tmp_path.iterdir()] == []
