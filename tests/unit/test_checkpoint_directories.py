"""Runs that share a directory, failures of asynchronous saves, and the bar: with states of values alone."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.checkpoint import CheckpointError, async_save, disk, latest, load, progress, save, saving, tool
from hyper_parallel.checkpoint.directories import set_run
from hyper_parallel.checkpoint.index import read_index
from hyper_parallel.checkpoint.writers import DRAFT, hidden_name, new_token


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    """Each finds and removes its own."""
    set_run(tmp_path, "a" * 32)
    first = [save({"step": step}, tmp_path / f"a-{step}", keep=2) for step in (1, 2, 3)]
    set_run(tmp_path, "b" * 32)
    second = [save({"step": step}, tmp_path / f"b-{step}", keep=1) for step in (7, 8)]
    assert {path.name for path in tmp_path.iterdir()} == {"a-2", "a-3", "b-8"}
    with pytest.raises(ValueError, match=r"checkpoints of 2 runs.*'a-3' of run 'a+'.*'b-8' of run 'b+'.*run="):
        latest(tmp_path)
    assert latest(tmp_path, run="a" * 32) == first[-1] and latest(tmp_path, run="b" * 32) == second[-1]
    assert latest(tmp_path, run="c") is None
    # A run that was resumed from a checkpoint is the same run, and cleans up after itself.
    load({"step": 0}, first[-1])
    save({"step": 4}, tmp_path / "a-4", keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"a-3", "a-4", "b-8"}
    assert read_index(tmp_path / "a-4").run == "a" * 32
    # The clock went back: the newest is still the one that was saved last.
    assert latest(tmp_path, run="a" * 32) == tmp_path / "a-4"


def test_a_draft_is_no_checkpoint(tmp_path: Path) -> None:
    """A draft that was killed just before its renaming is whole, but the run resumes from the previous checkpoint."""
    set_run(tmp_path, "a" * 32)
    first = save({"step": 1}, tmp_path / "step-1")
    token = new_token().split("-")
    left = hidden_name("step-2", "-".join([*token[:2], "0", token[3]]), DRAFT)  # of a process that has ended
    draft = save({"step": 2}, tmp_path / "step-2").rename(tmp_path / left)
    assert latest(tmp_path) == first
    for call in (lambda: load({"step": 0}, draft), lambda: tool.show(draft)):
        with pytest.raises(CheckpointError, match="an interrupted save, and not a checkpoint"):
            call()
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*step-2"):
        load({"step": 0}, tmp_path / "step-2")
    save({"step": 2}, tmp_path / "step-2")
    assert not draft.exists() and latest(tmp_path) == tmp_path / "step-2"


def full(kind: str, path: Path) -> None:
    if kind == "write" and path.name == "index.json":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failure_of_an_asynchronous_save_reaches_the_loop(tmp_path: Path, monkeypatch: Any) -> None:
    state = {"x": 4}
    first = async_save(state, tmp_path / "a").result()
    monkeypatch.setattr(disk, "watcher", full)
    words = r"index\.json cannot be written: No space left"
    for call in (save, async_save, load):  # whichever comes next
        under_way = async_save(state, tmp_path / "b")
        with pytest.raises(CheckpointError, match=words):
            call(state, first if call is load else tmp_path / "c")
    under_way = async_save(state, tmp_path / "b")
    with pytest.raises(CheckpointError, match=words):
        under_way.result()
    assert under_way.done()
    load(state, first)  # it was told
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    async_save(state, tmp_path / "b")
    with pytest.warns(UserWarning, match=words):
        saving._at_exit()


def test_progress(monkeypatch: Any, capsys: Any) -> None:
    """Progress is shown from two seconds on, on rank 0, on a terminal."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for shown in (True, False):
        with progress.Progress("saving step-2", 100 << 20, shown) as bar:
            for _ in range(4):
                now[0] += 0.9
                bar.advance(25 << 20)
        text = capsys.readouterr().err
        if shown:
            assert "saving step-2 [######################        ]  75% of 100 MiB, 28 MiB/s" in text
            assert text.count("\r") == 2 and text.endswith("\n")
        else:
            assert not text
