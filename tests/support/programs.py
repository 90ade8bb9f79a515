"""Programs in processes of their own, one for each rank, started as a launcher does; and those of the documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from hyper_parallel.testing.pool import free_port

__all__ = ["PATIENCE", "ROOT", "Ended", "program_of", "run_each", "run_on_two", "run_ranks"]

ROOT = Path(__file__).resolve().parents[2]
#: Seconds until a process counts as hanging: more than it takes on the busiest machine. No test waits for them.
PATIENCE = 900.0
#: Variables that launchers set for a rank.
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MS_ROLE", "MS_WORKER_NUM", "RANK_ID")


class Ended(NamedTuple):
    """The status of a process that has ended, and its output."""

    status: int
    out: str
    err: str


def run_ranks(
    arguments: Sequence[object],
    size: int,
    *,
    address: str = "127.0.0.1",
    cwd: Path | None = None,
    kill: int | None = None,
    **variables: str,
) -> list[Ended]:
    """Run Python with these arguments on each rank, under torchrun's variables, until all have ended.

    Args:
        arguments: a script and its arguments, or ``-c`` and a program.
        size: how many ranks there are.
        address: at which they meet.
        cwd: the folder in which they run.
        kill: a rank that may never end, and is killed when the others have ended.
        variables: further ones of the environment.
    """
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(free_port()), **variables}
    ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return run_each(arguments, ranks, cwd, kill)


def run_each(
    arguments: Sequence[object], variables: Sequence[dict[str, str]], cwd: Path | None = None, kill: int | None = None
) -> list[Ended]:
    """The same with ``variables`` for each process, and none of a launcher that are not among them."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *map(str, arguments)]
    with ExitStack() as stack:
        # Not pipes: a rank whose pipe is full would keep those waiting that are read first.
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in variables]
        processes = [
            subprocess.Popen(command, env={**kept, **own}, cwd=cwd, stdout=out, stderr=err)
            for own, (out, err) in zip(variables, files, strict=True)
        ]
        try:
            for rank, process in enumerate(processes):
                if rank != kill:
                    process.wait(PATIENCE)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for file in (file for pair in files for file in pair):
            file.seek(0)
        return [
            Ended(process.returncode, out.read(), err.read())
            for process, (out, err) in zip(processes, files, strict=True)
        ]


def program_of(page: Path, name: str) -> str:
    """The Python block of a page whose first line is ``# name``."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name}\n"))


def run_on_two(script: Path, address: str = "127.0.0.1") -> list[str]:
    """The output of each of two ranks; they must end well."""
    ended = run_ranks([script], 2, address=address)
    assert [rank.status for rank in ended] == [0, 0], ended
    return [rank.out for rank in ended]
