"""Weights that take the place of others: a save that is killed at any step leaves all old ones or all new ones."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.checkpoint import CheckpointError, disk, load_pretrained, new_weights, pretrained, save_pretrained
from hyper_parallel.checkpoint.weight_files import INDEX, WEIGHTS
from hyper_parallel.testing.extent import everything, in_gate
from tests.support.in_threads import failures_in_threads

FORK = multiprocessing.get_context("fork")
NAMES = ("a", "b", "c", "d")
#: How weights are divided: in one file, in four, in two.
LIMITS = (1 << 20, 40, 70)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((8,), value + i) for i, name in enumerate(NAMES)}


def value_of(directory: Path) -> float:
    """All weights are of one save: which."""
    found = weights(-1.0)
    load_pretrained(found, directory)
    values = {float(x[0]) - i for i, x in enumerate(found.values())}
    assert len(values) == 1, f"{directory.name}: old and new files together: {values}"
    assert all((x == x[0]).all() for x in found.values())
    return values.pop()


def value_for_others(directory: Path) -> float:
    """The same as Hugging Face's own reader finds them: the single file where there is one."""
    from safetensors.torch import load_file

    single = directory / WEIGHTS
    of_name = dict.fromkeys(NAMES, WEIGHTS)
    if not single.exists():
        of_name = json.loads((directory / INDEX).read_text())["weight_map"]
    values = {float(load_file(directory / of_name[name])[name][0]) - i for i, name in enumerate(NAMES)}
    assert len(values) == 1, f"{directory.name}: old and new files together: {values}"
    return values.pop()


def killed(directory: Path, value: float, limit: int, number: int, *kinds: str) -> bool:
    """Save in a process that is killed before its step of that number; returns whether it came so far.

    Args:
        directory: of the weights.
        value: that is saved.
        limit: how it is divided.
        number: of the step.
        kinds: of steps that count; none is all.
    """

    def run() -> None:
        count = 0

        def watch(kind: str, path: Path) -> None:
            nonlocal count
            count += not kinds or kind in kinds
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        disk.watcher = watch
        save_pretrained(weights(value), directory, max_shard_size=limit)
        os._exit(0)

    process = FORK.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.parametrize("divided", in_gate([(a, b) for a in LIMITS for b in LIMITS], [(40, 40), (1 << 20, 40)]))
def test_killed_at_every_step(tmp_path: Path, divided: tuple[int, int]) -> None:
    """The save after it is killed too, and finds the files of the first one."""
    old, new = divided
    seen, kinds = set(), () if everything() else ("rename", "remove")
    number = 1
    while True:
        directory = tmp_path / str(number)
        save_pretrained(weights(100.0), directory, max_shard_size=old)
        came = killed(directory, 200.0, new, number, *kinds)
        seen.add(value_of(directory))
        assert value_of(directory) in (100.0, 200.0) and value_for_others(directory) in (100.0, 200.0)
        if not came:
            break
        number += 1
        if number % 4 and not everything():
            continue
        if everything():
            killed(directory, 300.0, old, 7 + number % 5)
            assert value_of(directory) in (100.0, 200.0, 300.0)
            value_for_others(directory)
        save_pretrained(weights(400.0), directory, max_shard_size=new)
        assert value_of(directory) == value_for_others(directory) == 400.0
        assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]
    assert seen == {100.0, 200.0} and number > 4
    names = {path.name for path in directory.iterdir()}
    assert names == ({WEIGHTS} if new == LIMITS[0] else {INDEX, *(f"model-{i + 1:05d}-of-{n:05d}.safetensors"
                     for n in (4 if new == 40 else 2,) for i in range(n))})  # fmt: skip


@pytest.mark.nightly
def test_a_hundred_kills(tmp_path: Path) -> None:
    """A hundred kills, one after the other in one directory, at random steps and divisions."""
    draw, value, possible = random.Random(1), 0.0, {0.0}
    save_pretrained(weights(value), tmp_path, max_shard_size=40)
    for number in range(1, 101):
        came = killed(tmp_path, float(10 * number), draw.choice(LIMITS), draw.randint(1, 40))
        possible = possible | {float(10 * number)} if came else {float(10 * number)}
        value = value_of(tmp_path)
        assert value in possible
        value_for_others(tmp_path)
        possible = {value, value_for_others(tmp_path)}


def test_without_second_names(tmp_path: Path, monkeypatch: Any) -> None:
    """A file system without hard links has no file for a moment, and never a mixture."""
    save_pretrained(weights(1.0), tmp_path, max_shard_size=40)
    found: list[Any] = []

    def refuse(old: Path, new: Path) -> None:
        raise PermissionError

    def watch(kind: str, path: Path) -> None:
        if kind == "barrier":  # of the loads too
            return
        try:
            found.append(value_of(tmp_path))
        except CheckpointError as error:
            found.append("neither" if "neither" in str(error) else str(error))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(disk, "watcher", watch)
    save_pretrained(weights(2.0), tmp_path, max_shard_size=40)
    assert [*dict.fromkeys(found)] == [1.0, "neither", 2.0]


def test_two_save_at_once(tmp_path: Path) -> None:
    """Threads of a process: each save is whole, and nothing is left."""

    def run(value: float) -> None:
        for i in range(8):
            save_pretrained(weights(value + i), tmp_path, max_shard_size=40)
            value_of(tmp_path)

    assert not failures_in_threads(run, (100.0, 200.0), 60)
    assert value_of(tmp_path) in (107.0, 207.0)
    assert {path.name for path in tmp_path.iterdir()} == {
        INDEX,
        *(f"model-{i}-of-00004.safetensors" for i in ("00001", "00002", "00003", "00004")),
    }


def at(monkeypatch: Any, kind: str, action: Callable[[], Any], name: str) -> None:
    """Do something before the first step of that kind on a file whose name begins so."""
    done: list[str] = []

    def watch(now: str, path: Path) -> None:
        if now == kind and path.name.startswith(name) and not done:
            done.append(now)
            action()

    monkeypatch.setattr(disk, "watcher", watch)


def test_refusals(tmp_path: Path, monkeypatch: Any) -> None:
    save_pretrained(weights(1.0), tmp_path, max_shard_size=40)
    before = {path.name for path in tmp_path.iterdir()}
    at(monkeypatch, "sync", lambda: next(tmp_path.glob(".model-00001*")).unlink(), ".model.safetensors.index")
    with pytest.raises(CheckpointError, match=r"was not saved: .*\.incomplete was removed or changed"):
        save_pretrained(weights(2.0), tmp_path, max_shard_size=70)
    monkeypatch.setattr(disk, "watcher", None)
    monkeypatch.setattr(disk, "_PATIENCE", 0.05)
    with (
        disk.alone_in(tmp_path),
        pytest.raises(CheckpointError, match="was not saved: another program has been renaming files"),
    ):
        save_pretrained(weights(2.0), tmp_path, max_shard_size=40)
    assert {path.name for path in tmp_path.iterdir()} == before and value_of(tmp_path) == 1.0


def test_weights_that_are_replaced_while_they_are_opened(tmp_path: Path, monkeypatch: Any) -> None:
    """A load takes those of one index, and does not try for ever."""
    original, values = pretrained.TensorFile, iter([2.0, 3.0])

    def replace(path: Path) -> Any:
        if path.name.endswith("00002-of-00004.safetensors") and (value := next(values, None)) is not None:
            save_pretrained(weights(value), tmp_path, max_shard_size=40)
        return original(path)

    save_pretrained(weights(1.0), tmp_path, max_shard_size=40)
    monkeypatch.setattr(pretrained, "TensorFile", replace)
    assert value_of(tmp_path) == 3.0
    values = iter([float(i) for i in range(10)])
    with pytest.raises(CheckpointError, match="was replaced 5 times while it was being opened"):
        value_of(tmp_path)


def test_an_index_that_nobody_can_read_is_replaced(tmp_path: Path) -> None:
    save_pretrained(weights(1.0), tmp_path, max_shard_size=40)
    (tmp_path / INDEX).write_text('{"weight_map": 3}')
    save_pretrained(weights(2.0), tmp_path, max_shard_size=40)
    assert value_of(tmp_path) == 2.0
    assert new_weights.NewWeights(tmp_path, {}, False).token == ""
