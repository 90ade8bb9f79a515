"""`CheckpointError`."""

from __future__ import annotations

from hyper_parallel.platform.terminal import printable

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """Error for a checkpoint that could not be written, or is damaged or incomplete. The message names the file and the
    entry, and is the same on all ranks. An error of the call itself is a ValueError or a TypeError. Control characters
    of names are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
