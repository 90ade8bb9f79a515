"""Damaged files at random: an error of this library that names a file, and nothing has changed; or the saved values."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.checkpoint import CheckpointError, RandomState, latest, load, load_pretrained, save, save_pretrained
from hyper_parallel.testing.extent import everything
from tests.support.damaged_files import damage

FORK = multiprocessing.get_context("fork")
#: Bytes that a process may allocate beyond those that it has, and seconds that a load may take.
ALLOWED, PATIENCE = 200 << 20, 10
#: How many damages of each kind of files.
COUNT = 2000 if everything() else 100
SEED = 1


class Job:
    """A model, an optimizer and the other contents of a checkpoint.

    Args:
        seed: of the values.
        step: whether the optimizer has stepped.
    """

    def __init__(self, seed: int, step: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, dtype=torch.bfloat16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * (seed + 1))
        self.step = seed
        if step:
            for p in self.model.parameters():
                p.grad = torch.randn_like(p)
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "random": RandomState(),
            "step": self.step,
            "nest": {"rate": 0.25 + self.step, "text": f"of {self.step}", "places": [1, (2, self.step)]},
        }

    def load(self, path: Path, verify: bool | None = None) -> list[Any]:
        """Load a checkpoint; returns all that came of it."""
        found = load(self.state(), path, verify=verify)
        return [*self.values(), found["step"], found["nest"], torch.rand(3)]

    def values(self) -> list[Any]:
        """All values in the memory of the program."""
        moments = [self.optimizer.state_dict()["state"], self.optimizer.state_dict()["param_groups"]]
        return [*(p.detach().clone() for p in self.model.parameters()), moments]


def same(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return isinstance(y, torch.Tensor) and x.dtype == y.dtype and torch.equal(x, y)
    if isinstance(x, dict):
        return isinstance(y, dict) and [*x] == [*y] and all(same(x[k], y[k]) for k in x)
    if isinstance(x, list | tuple):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    return bool(x == y)


def check_checkpoint(path: Path, wanted: list[Any], verify: bool | None) -> None:
    """`load` and `latest` of a damaged checkpoint."""
    job = Job(3)
    before, random_before = job.values(), torch.get_rng_state()
    try:
        found = job.load(path, verify)
    except (CheckpointError, ValueError) as error:
        assert str(path) in str(error), error
        assert same(job.values(), before), "some values have changed"
        assert torch.equal(torch.get_rng_state(), random_before), "the generator has changed"
    else:
        assert same(found, wanted), "other values were loaded"
    assert latest(path.parent) in (None, path)


def check_weights(path: Path, wanted: list[Any], verify: bool | None) -> None:
    """`load_pretrained` of damaged weights."""
    job = Job(3)
    before = job.values()
    try:
        load_pretrained(job.model, path, verify=verify)
    except (CheckpointError, ValueError) as error:
        assert str(path) in str(error), error
        assert same(job.values(), before), "some values have changed"
    else:
        # One file is all of a save: that of another one is whole too.
        loaded = job.values()[:4]
        assert any(same(loaded, of_save) for of_save in wanted), "other values were loaded"


def search(
    whole: Path,
    older: Path,
    place: Path,
    seeds: range,
    check: Callable[[Path, list[Any], bool | None], None],
    wanted: Any,
) -> list[str]:
    """Damage copies of a directory, each in its own way, and check how they load. The process that loads them may not
    take much."""
    told = FORK.SimpleQueue()

    def late(*_: Any) -> None:
        raise TimeoutError(f"no answer after {PATIENCE} seconds")

    def run() -> None:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + ALLOWED, now + ALLOWED))
        signal.signal(signal.SIGALRM, late)
        found = []
        for seed in seeds:
            path = place / str(seed) / "step-4"
            shutil.copytree(whole, path)
            done = damage(random.Random(seed), path, older)
            try:
                signal.alarm(PATIENCE)
                # Where two things happen, the first may take the checksums: `verify` says that they must be there.
                check(path, wanted, None if len(done) == 1 else True)
            except BaseException as error:
                frames = "".join(traceback.format_tb(error.__traceback__)[-2:])
                found.append(f"seed {seed}: {'; '.join(done)}: {type(error).__name__} {str(error)[:500]}\n{frames}")
            finally:
                signal.alarm(0)
            shutil.rmtree(path.parent)
        told.put(found)
        os._exit(0)

    process = FORK.Process(target=run)
    process.start()
    process.join(30 + len(seeds))
    if told.empty():
        process.kill()
        return [f"seeds {seeds}: the process ended with {process.exitcode}"]
    found: list[str] = told.get()
    return found


@pytest.mark.parametrize("kind", ["checkpoint", "weights in one file", "weights in several files"])
def test_damaged_files(tmp_path: Path, kind: str) -> None:
    whole, older = tmp_path / "whole", tmp_path / "older"
    first, second = Job(1, step=True), Job(2, step=True)
    if kind == "checkpoint":
        save(second.state(), older), save(first.state(), whole)
        wanted, check = Job(3).load(whole), check_checkpoint
    else:
        limit = "1GB" if "one" in kind else 64
        for job, path in ((first, whole), (second, older)):
            save_pretrained(job.model, path, max_shard_size=limit)
        wanted, check = [job.values()[:4] for job in (first, second)[: 2 if "one" in kind else 1]], check_weights
    count = COUNT if kind == "checkpoint" else COUNT // 2
    parts = [range(start, min(start + 100, SEED + count)) for start in range(SEED, SEED + count, 100)]
    problems = [
        problem for seeds in parts for problem in search(whole, older, tmp_path / "damaged", seeds, check, wanted)
    ]
    assert not problems, f"{len(problems)} of {count}:\n" + "\n".join(problems[:10])
