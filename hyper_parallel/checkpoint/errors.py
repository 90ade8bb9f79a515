"""`CheckpointError`."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or what is there is not whole: the message names the file and the entry.

    The same on all ranks. What is wrong with the call itself is a ValueError or a TypeError.
    """
