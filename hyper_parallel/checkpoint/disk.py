"""Everything that a save does to the disk, a function each: what a crash may come between."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

__all__ = ["create", "finish", "make_directory", "remove_file", "remove_tree", "rename", "sync_directory", "write"]

#: Buffers that one call of the system takes.
_AT_ONCE = 512


def make_directory(path: Path) -> None:
    """Make a directory that is not there yet, in one that is."""
    path.mkdir()


def create(path: Path) -> int:
    """Open a file that is not there yet; the descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)


def write(file: int, buffers: Iterable[memoryview]) -> None:
    """Append bytes."""
    waiting = [b.cast("B") for b in buffers if b.nbytes]
    while waiting:
        written = os.writev(file, waiting[:_AT_ONCE])
        while waiting and written >= waiting[0].nbytes:
            written -= waiting.pop(0).nbytes
        if written:
            waiting[0] = waiting[0][written:]


def finish(file: int) -> None:
    """Have the bytes of a file on the disk, and close it."""
    try:
        os.fsync(file)
    finally:
        os.close(file)


def rename(old: Path, new: Path) -> None:
    """Give a directory or a file, which is whole, its name. What has that name already must not be there."""
    if new.exists():
        raise FileExistsError(f"{new} is there already")
    os.rename(old, new)


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there."""
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, as far as possible."""
    shutil.rmtree(path, ignore_errors=True)
