"""`CheckpointError`."""

from __future__ import annotations

from hyper_parallel.platform.terminal import printable

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or an existing one is not whole: the message names the file and the entry.

    The same on all ranks. An error of the call itself is a ValueError or a TypeError. Control characters of names are
    written out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
