"""`RecordError`."""

from __future__ import annotations

from hyper_parallel.platform.terminal import printable

__all__ = ["RecordError"]


class RecordError(RuntimeError):
    """Error for a record that is missing or incomplete. The message names the file. Control characters of names are
    escaped."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
