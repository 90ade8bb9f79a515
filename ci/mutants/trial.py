"""Running tests with a mutation, in a copy of the project, so that the working tree stays as it is."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ci.mutants.mutations import Mutation
from ci.mutants.reach import BUILD, Reach, environment

#: The parts of the project that the tests need: all that is not made by building or running it.
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache", ".coverage*", "*.egg-info")
#: A test hangs when it takes longer than this, or than so many times its duration in the map.
HANG_SECONDS, HANG_TIMES = 15.0, 5.0
#: In addition to its tests, a run may take this long: to import, to collect, to start workers, which the first test
#: waits for.
AROUND = 40.0


@dataclass
class Outcome:
    """The outcome of a run of tests.

    Attributes:
        verdict: "passed", "failed", "hung" or "broken", when no test could run.
        test: the one that failed or hung.
        passed: those that passed.
        log: the end of pytest's output.
    """

    verdict: str
    test: str = ""
    passed: list[str] = field(default_factory=list)
    log: str = ""


class Place:
    """A copy of the project with a server that runs tests in it. The amounts are those of the gate or of the
    ``night``."""

    def __init__(
        self, root: Path, backend: str, number: int, night: bool = False, python: str = sys.executable
    ) -> None:
        self.backend, self.night, self.python = backend, night, python
        self.folder = root / BUILD / "places" / f"{backend}-{number}"
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(root, self.folder, ignore=NOT_COPIED)
        self._server: subprocess.Popen | None = None

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server and remove the copy."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def mutate(self, mutation: Mutation | None, undo: Mutation | None = None) -> None:
        """Put a mutation into the copy, after taking another one back."""
        for change, back in ((undo, True), (mutation, False)):
            if change is not None:
                self._write(change, back)

    def _write(self, mutation: Mutation, back: bool) -> None:
        path = self.folder / mutation.path
        kept = path.with_suffix(".unmutated")
        if back:
            kept.replace(path)
        else:
            source = path.read_text(encoding="utf-8")
            kept.write_text(source, encoding="utf-8")
            path.write_text(mutation.apply(source), encoding="utf-8")
        # Compiled files are told apart by whole seconds and size, which both may be equal.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(self, tests: list[str], reach: Reach, deadline: float, failures: int = 1) -> Outcome:
        """Run tests until one hangs or so many fail, or until ``deadline`` (`time.monotonic`), which counts as
        passed."""
        listed, log, events = (self.folder / name for name in ("tests.txt", "log.txt", "events.txt"))
        listed.write_text("\n".join(tests))
        events.write_text("")
        server = self._started()
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps([str(listed), str(log), str(events), failures]), file=server.stdin, flush=True)
        child = int(server.stdout.readline())
        began, seen, overtime = time.monotonic(), 0, False
        limit = AROUND
        hung = ""
        while not select.select([server.stdout], [], [], 0.2)[0]:
            entries = _entries(events)
            if len(entries) != seen:
                seen, began = len(entries), time.monotonic()
                kind, test = entries[-1][:2]
                limit = max(HANG_SECONDS, HANG_TIMES * reach.seconds.get(test, 0.0))
                if kind == "ends" or seen == 1:
                    limit += AROUND
            # A test that hangs is left to its own limit.
            overtime = time.monotonic() > deadline and not (entries and entries[-1][0] == "begins")
            if time.monotonic() - began > limit * _load() or overtime:
                hung = entries[-1][1] if entries and not overtime else ""
                os.killpg(child, signal.SIGKILL)
                break
        status = int(server.stdout.readline())
        entries = _entries(events)
        passed = [entry[1] for entry in entries if entry[0] == "ends" and entry[2]]
        failed = [entry[1] for entry in entries if entry[0] == "ends" and not entry[2]]
        text = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        if failed:
            return Outcome("failed", failed[0], passed, text)
        if hung:
            return Outcome("hung", hung, passed, text)
        if overtime:
            return Outcome("passed", "", passed, text)
        if status == 0 and passed:
            return Outcome("passed", "", passed, text)
        if entries and entries[-1][0] == "begins":  # the process died in it
            return Outcome("failed", entries[-1][1], passed, text)
        return Outcome("broken", "", passed, text)

    def _started(self) -> subprocess.Popen:
        if self._server is None or self._server.poll() is not None:
            command = [self.python, "-m", "ci.mutants.server", self.backend.split("-")[0]]
            variables = environment(self.folder, self.backend, self.night) | {"GLOG_v": "3"}
            self._server = subprocess.Popen(
                command,
                cwd=self.folder,
                env=variables,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert self._server.stdout is not None
            if self._server.stdout.readline().strip() != "ready":
                raise RuntimeError(f"{' '.join(command)} did not start")
        return self._server


def _load() -> float:
    """The factor by which everything may take longer now than on an idle machine."""
    return max(1.0, os.getloadavg()[0] / 2 / (os.cpu_count() or 1))


def _entries(events: Path) -> list[list]:
    """The events that the child has written so far; the last line may be unfinished."""
    whole = events.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
