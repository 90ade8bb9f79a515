"""Everything that a save does to the disk, a function each: a crash may come between any two."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np

from hyper_parallel.checkpoint.errors import CheckpointError

__all__ = [
    "ALIGNMENT",
    "BLOCK",
    "NewFile",
    "address_of",
    "alone_in",
    "make_directory",
    "memory_for",
    "read_at",
    "open_file",
    "read_file",
    "read_text",
    "reading",
    "remove_tree",
    "rename",
    "stamp",
    "step",
    "sync_directory",
]

#: Called before each step with its kind ("make", "open", "write", "sync", "rename", "remove", "barrier") and the file
#: or directory. None outside of tests, which let a rank die there, or the disk be full.
watcher: Callable[[str, Path], None] | None = None


def step(kind: str, path: Path) -> None:
    """The next step is about to be done."""
    if watcher is not None:
        watcher(kind, path)


def make_directory(path: Path) -> None:
    """Make a missing directory, with those above it. All these names are on the disk when it returns."""
    if not path.parent.is_dir():
        make_directory(path.parent)
    step("make", path)
    path.mkdir(exist_ok=not path.name.startswith("."))  # those above may be made by another program meanwhile
    sync_directory(path.parent)


#: Bytes of a file from which on it is written past the cache of the system, where that can be done.
DIRECT_FROM = 32 << 20
#: Bytes that are read or written by one call. A system reads ahead of calls of this size, and not of much larger ones.
BLOCK = 8 << 20
#: Bytes that a processor copies at once.
_LINE = 64
#: Blocks, and their places in memory and in the file, must be multiples of this.
ALIGNMENT = 4096


def address_of(data: memoryview) -> int:
    """Return the address of the first byte in memory."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)


@functools.cache
def _fallocate() -> Callable[..., int] | None:
    """Linux' own; `os.posix_fallocate` writes into every block where a file system cannot do it."""
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate64
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return cast("Callable[..., int]", found)


def reserve(file: int, size: int) -> None:
    """Have the system choose the place of a file's bytes at once: in few pieces, and not while they are written.

    Args:
        file: descriptor of a file that is open for writing.
        size: bytes that it will have. Where its file system has no such call, nothing happens.

    Raises:
        OSError: when there is no room for them.
    """
    fallocate = _fallocate()
    if fallocate is not None and fallocate(file, 0, 0, size) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class NewFile:
    """A file that is not there yet: a context manager, at the end of which its bytes are on the disk.

    Args:
        path: of the file.
        size: bytes that will be written, where that is known. A large file gets its space at once. It is written past
            the cache of the system, which would only add a copy.

    Raises:
        CheckpointError: when it cannot be written; names the file.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self._path, self._size = path, size
        self._block: mmap.mmap | None = None
        self._filled = 0

    def __enter__(self) -> NewFile:
        try:
            step("open", self._path)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            raise self._failure(error) from error
        if self._size >= DIRECT_FROM:
            self._reserve()
            if self._set_direct(True):
                self._block = mmap.mmap(-1, BLOCK)
        return self

    def _reserve(self) -> None:
        step("write", self._path)
        try:
            reserve(self._file, self._size)
        except OSError as error:
            os.close(self._file)
            raise self._failure(error) from error

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        left = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if self._block is None:
            self._put(left)
            return
        with memoryview(self._block) as block:
            if len(left) >= BLOCK and (address_of(left) - self._filled) % ALIGNMENT == 0:
                # It lies in memory as it will in the file: written from there.
                head = -self._filled % ALIGNMENT
                block[self._filled : self._filled + head] = left[:head]
                self._put(block[: self._filled + head])
                end = len(left) - (len(left) - head) % ALIGNMENT
                for start in range(head, end, BLOCK):
                    self._put(left[start : min(start + BLOCK, end)])
                self._filled, left = 0, left[end:]
            while left:
                count = min(len(left), BLOCK - self._filled)
                block[self._filled : self._filled + count] = left[:count]
                self._filled, left = self._filled + count, left[count:]
                if self._filled == BLOCK:
                    self._put(block)
                    self._filled = 0

    def _put(self, left: memoryview) -> None:
        while left:
            step("write", self._path)
            try:
                count = os.write(self._file, left)
            except OSError as error:
                # A file system that takes the flag, and then no such write.
                if error.errno != errno.EINVAL or self._block is None or not self._set_direct(False):
                    raise
                continue
            if count % ALIGNMENT and self._block is not None:
                self._set_direct(False)  # the rest does not begin at an aligned place
            left = left[count:]

    def _set_direct(self, on: bool) -> bool:
        """Switch writing past the system's cache on or off; return whether that changed anything."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return False
        import fcntl  # where there is such a flag, there is this

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        if bool(flags & flag) is on:
            return False
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags ^ flag)
        except OSError:
            return False
        return True

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                if self._filled:
                    assert self._block is not None
                    self._set_direct(False)
                    with memoryview(self._block) as block:
                        self._put(block[: self._filled])
                step("sync", self._path)
                os.fsync(self._file)
        except OSError as failed:
            error = failed
        os.close(self._file)
        if isinstance(error, OSError):
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be written: {error.strerror or error}")


def rename(old: Path, new: Path) -> None:
    """Give a directory or a file, which is whole, its name. No other one may have that name already."""
    step("rename", old)
    if new.exists():
        raise FileExistsError(f"{new} is there already")
    os.rename(old, new)


def stamp(path: Path) -> tuple[int, int] | None:
    """Return a key that tells a file or directory from another one in its place; None where there is nothing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def open_file(path: Path) -> int:
    """Open a regular file for reading, without waiting for a writer, as a pipe would; returns the descriptor.

    Raises:
        OSError: where there is none.
    """
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    kind = os.fstat(opened).st_mode
    if not stat.S_ISREG(kind):
        os.close(opened)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, os.strerror(code) if stat.S_ISDIR(kind) else "it is no regular file")
    return opened


def read_at(path: Path, file: int, start: int, memory: memoryview, entry: str) -> None:
    """Fill memory with bytes of a file.

    Args:
        path: of the file, for messages.
        file: its descriptor.
        start: where in the file.
        memory: the memory to fill.
        entry: that is read, for messages.

    Raises:
        CheckpointError: when the file ends before, or the disk does not give them.
    """
    try:
        while memory:
            count = os.preadv(file, [memory[:BLOCK]], start)
            if not count:
                raise CheckpointError(f"{path} has become shorter while it was read: it ends in entry {entry!r}")
            memory, start = memory[count:], start + count
    except OSError as error:
        raise _unreadable(path, entry, error) from error


@contextmanager
def reading(path: Path, entry: str) -> Iterator[None]:
    """Turn errors of the system into those of the library.

    Args:
        path: of the file that is read, for messages.
        entry: that is read, for messages.

    Raises:
        CheckpointError: when the disk does not give the data that is read inside.
    """
    try:
        yield
    except OSError as error:
        raise _unreadable(path, entry, error) from error


def _unreadable(path: Path, entry: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}, in entry {entry!r}")


def memory_for(start: int, nbytes: int) -> memoryview:
    """Return new memory for bytes of a file, of which the first is ``start``: its address is equal to it modulo 64.

    Memory that begins a few bytes later in its own page takes up to three times as long to fill. This
    was measured on 2026-11-29 at 7c6fead4.
    """
    memory = np.empty(nbytes + _LINE, np.uint8)
    skipped = (start - memory.ctypes.data) % _LINE
    return memory[skipped : skipped + nbytes].data


def read_text(file: FileIO, size: int) -> bytes:
    """Return the next bytes of a file in which text is expected.

    Of one that begins with a zero it is that alone: a file with a hole may be larger than the disk, and so than memory.

    Args:
        file: open for reading.
        size: how many bytes.
    """
    text = file.read(min(size, 1))
    while len(text) < size and text[:1] != b"\0" and (more := file.read(size - len(text))):
        text += more
    return text


def read_file(path: Path) -> bytes:
    """Return the text that is in a regular file, as `read_text` does.

    Raises:
        OSError: where there is none, or it cannot be read.
    """
    with FileIO(open_file(path), "rb") as file:
        return read_text(file, os.fstat(file.fileno()).st_size)


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk."""
    step("sync", path)
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, or a file, as far as possible."""
    step("remove", path)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


#: Seconds to wait for a program that gives names in a directory, which takes milliseconds where it is well.
_PATIENCE = 5.0


@contextmanager
def alone_in(directory: Path) -> Iterator[bool]:
    """Keep out the other threads and processes that call this for the same directory.

    It is no promise: other machines need not see the lock. There is no endless wait: False is given where another one
    keeps it.
    """
    try:
        import fcntl
    except ImportError:  # not on this system
        yield True
        return
    opened = os.open(directory, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        until, alone = time.monotonic() + _PATIENCE, False
        while not alone and time.monotonic() < until:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:  # a file system without locks
                alone = True
        yield alone
    finally:
        # A child that was forked meanwhile has the file open too: closing it here would not give the lock back.
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)
