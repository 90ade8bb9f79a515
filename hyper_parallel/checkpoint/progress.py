"""A bar on rank 0 for what takes longer than two seconds."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from types import TracebackType
from typing import Any

__all__ = ["Progress"]

#: Seconds after which it is shown.
_AFTER = 2.0


class Progress:
    """Counts bytes; shows a bar where the error stream is a terminal and ``rich`` is installed.

    Args:
        what: it is about.
        total: bytes.
        shown: whether this process shows it: rank 0.
    """

    def __init__(self, what: str, total: int, shown: bool) -> None:
        self._what, self._total = what, total
        self._shown = shown and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
        self._began, self._done = time.monotonic(), 0
        self._bar: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done += nbytes
            if not self._shown or time.monotonic() - self._began < _AFTER:
                return
            if self._bar is None:
                self._bar = _bar()
                self._task = self._bar.add_task(self._what, total=self._total)
                self._bar.start()
            self._bar.update(self._task, completed=self._done)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
