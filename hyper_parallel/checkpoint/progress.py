"""A progress bar on rank 0 for work that takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from hyper_parallel.platform.terminal import printable

__all__ = ["Progress"]

#: Seconds before the bar appears, and seconds between two updates.
_AFTER, _EVERY = 2.0, 0.1
_WIDTH = 30


class Progress:
    """Counter of bytes that shows a bar if the error stream is a terminal. It is a context manager.

    Args:
        what: title of the bar.
        total: total number of bytes.
        shown: whether this process shows the bar, as rank 0 does.
    """

    def __init__(self, what: str, total: int, shown: bool) -> None:
        self._what, self._total = printable(what), total
        self._shown = shown and sys.stderr.isatty()
        self._began = time.monotonic()
        self._next, self._done, self._drawn = self._began + _AFTER, 0, False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._drawn:
            sys.stderr.write("\n")
            sys.stderr.flush()

    def advance(self, nbytes: int) -> None:
        """Count bytes that were read or written."""
        self._done += nbytes
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next, self._drawn = now + _EVERY, True
        share, speed = min(1.0, self._done / max(self._total, 1)), self._done / (now - self._began)
        bar = "#" * int(share * _WIDTH)
        left = (self._total - self._done) / max(speed, 1.0)
        sys.stderr.write(
            f"\r{self._what} [{bar:<{_WIDTH}}] {share:4.0%} of {self._total / 2**20:.0f} MiB, "
            f"{speed / 2**20:.0f} MiB/s, {max(left, 0.0):.0f} s left "
        )
        sys.stderr.flush()
