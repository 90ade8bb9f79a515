"""A progress bar of one line, on terminals only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

WIDTH = 30


class Progress:
    """Iterate over ``range(total)`` and show how far it is and how long the rest will take."""

    def __init__(self, total: int, what: str, show: bool = True) -> None:
        self.total = total
        self.what = what
        self.note = ""
        self._show = show and sys.stderr.isatty()

    def __iter__(self) -> Iterator[int]:
        start = time.perf_counter()
        for done in range(self.total):
            yield done
            rest = (time.perf_counter() - start) / (done + 1) * (self.total - done - 1)
            bar = "#" * (WIDTH * (done + 1) // self.total)
            self._draw(f"{self.what} [{bar:<{WIDTH}}] {done + 1}/{self.total}  {rest:.0f} s left  {self.note}")
        self._draw("")

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._draw("")
        print(line, flush=True)

    def _draw(self, text: str) -> None:
        if self._show:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
