"""Parts of tensors are read by calls that say how much there is: all slices, files that end, disks that fail."""

from __future__ import annotations

import errno
import itertools
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.checkpoint import CheckpointError, tensor_files
from hyper_parallel.checkpoint.tensor_files import Entry, TensorFile, element_type, write_tensors
from tests.support.in_processes import ended


def file_of(path: Path, **tensors: np.ndarray) -> TensorFile:
    entries = [Entry(name, str(x.dtype), x.shape, lambda x=x: memoryview(x.tobytes())) for name, x in tensors.items()]
    size, _ = write_tensors(path, entries, False, lambda _: None)
    return TensorFile(path, size)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way of reading is taken by small tensors."""
    for name, value in {"_FAR": 96, "_GAP": 80, "_LONG": 16, "_WINDOW": 120, "_ROWS": 2, "_AT_ONCE": 3}.items():
        monkeypatch.setattr(tensor_files, name, value)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
@pytest.mark.parametrize("shape", [(), (7,), (40,), (9, 5), (5, 30), (4, 3, 6), (2, 5, 3, 9), (3, 1, 40), (70, 2)])
def test_boxes(tmp_path: Path, small: None, shape: tuple[int, ...], dtype: str) -> None:
    """Boxes are read into memory in one piece, into columns of a wider array, and into every other element."""
    kind = element_type(dtype)
    whole = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    file = file_of(tmp_path / "x", before=np.zeros(3, np.uint8), x=whole)
    assert file.array("x").tobytes() == whole.tobytes() and file.array("x").shape == shape
    sides = [sorted({(0, n), (0, 1), (n // 3, n), (n - 1, n), (n // 2, n // 2)}) for n in shape]
    for bounds in itertools.product(*sides):
        box: Any = tuple(slice(*pair) for pair in bounds)
        wanted = whole[box]
        sizes = wanted.shape
        inner = np.zeros([n + 2 for n in sizes], kind)
        targets = [np.zeros(sizes, kind), inner[(*(slice(1, n + 1) for n in sizes), ...)]]
        targets.append(np.zeros([2 * n for n in sizes], kind)[(*[slice(None, None, 2)] * len(sizes), ...)])
        for target in targets:
            file.read("x", box, target)
            assert target.tobytes() == wanted.tobytes(), (shape, bounds, target.strides)
        edge = np.pad(targets[1], 1) if sizes else inner
        assert (inner == edge).all(), "nothing outside of it is written"


def test_as_much_is_read_as_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of long rows are read row by row. Those of short rows are read with the bytes between them, in little
    memory."""
    read, memory = [], []

    def preadv(file: int, places: Any, start: int, original: Any = os.preadv) -> int:
        read.append(sum(memoryview(place).nbytes for place in places))
        return original(file, places, start)

    def empty(size: Any, *arguments: Any, original: Any = np.empty) -> np.ndarray:
        memory.append(int(np.prod(size)))
        return original(size, *arguments)

    file = file_of(tmp_path / "x", long=np.zeros((64, 2**15), np.uint8), short=np.zeros((2**15, 2**8), np.uint8))
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(np, "empty", empty)
    for name, columns, most in (("long", 8, 64 * 8), ("long", 2**14, 64 * 2**14), ("short", 8, 2**15 * 2**8)):
        rows = file.kind(name)[1][0]
        target = np.zeros((rows, columns), np.uint8)
        read.clear(), memory.clear()
        file.read(name, (slice(0, rows), slice(8, 8 + columns)), target)
        assert sum(read) <= most and max(memory, default=0) <= tensor_files._WINDOW + 64, (name, columns)


def ends(file: int, places: Any, start: int) -> int:
    return 0


def fails(file: int, places: Any, start: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("rows", [(4, 8), (4, 4096), (4, 2**16)])
@pytest.mark.parametrize("how", [ends, fails])
def test_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, int], how: Callable[..., int]
) -> None:
    file = file_of(tmp_path / "x", key=np.zeros(rows, np.uint8))
    monkeypatch.setattr(os, "preadv", how)
    words = "x became shorter while it was being read: it now ends inside entry 'key'"
    if how is fails:
        words = "x cannot be read: Input/output error, in entry 'key'"
    half = rows[1] // 2
    for call in (
        lambda: file.array("key"),
        lambda: file.checksum("key"),
        lambda: file.read("key", (slice(0, 4), slice(0, half)), np.zeros((4, half), np.uint8)),
    ):
        with pytest.raises(CheckpointError, match=words):
            call()


def test_short_answers(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may give less than was asked for, where there is more."""
    whole = np.arange(40 * 30, dtype=np.uint8).reshape(40, 30)
    file = file_of(tmp_path / "x", x=whole)

    def preadv(file: int, places: Any, start: int, original: Any = os.preadv) -> int:
        return original(file, [memoryview(places[0])[:7]], start)

    monkeypatch.setattr(os, "preadv", preadv)
    target = np.zeros((40, 20), np.uint8)
    file.read("x", (slice(0, 40), slice(5, 25)), target)
    assert (target == whole[:, 5:25]).all() and (file.array("x") == whole).all()
    assert file.checksum("x") == zlib.crc32(whole.tobytes())


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_is_cut(tmp_path: Path, verify: bool) -> None:
    """A file that is cut after opening: touching a missing page would end the process by a signal."""
    whole = np.ones((3, 2**15), np.uint8)
    file_of(tmp_path / "x", key=whole)

    def call() -> None:
        file = TensorFile(tmp_path / "x")
        os.truncate(tmp_path / "x", 4096)
        if verify:
            file.checksum("key")
        file.read("key", (slice(0, 3), slice(0, 5)), np.zeros((3, 5), np.uint8))

    kind, text = ended(call)
    assert kind == "CheckpointError" and "x became shorter" in text and "'key'" in text, text


def test_a_file_that_is_cut_before_its_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_of(tmp_path / "x", key=np.ones(2, np.uint8))

    def fdopen(*arguments: Any, original: Any = os.fdopen, **options: Any) -> Any:
        class Cut:
            def __init__(self) -> None:
                self._file = original(*arguments, **options)

            def seek(self, *to: int) -> int:
                found = self._file.seek(*to)
                if to == (0,):
                    os.truncate(tmp_path / "x", 3)
                return found

            def __getattr__(self, name: str) -> Any:
                return getattr(self._file, name)

        return Cut()

    monkeypatch.setattr(os, "fdopen", fdopen)
    with pytest.raises(CheckpointError, match="x is damaged, or is not a safetensors file: it has"):
        TensorFile(tmp_path / "x")
