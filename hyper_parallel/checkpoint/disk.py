"""All operations of a save on the disk, one function each. Tests simulate crashes between any two of them."""

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

#: Function that is called before each step with its kind ("make", "open", "write", "sync", "rename", "remove",
#: "barrier") and the file or directory. None except in tests, which simulate a dying rank or a full disk.
watcher: Callable[[str, Path], None] | None = None


def step(kind: str, path: Path) -> None:
    """Notify `watcher` that a step is about to start."""
    if watcher is not None:
        watcher(kind, path)


def make_directory(path: Path) -> None:
    """Create a missing directory and its missing parents, and wait until their names are on disk."""
    if not path.parent.is_dir():
        make_directory(path.parent)
    step("make", path)
    path.mkdir(exist_ok=not path.name.startswith("."))  # another program may create the parents meanwhile
    sync_directory(path.parent)


#: Minimum bytes of a file that is written past the cache of the system, if that is supported.
DIRECT_FROM = 32 << 20
#: Bytes that are read or written by one call. A system reads ahead for calls of this size, but not for much larger
#: ones.
BLOCK = 8 << 20
#: Bytes that a processor copies at a time.
_LINE = 64
#: Blocks, and their places in memory and in the file, must be multiples of this.
ALIGNMENT = 4096


def address_of(data: memoryview) -> int:
    """Return the address of the first byte in memory."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)


@functools.cache
def _fallocate() -> Callable[..., int] | None:
    """Return Linux's ``fallocate``, or None.

    `os.posix_fallocate` is no replacement: on file systems without support, that function writes into every block.
    """
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate64
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return cast("Callable[..., int]", found)


def reserve(file: int, size: int) -> None:
    """Ask the system to allocate the blocks of a file before its bytes are written.

    The file then consists of few pieces.

    Args:
        file: descriptor of a file that is open for writing.
        size: bytes that the file will have. If its file system has no such call, nothing happens.

    Raises:
        OSError: if the disk has too little space.
    """
    fallocate = _fallocate()
    if fallocate is not None and fallocate(file, 0, 0, size) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class NewFile:
    """A new file, as a context manager. At the end of the block its bytes are on disk.

    Args:
        path: path of the file.
        size: bytes that will be written, if known. Space for a large file is allocated at once. A large file is written
            past the cache of the system, which would only add a copy.

    Raises:
        CheckpointError: if the file cannot be written. The message names the file.
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
                # The data has the same alignment in memory as in the file, so it is written without a copy.
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
                # The file system accepts the flag, but then rejects such a write.
                if error.errno != errno.EINVAL or self._block is None or not self._set_direct(False):
                    raise
                continue
            if count % ALIGNMENT and self._block is not None:
                self._set_direct(False)  # the rest does not start at an aligned place
            left = left[count:]

    def _set_direct(self, on: bool) -> bool:
        """Switch writing past the system's cache on or off; return whether that changed anything."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return False
        import fcntl  # exists wherever the flag exists

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
    """Rename a complete file or directory to its final name, which must be free."""
    step("rename", old)
    if new.exists():
        raise FileExistsError(f"{new} exists already")
    os.rename(old, new)


def stamp(path: Path) -> tuple[int, int] | None:
    """Return a key that changes when another file or directory replaces the one at ``path``; None if nothing exists
    there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def open_file(path: Path) -> int:
    """Open a regular file for reading; return the descriptor. It does not block on a pipe without a writer.

    Raises:
        OSError: if there is no regular file.
    """
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    kind = os.fstat(opened).st_mode
    if not stat.S_ISREG(kind):
        os.close(opened)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, os.strerror(code) if stat.S_ISDIR(kind) else "it is not a regular file")
    return opened


def read_at(path: Path, file: int, start: int, memory: memoryview, entry: str) -> None:
    """Fill memory with bytes of a file.

    Args:
        path: path of the file, for messages.
        file: descriptor of the file.
        start: offset in the file.
        memory: the memory to fill.
        entry: name of the entry, for messages.

    Raises:
        CheckpointError: if the file ends too early, or cannot be read.
    """
    try:
        while memory:
            count = os.preadv(file, [memory[:BLOCK]], start)
            if not count:
                raise CheckpointError(
                    f"{path} became shorter while it was being read: it now ends inside entry {entry!r}"
                )
            memory, start = memory[count:], start + count
    except OSError as error:
        raise _unreadable(path, entry, error) from error


@contextmanager
def reading(path: Path, entry: str) -> Iterator[None]:
    """Context manager that converts errors of the system inside it into CheckpointError.

    Args:
        path: path of the file, for messages.
        entry: name of the entry, for messages.

    Raises:
        CheckpointError: if data cannot be read inside the block.
    """
    try:
        yield
    except OSError as error:
        raise _unreadable(path, entry, error) from error


def _unreadable(path: Path, entry: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}, in entry {entry!r}")


def memory_for(start: int, nbytes: int) -> memoryview:
    """Return new memory for bytes of a file from offset ``start``. The address of the memory equals ``start`` modulo
    64.

    Memory that starts a few bytes later in its page takes up to three times as long to fill. This was measured on
    2026-11-29 at 7c6fead4.
    """
    memory = np.empty(nbytes + _LINE, np.uint8)
    skipped = (start - memory.ctypes.data) % _LINE
    return memory[skipped : skipped + nbytes].data


def read_text(file: FileIO, size: int) -> bytes:
    """Return the next bytes of a file that should contain text. If the first byte is zero, only that byte is returned.
    So a sparse file, which may be larger than memory, is not read.

    Args:
        file: open for reading.
        size: number of bytes.
    """
    text = file.read(min(size, 1))
    while len(text) < size and text[:1] != b"\0" and (more := file.read(size - len(text))):
        text += more
    return text


def read_file(path: Path) -> bytes:
    """Return the text of a regular file, read by `read_text`.

    Raises:
        OSError: if there is no regular file, or it cannot be read.
    """
    with FileIO(open_file(path), "rb") as file:
        return read_text(file, os.fstat(file.fileno()).st_size)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    step("sync", path)
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_tree(path: Path) -> None:
    """Remove a directory with its contents, or a file, as far as possible."""
    step("remove", path)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


#: Seconds to wait for a program that is renaming files in a directory, which normally takes milliseconds.
_PATIENCE = 5.0


@contextmanager
def alone_in(directory: Path) -> Iterator[bool]:
    """Hold a lock on a directory, so that other callers of this function wait. Yield whether the lock was obtained.

    The lock gives no guarantee, because other machines may not see it. If another program keeps the lock, False is
    yielded after some seconds.
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
        # A child that was forked meanwhile has the file open too, so closing the file here would not release the lock.
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)
