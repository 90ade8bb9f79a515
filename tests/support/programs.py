"""Programs in processes of their own, one for each rank, started as a launcher does; and those of the documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel.testing.pool import free_port
from tests.support.prepared import start

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
    anew: bool = False,
    **variables: str,
) -> list[Ended]:
    """Run Python with these arguments on each rank, under torchrun's variables, until all have ended.

    Args:
        arguments: a script and its arguments, or ``-c`` and a program.
        size: how many ranks there are.
        address: at which they meet.
        cwd: the folder in which they run.
        kill: a rank that may never end, and is killed when the others have ended.
        anew: start interpreters for them, which takes seconds more. Needed where the interpreter's end counts, or what
            is read when the framework is imported.
        variables: further ones of the environment.
    """
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(free_port()), **variables}
    ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return run_each(arguments, ranks, cwd, kill, anew)


def run_each(
    arguments: Sequence[object],
    variables: Sequence[dict[str, str]],
    cwd: Path | None = None,
    kill: int | None = None,
    anew: bool = False,
) -> list[Ended]:
    """The same with ``variables`` for each process, and none of a launcher that are not among them."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [*map(str, arguments)]
    processes: list[Any] = []
    # Files, not pipes: a rank whose pipe is full would keep those waiting that are read first.
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(len(variables))]
        begin = _interpreter if anew else start
        try:
            for own, (output, errors) in zip(variables, files, strict=True):
                processes.append(begin(command, {**kept, **own}, cwd, output, errors))
            for rank, process in enumerate(processes):
                if rank != kill:
                    process.join(PATIENCE)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            Ended(process.exitcode, output.read_text(), errors.read_text())
            for process, (output, errors) in zip(processes, files, strict=True)
        ]


class _Interpreter:
    """A process of an interpreter of its own, with the methods of those of `multiprocessing`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.kill = process.kill

    def join(self, seconds: float | None = None) -> None:
        self._process.wait(seconds)

    @property
    def exitcode(self) -> int:
        return self._process.returncode


def _interpreter(
    arguments: Sequence[str], environment: dict[str, str], cwd: Path | None, output: Path, errors: Path
) -> _Interpreter:
    """Start a program as `prepared.start` does, in an interpreter of its own."""
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen([sys.executable, *arguments], env=environment, cwd=cwd, stdout=out, stderr=err)
    return _Interpreter(process)


def program_of(page: Path, name: str) -> str:
    """The Python block of a page whose first line is ``# name``."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name}\n"))


def run_on_two(script: Path, address: str = "127.0.0.1", anew: bool = False) -> list[str]:
    """The output of each of two ranks; they must end well. ``anew`` as for `run_ranks`."""
    ended = run_ranks([script], 2, address=address, anew=anew)
    assert [rank.status for rank in ended] == [0, 0], ended
    return [rank.out for rank in ended]
