"""Two programs that save into one directory: the owner of each draft, a late save, and the files of ended programs."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.checkpoint import CheckpointError, directories, disk, jobs, load, save, writers
from hyper_parallel.checkpoint.index import LATEST, read_index
from hyper_parallel.checkpoint.ranks import Alone
from hyper_parallel.checkpoint.writers import DRAFT, hidden_in, hidden_name, new_token
from hyper_parallel.platform import get_platform

FORK = multiprocessing.get_context("fork")
DAY = 24 * 3600.0


def begin(path: Path, step: int, overwrite: bool = False, keep: int | None = None) -> Callable[[], None]:
    """Begin a save; the returned function goes on with it."""
    job = jobs.prepare({"step": step}, path, Alone(), get_platform(), keep, overwrite, False, False)
    return lambda: jobs.write(job, Alone())


def step_of(path: Path) -> int:
    return load({"step": 0}, path)["step"]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def once(monkeypatch: Any, kind: str, name: Callable[[str], bool], action: Callable[[], Any]) -> None:
    """Do something before the first step of that kind on something of such a name."""
    done: list[Path] = []

    def watch(now: str, path: Path) -> None:
        if now == kind and name(path.name) and not done:
            done.append(path)
            action()

    monkeypatch.setattr(disk, "watcher", watch)


def test_a_save_leaves_drafts_of_the_living_alone(tmp_path: Path) -> None:
    """Two threads of a process have the same run, as two jobs have that went on from one checkpoint."""
    first = begin(tmp_path / "step-1", 1)
    second = begin(tmp_path / "step-2", 2)
    second()
    first()
    assert names(tmp_path) == {"step-1", "step-2"}
    assert step_of(tmp_path / "step-1") == 1 and step_of(tmp_path / "step-2") == 2


def test_a_late_save_is_told_who_was_there(tmp_path: Path) -> None:
    who = rf"process {os.getpid()} on .* \(run {directories.run_of(tmp_path)}\) created or removed this path"
    late, other = begin(tmp_path / "step-1", 1), begin(tmp_path / "step-3", 3)
    save({"step": 2}, tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=rf"{who}.* Also saving there: another thread \(step-3\)\. Let one"):
        late()
    other()
    assert step_of(tmp_path / "step-1") == 2 and names(tmp_path) == {"step-1", "step-3"}


def test_a_late_save_does_not_overwrite_what_it_has_not_seen(tmp_path: Path) -> None:
    save({"step": 1}, tmp_path / "last")
    late = begin(tmp_path / "last", 2, overwrite=True)
    save({"step": 3}, tmp_path / "last", overwrite=True)
    with pytest.raises(CheckpointError, match=r"last was not saved: process \d+ on .*\(run "):
        late()
    assert step_of(tmp_path / "last") == 3 and names(tmp_path) == {"last"}
    # The checkpoint that it was to replace is gone, and the present one has no index.
    late = begin(tmp_path / "last", 4, overwrite=True)
    shutil.rmtree(tmp_path / "last")
    (tmp_path / "last").mkdir()
    with pytest.raises(CheckpointError, match="another program created or removed this path"):
        late()


def test_two_that_replace_one_at_the_same_moment(tmp_path: Path, monkeypatch: Any) -> None:
    """Two machines do not see each other's lock; a checkpoint that one removed by mistake is restored."""
    monkeypatch.setattr(disk, "_PATIENCE", 0.05)
    save({"step": 1}, tmp_path / "last")
    late, other = begin(tmp_path / "last", 2, overwrite=True), begin(tmp_path / "last", 3, overwrite=True)
    once(monkeypatch, "rename", lambda name: name == "last", other)
    with pytest.raises(CheckpointError, match=r"last was not saved: process \d+ on "):
        late()
    assert step_of(tmp_path / "last") == 3 and names(tmp_path) == {"last"}
    # Another one takes the name while there is nothing.
    late, other = begin(tmp_path / "last", 4, overwrite=True), begin(tmp_path / "next", 5)
    other()

    def take() -> None:
        shutil.copytree(tmp_path / "next", tmp_path / "last")

    once(monkeypatch, "rename", lambda name: name.startswith(".last") and name.endswith(DRAFT), take)
    with pytest.raises(CheckpointError, match=r"last was not saved: process \d+ on "):
        late()
    assert step_of(tmp_path / "last") == 5


@pytest.mark.parametrize("harm", ["gone", "shorter", "all", "a directory"])
def test_a_draft_that_was_touched_gets_no_name(tmp_path: Path, monkeypatch: Any, harm: str) -> None:
    late = begin(tmp_path / "step-1", 1)
    (draft,) = hidden_in(tmp_path, DRAFT)

    def touch() -> None:
        index = draft.path / "index.json"
        if harm == "shorter":
            os.truncate(index, 3)
        elif harm == "all":
            shutil.rmtree(draft.path)
            draft.path.mkdir()
        else:
            index.unlink()
            if harm == "a directory":
                index.mkdir()

    once(monkeypatch, "sync", lambda name: name == draft.path.name, touch)
    with pytest.raises(CheckpointError, match=r"step-1 was not saved: .*index\.json was removed or changed"):
        late()
    assert names(tmp_path) == set()


def test_other_failures_of_the_last_step_stay_what_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    late = begin(tmp_path / "step-1", 1)
    once(monkeypatch, "rename", lambda name: name.endswith(DRAFT), full)
    with pytest.raises(CheckpointError, match="No space left"):
        late()
    assert names(tmp_path) == set()


def hide(directory: Path, name: str, **changes: str) -> Path:
    """Make a draft of this process, or with another machine, process or beginning."""
    parts = dict(zip(("machine", "process", "began", "number"), new_token().split("-"), strict=True)) | changes
    path = directory / hidden_name(name, "-".join(parts.values()), DRAFT)
    path.mkdir()
    (path / "file").touch()
    return path


def ended() -> int:
    """Return the number of a process that has ended."""
    process = FORK.Process(target=os._exit, args=(0,))
    process.start()
    process.join()
    assert process.pid is not None
    return process.pid


def test_what_the_dead_have_left_is_removed(tmp_path: Path, monkeypatch: Any) -> None:
    """Files of ended processes are removed; those of running ones, other machines and strangers stay."""
    zombie = FORK.Process(target=os._exit, args=(0,))
    zombie.start()
    while writers._began(zombie.pid) != -1:
        time.sleep(0.001)
    gone = [
        hide(tmp_path, "of a process that has ended", process=f"{ended():x}"),
        hide(tmp_path, "of one whose number has another now", process=f"{os.getpid():x}", began="1"),
        hide(tmp_path, "of one that was not waited for", process=f"{zombie.pid:x}"),
        hide(tmp_path, "of a machine that is silent", machine="a" * 12),
    ]
    kept = [
        hide(tmp_path, "of this process"),
        hide(tmp_path, "of its parent", process=f"{os.getppid():x}", began=f"{writers._began(os.getppid()):x}"),
        hide(tmp_path, "of a machine that writes", machine="b" * 12),
        hide(tmp_path, "of a machine that makes files", machine="c" * 12),
        tmp_path / ".of.a-stranger.draft",
        tmp_path / ".draft",
    ]
    for path in kept[-2:]:
        path.mkdir()
    for path in (gone[-1] / "file", gone[-1], kept[2], *kept[-2:]):
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    save({"step": 1}, tmp_path / "step-1")
    assert names(tmp_path) == {"step-1", *(path.name for path in kept)}
    zombie.join()
    # A system that does not say where processes run: nothing is known but how long ago a draft has changed.
    monkeypatch.setattr(writers, "_machine", lambda: writers._NOWHERE)
    monkeypatch.setattr(writers, "_this_process", writers._this_process.__wrapped__)
    old, new = hide(tmp_path, "old", process=f"{ended():x}"), hide(tmp_path, "new", process=f"{ended():x}")
    for path in (old / "file", old):
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    save({"step": 2}, tmp_path / "step-2")
    assert not old.exists() and new.exists()


def test_a_process_that_cannot_be_asked_is_taken_to_run(monkeypatch: Any) -> None:
    """Another user's process, or one on a system without /proc, counts as running."""

    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert writers._runs(os.getpid(), writers._began(os.getpid()) or 0)
    assert not writers._runs(os.getpid(), 1)
    monkeypatch.setattr(writers, "_began", lambda pid: None)
    assert writers._runs(os.getpid(), 1)


def test_where_a_process_runs(monkeypatch: Any) -> None:
    assert writers._machine() != writers._NOWHERE
    told = FORK.SimpleQueue()
    child = FORK.Process(target=lambda: told.put(new_token()))
    child.start()
    child.join()
    mine, other = new_token().split("-"), told.get().split("-")
    assert mine[:2] == [writers._machine(), f"{os.getpid():x}"] and other[:2] == [mine[0], f"{child.pid:x}"]
    monkeypatch.setattr(Path, "read_text", lambda self: (_ for _ in ()).throw(FileNotFoundError()))
    assert writers._machine.__wrapped__() == writers._NOWHERE and writers._began(os.getpid()) is None


def test_writers_are_named() -> None:
    mine = Path(hidden_name("step-1", new_token(), DRAFT))
    (token,) = [new_token().split("-")]
    for process, began, words in (
        (os.getpid(), token[2], "another thread"),
        (os.getppid(), "1", f"process {os.getppid()} of this machine"),
    ):
        path = Path(hidden_name("step-1", f"{token[0]}-{process:x}-{began}-01234567", DRAFT))
        assert writers.parse(path).writer() == words  # type: ignore[union-attr]
    other = Path(hidden_name("step-1", f"{'a' * 12}-1-1-01234567", DRAFT))
    assert writers.parse(other).writer() == "a process of another machine or container"  # type: ignore[union-attr]
    assert writers.parse(mine).name == "step-1"  # type: ignore[union-attr]


def test_keep_never_removes_what_was_just_saved(tmp_path: Path) -> None:
    """Nor does it remove a checkpoint that another save has put in the place of an old one."""
    first, second = begin(tmp_path / "a", 1, keep=1), begin(tmp_path / "b", 2, keep=1)
    job_times = [LATEST - 2, LATEST - 1]  # b is saved first, and says that it is later
    original = jobs._time
    try:
        jobs._time = lambda directory, run: job_times.pop()  # type: ignore[assignment]
        second()
        first()
    finally:
        jobs._time = original
    assert names(tmp_path) == {"a"}


def test_keep_puts_back_what_has_changed(tmp_path: Path, monkeypatch: Any) -> None:
    save({"step": 1}, tmp_path / "a")
    last = begin(tmp_path / "b", 2, keep=1)
    other = begin(tmp_path / "a", 3, overwrite=True)
    once(monkeypatch, "rename", lambda name: name == "a", other)
    last()
    assert step_of(tmp_path / "a") == 3 and step_of(tmp_path / "b") == 2
    # Another save of the run removes the same one.
    last = begin(tmp_path / "c", 4, keep=2)
    once(monkeypatch, "rename", lambda name: name == "b", lambda: shutil.rmtree(tmp_path / "b"))
    last()
    assert names(tmp_path) == {"a", "c"}


def test_the_lock(tmp_path: Path, monkeypatch: Any) -> None:
    """The lock keeps other threads out, and is free afterwards, though a child has the file too. No wait is endless."""
    inside: list[str] = []

    def enter() -> None:
        with disk.alone_in(tmp_path):
            inside.append("other")

    with disk.alone_in(tmp_path):
        other = threading.Thread(target=enter)
        other.start()
        child = FORK.Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(0.05)
        inside.append("first")
    other.join()
    assert inside == ["first", "other"]
    with disk.alone_in(tmp_path):
        monkeypatch.setattr(disk, "_PATIENCE", 0.05)
        enter()
    child.kill()
    child.join()
    # Of a file system without locks, and a system without them.
    import fcntl

    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    enter()
    monkeypatch.setitem(__import__("sys").modules, "fcntl", None)
    enter()
    assert inside[2:] == ["other"] * 3


def test_the_index_says_who_saved(tmp_path: Path) -> None:
    save({"step": 1}, tmp_path / "a")
    assert read_index(tmp_path / "a").writer == writers.name_of_process()
