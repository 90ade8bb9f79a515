"""Progress in a terminal: the running parts of the gate, the progress of each, and the failures so far.

A part is a row of the table, such as the tests of one backend. `Reporter` prints a line every ten seconds, and the text
of a failure as soon as a test has failed. The other output of a part goes only to its log.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

__all__ = ["IN_FULL", "Part", "Reporter"]

#: Seconds between two lines of progress; on a busy machine it may be a few more.
EVERY = 10.0
#: Seconds between two reads of the events.
LOOK = 0.5
#: Number of failures of a part that are shown in full. A developer needs the first ones; the log has all.
IN_FULL = 10
#: Seconds after which the line of progress names the running test.
LONG = 30.0


class Tail:
    """Reader of the events that one process appends to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.collected: int | None = None
        #: The running test, and its start time.
        self.running: tuple[str, float] | None = None
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the events since the last call. An incomplete line is left for the next call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Part:
    """A running part: its log and its progress.

    Args:
        name: name of the part in the table.
        log: file for everything that the part prints.
        lock: lock that is held while something is printed to the terminal.
    """

    def __init__(self, name: str, log: TextIO, lock: threading.Lock | None = None) -> None:
        self.name = name
        self.log = log
        self._lock = lock or threading.Lock()
        self._looking = threading.Lock()
        self._state = "begins"
        self._tails: list[Tail] = []
        self._done = self._failed = 0
        self._shown = 0

    def say(self, text: str) -> None:
        """Print ``text`` to the terminal and to the log."""
        print(text, file=self.log, flush=True)
        self.show(text)

    def show(self, text: str) -> None:
        """Print ``text`` only to the terminal."""
        with self._lock:
            print(text, flush=True)

    def doing(self, state: str) -> None:
        """Show ``state`` in the line of progress, until `watch` or the next call."""
        self._state = state

    def watch(self, files: list[Path]) -> None:
        """Count in the line of progress the tests of processes that append their events to ``files``."""
        self._tails = [Tail(path) for path in files]
        self._done = self._failed = 0
        self._state = ""

    def look(self) -> None:
        """Read new events, and print failures."""
        with self._looking:
            for tail in self._tails:
                for event in tail.read():
                    self._take(tail, event)

    def _take(self, tail: Tail, event: dict[str, Any]) -> None:
        if "collected" in event:
            tail.collected = event["collected"]
        elif "started" in event:
            tail.running = event["started"], time.monotonic()
        elif "finished" in event:
            tail.running = None
            self._done += 1
            self._failed += event["outcome"] == "failed"
        else:
            self._failure(event["failed"], event["text"])

    def _failure(self, test: str, text: str) -> None:
        self._shown += 1
        if self._shown <= IN_FULL:
            self.show(f"\n== FAILED {self.name}: {test}\n{text}\n")
        else:
            self.show(f"== FAILED {self.name}: {test}")

    @property
    def progress(self) -> str:
        """Progress of the part in a few words."""
        if self._state:
            return f"{self.name} {self._state}"
        counts = [tail.collected for tail in self._tails if tail.collected is not None]
        if len(counts) < len(self._tails):
            # Some of several processes may already run.
            return f"{self.name} collecting" + (f", {self._done} done, {self._failed} failed" if self._done else "")
        words = f"{self.name} {self._done} of {sum(counts)}, {self._failed} failed"
        running = min((tail.running for tail in self._tails if tail.running), key=lambda one: one[1], default=None)
        if running and (seconds := time.monotonic() - running[1]) >= LONG:
            words += f", {seconds:.0f} s in {running[0]}"
        return words


class Reporter:
    """Printer of the progress of all running parts. A thread prints from the start of ``with`` to its end.

    Args:
        every: seconds between two lines.
    """

    def __init__(self, every: float = EVERY) -> None:
        #: Text of the line while no part runs.
        self.besides = "no part runs"
        self._waiting = 0
        self._every = every
        self._lock = threading.Lock()
        self._parts: list[Part] = []
        self._end = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.set()
        self._thread.join()

    def expect(self) -> None:
        """Count one more part that has not started."""
        self._waiting += 1

    @contextmanager
    def part(self, name: str, log: Path) -> Iterator[Part]:
        """Return a context in which a part counts as running.

        Args:
            name: name of the part.
            log: path of its log, which is overwritten.
        """
        with log.open("w", encoding="utf-8") as file:
            part = Part(name, file, self._lock)
            self._waiting = max(0, self._waiting - 1)
            self._parts.append(part)
            part.show(f"{name}: begins")
            try:
                yield part
            finally:
                self._parts.remove(part)
                part.look()

    def _run(self) -> None:
        next_line = time.monotonic() + self._every
        while not self._end.wait(LOOK):
            for part in list(self._parts):
                part.look()
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + self._every
                self._line()

    def _line(self) -> None:
        running = "; ".join(part.progress for part in list(self._parts)) or self.besides
        waiting = f" ({self._waiting} more to come)" if self._waiting else ""
        with self._lock:
            print(f"{time.monotonic() - self._started:.0f} s: {running}{waiting}", flush=True)
