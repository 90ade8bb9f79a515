"""`RecordError`."""

from __future__ import annotations

from hyper_parallel.platform.terminal import printable

__all__ = ["RecordError"]


class RecordError(RuntimeError):
    """A record is not there, or is not whole. The message names the file. Control characters of names are written
    out."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
