"""A save that is cut short at any step loses nothing: ranks are killed, or the disk is full, at each step in turn.

Ranks are processes that talk through files, as in an asynchronous save, which takes no process group. Their work on the
disk is the same in every save.
"""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hyper_parallel.checkpoint import CheckpointError, assignment, disk, jobs, latest, load, ranks
from hyper_parallel.checkpoint.directories import set_run
from hyper_parallel.checkpoint.ranks import Alone, ThroughFiles
from hyper_parallel.platform import get_platform
from hyper_parallel.testing.extent import everything

RANKS = 2
FORK = multiprocessing.get_context("fork")
RUN = "0123456789abcdef"


def state(step: int) -> dict[str, Any]:
    """A state of tensors that ranks share the writing of, and of values."""
    return {"weight": torch.full((8, 4), float(step)), "small": torch.full((2,), step), "step": step}


class Asked:
    """The ranks that a program has, before any file is there for them."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank, self.members = rank, tuple(range(RANKS))
        directory.mkdir(exist_ok=True)
        self.through = ThroughFiles(directory, self)
        self.gather = self.through.gather


def save_as(rank: int, path: Path, step: int, talk: Path, lost: Path, exchange: bool) -> None:
    """The work of rank ``rank`` in a save; an asynchronous one where ``exchange``."""
    ranks._PATIENCE, assignment.SHARED_FROM = 20.0, 16
    set_run(path.parent, RUN)
    asked = Asked(rank, talk)
    threading.Thread(target=give_up, args=(asked.through, lost), daemon=True).start()
    job = jobs.prepare(state(step), path, asked, get_platform(), 2, path.exists(), False, exchange)
    if not exchange:
        jobs.write(job, asked)
        return
    beside = ThroughFiles(job.draft.exchange, asked)
    threading.Thread(target=give_up, args=(beside, lost), daemon=True).start()
    try:
        jobs.write(job, beside)
    finally:
        beside.leave()


def give_up(through: ThroughFiles, lost: Path) -> None:
    """Wait no longer once a rank is lost, which has written all that it will."""
    while not lost.exists():
        time.sleep(0.02)
    through._limit = 0.0


class Group:
    """The ranks of one save, each in a process of its own. ``at`` is called before each step of each rank."""

    def __init__(
        self, path: Path, step: int, talk: Path, at: Callable[..., None] | None = None, exchange: bool = False
    ):
        self.failures, self.here = FORK.SimpleQueue(), FORK.Event()
        self._lost = talk.with_name(f"{talk.name}-lost")
        self.processes = [
            FORK.Process(target=self._run, args=(rank, path, step, talk, at, exchange)) for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()

    def _run(self, rank: int, path: Path, step: int, talk: Path, at: Any, exchange: bool) -> None:
        count = 0

        def watch(kind: str, about: Path) -> None:
            nonlocal count
            count += 1
            if at is not None:
                at(self, rank, count, kind, about)

        disk.watcher = watch
        try:
            save_as(rank, path, step, talk, self._lost, exchange)
        except CheckpointError as error:
            self.failures.put((rank, str(error)))
            os._exit(3)
        except BaseException:
            traceback.print_exc()
            os._exit(4)
        os._exit(0)

    def die(self) -> None:
        """Called by a rank: it is killed, and the others are told that they wait in vain."""
        self._lost.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def kill(self) -> None:
        """Kill all processes at once."""
        for process in self.processes:
            process.kill()

    def join(self) -> list[int]:
        """Exit codes, of all ranks."""
        for process in self.processes:
            process.join(30)
            assert process.exitcode is not None, "a rank hangs"
        return [process.exitcode for process in self.processes]


class Recorded(NamedTuple):
    """A save that was watched.

    Attributes:
        run: where it and the one before it are.
        steps: the steps of each rank.
    """

    run: Path
    steps: list[list[tuple[str, str]]]

    def copy(self, directory: Path) -> None:
        """The two checkpoints of the run, in another directory."""
        shutil.copytree(self.run, directory)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Recorded]:
    """A save and an asynchronous one."""

    @functools.cache
    def of(exchange: bool) -> Recorded:
        folder = tmp_path_factory.mktemp("recorded")

        def note(group: Group, rank: int, count: int, kind: str, about: Path) -> None:
            with (folder / f"steps-{rank}").open("a") as file:
                file.write(f"{kind} {about.name}\n")

        run = folder / "run"
        for step in (1, 2, 3):
            at = note if step == 3 else None
            assert Group(run / f"step-{step}", step, folder / str(step), at, exchange).join() == [0] * RANKS
        logs = [(folder / f"steps-{rank}").read_text().splitlines() for rank in range(RANKS)]
        return Recorded(run, [[tuple(line.split(" ", 1)) for line in log] for log in logs])  # type: ignore[misc]

    return of


def in_turn(points: Iterable[Any], start: Callable[[Any], Group], check: Callable[[Any, Group], None]) -> None:
    """Start a group for each point, and check its outcome. Some groups run at a time, as ranks wait for one another."""
    running: deque[tuple[Any, Group]] = deque()
    for point in points:
        if len(running) == 4:
            check(*running.popleft())
        running.append((point, start(point)))
    while running:
        check(*running.popleft())


def check_newest(directory: Path, newest: int) -> None:
    """The checkpoint of step ``newest``, or a later one that is whole, is found. Each that is there can be loaded."""
    path = latest(directory)
    assert path is not None
    new = load(state(0), path)
    assert new["step"] >= newest and path.name in (f"step-{new['step']}", path.name)
    assert (new["weight"] == new["step"]).all() and (new["small"] == new["step"]).all()
    assert new["step"] in (newest, newest + 1)


@pytest.fixture(params=[False, True], ids=["save", "async_save"])
def exchange(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_steps(recorded: Any, exchange: bool) -> None:
    """The steps at which a rank can be killed."""
    first, second = recorded(exchange).steps
    kinds = [kind for kind, _ in first]
    assert {"make", "open", "write", "sync", "rename", "remove", "barrier"} == set(kinds)
    assert {"open", "write", "sync", "barrier"} == {kind for kind, _ in second}
    assert [kind for kind, name in first if name.startswith("rank-")] == ["open", *["write"] * 3, "sync"]
    assert [kind for kind, name in first if name == "index.json"] == ["open", "write", "sync"]


def some(places: Sequence[Any], first: int) -> Sequence[Any]:
    """Places at which a rank can be killed: every third from ``first`` on in the gate, all at night."""
    return places if everything() else places[first::3]


@pytest.mark.parametrize("killed", [0, 1])
def test_one_rank_is_killed(tmp_path: Path, recorded: Any, killed: int) -> None:
    """One rank is killed at every step; the other fails, and the next save works and removes the remains."""
    saved = recorded(True)

    def start(number: int) -> Group:
        def at(group: Group, rank: int, count: int, kind: str, about: Path) -> None:
            if rank == killed and count == number:
                if kind == "write":
                    with about.open("ab") as file:  # a torn write
                        file.write(b"torn")
                group.die()

        saved.copy(tmp_path / f"run-{number}")
        return Group(tmp_path / f"run-{number}" / "step-4", 4, tmp_path / f"talk-{number}", at, True)

    def check(number: int, group: Group) -> None:
        codes, directory = group.join(), tmp_path / f"run-{number}"
        assert codes[killed] == -signal.SIGKILL and codes[1 - killed] in (0, 3), codes
        check_newest(directory, 3)
        if killed == 0:
            save_one_more(directory)
            left = {path.name for path in directory.iterdir()}
            assert left in ({"step-3", "step-5"}, {"step-4", "step-5"}), (number, left)

    in_turn(some(range(1, len(saved.steps[killed]) + 1), killed), start, check)


def test_the_whole_group_is_killed(tmp_path: Path, recorded: Any) -> None:
    """The whole group is killed when any rank is at any step."""
    saved = recorded(True)

    def start(place: tuple[int, int]) -> Group:
        def at(group: Group, rank: int, count: int, kind: str, about: Path) -> None:
            if (rank, count) == place:
                group.here.set()
                signal.pause()

        saved.copy(tmp_path / f"run-{place}")
        return Group(tmp_path / f"run-{place}" / "step-4", 4, tmp_path / f"talk-{place}", at, True)

    def check(place: tuple[int, int], group: Group) -> None:
        assert group.here.wait(20)
        group.kill()
        assert -signal.SIGKILL in group.join()
        check_newest(tmp_path / f"run-{place}", 3)

    places = [(rank, n) for rank, steps in enumerate(saved.steps) for n in range(1, len(steps) + 1)]
    in_turn(some(places, 2), start, check)


def save_one_more(directory: Path) -> None:
    """The next save of the run works, whatever the one before has left."""
    set_run(directory, RUN)
    jobs.write(jobs.prepare(state(5), directory / "step-5", Alone(), get_platform(), 2, False, False, False), Alone())
    check_newest(directory, 5)


def test_killed_while_one_is_replaced(tmp_path: Path, recorded: Any) -> None:
    """The one that was there, or the new one, is found by its name at every moment."""
    saved, seen = recorded(False), set()

    def start(number: int) -> Group:
        def at(group: Group, rank: int, count: int, kind: str, about: Path) -> None:
            if rank == 0 and count == number:
                group.die()

        saved.copy(tmp_path / f"run-{number}")
        return Group(tmp_path / f"run-{number}" / "step-3", 4, tmp_path / f"talk-{number}", at)

    def check(number: int, group: Group) -> None:
        codes, directory = group.join(), tmp_path / f"run-{number}"
        check_newest(directory, 3)
        got = load({"step": 0}, directory / "step-3")["step"]
        seen.add((got, (directory / "step-3").exists()))
        assert got in (3, 4) and (codes[0] != 0 or got == 4)
        save_one_more(directory)

    in_turn(range(1, len(saved.steps[0]) + 3), start, check)
    assert seen == {(3, True), (3, False), (4, True)}


@pytest.mark.parametrize("failing", [0, 1])
def test_full_disk(tmp_path: Path, recorded: Any, exchange: bool, failing: int) -> None:
    """Every step that can fail does in turn: an error on all ranks that names the file, and nothing is left behind."""
    saved = recorded(exchange)

    def start(step: tuple[int, tuple[str, str]]) -> Group:
        def at(group: Group, rank: int, count: int, kind: str, about: Path) -> None:
            if rank == failing and count == step[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        saved.copy(tmp_path / f"run-{step[0]}")
        return Group(tmp_path / f"run-{step[0]}" / "step-4", 4, tmp_path / f"talk-{step[0]}", at, exchange)

    def check(step: tuple[int, tuple[str, str]], group: Group) -> None:
        codes, (number, (kind, name)) = group.join(), step
        directory = tmp_path / f"run-{number}"
        check_newest(directory, 3)
        left = {path.name for path in directory.iterdir()}
        if (kind, name) == ("rename", "step-1"):  # of the oldest one: a warning says so
            assert codes == [0] * RANKS and left == {"step-2", "step-3", "step-4"}
            return
        assert codes == [3] * RANKS, (kind, name)
        messages = dict(group.failures.get() for _ in range(RANKS))
        assert len(set(messages.values())) == 1 and "No space left" in messages[0]
        if kind in ("open", "write"):
            assert f"{name} cannot be written" in messages[0]
        # Once the new one has its name, all that can fail is writing down that it has.
        assert left == {"step-2", "step-3"} or (kind == "sync" and left == {"step-2", "step-3", "step-4"}), (kind, name)

    steps = [(n, step) for n, step in enumerate(saved.steps[failing], 1) if step[0] not in ("barrier", "remove")]
    in_turn(steps, start, check)


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
