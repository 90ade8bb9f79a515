"""Files that are written past the cache of the system, block by block, and refusals of a system."""

from __future__ import annotations

import ctypes
import errno
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.checkpoint import CheckpointError, disk
from hyper_parallel.checkpoint.ranks import Alone, ThroughFiles
from hyper_parallel.checkpoint.tensor_files import Entry, TensorFile, write_tensors

BLOCK = 8192
CONTENT = bytes(i * 7 % 251 for i in range(5 * BLOCK + 123))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "DIRECT_FROM", 2 * BLOCK)
    monkeypatch.setattr(disk, "BLOCK", BLOCK)


def written(path: Path, size: int, chunk: int) -> list[int]:
    """Write so many bytes in chunks; returns how many bytes each call of the system was given."""
    given, write = [], os.write

    def watched(file: int, data: Any) -> int:
        given.append(len(data))
        return write(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", watched)
        with disk.NewFile(path, size) as file:
            for start in range(0, size, chunk):
                file.write(memoryview(CONTENT)[start : min(start + chunk, size)])
    assert path.read_bytes() == CONTENT[:size]
    return given


@pytest.mark.parametrize("chunk", [1000, BLOCK, 3 * BLOCK + 5, len(CONTENT)])
def test_blocks(tmp_path: Path, chunk: int) -> None:
    """Large files are written in blocks, with or without a rest at the end; small ones as they come."""
    assert written(tmp_path / "large", len(CONTENT), chunk)[-1] in (123, chunk, len(CONTENT) % chunk)
    written(tmp_path / "even", 3 * BLOCK, chunk)
    assert len(written(tmp_path / "small", BLOCK, chunk)) == -(-BLOCK // chunk)
    written(tmp_path / "empty", 0, chunk)


@pytest.mark.parametrize("before", [0, 100, BLOCK - 1, BLOCK, BLOCK + 4096])
def test_without_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """Memory that is aligned as in the file is written without a copy, but for pages shared with other bytes."""
    memory = np.zeros(6 * BLOCK, np.uint8)
    start = (before - memory.ctypes.data) % 4096
    source = memory[start : start + 4 * BLOCK + 777]
    source[:] = np.arange(source.size) % 251
    given: list[int] = []
    write = os.write

    def watched(file: int, data: Any) -> int:
        place = disk.address_of(data) - source.ctypes.data
        given.append(len(data) if 0 <= place < source.size else 0)
        return write(file, data)

    monkeypatch.setattr(os, "write", watched)
    with disk.NewFile(tmp_path / "file", before + source.size + 50) as file:
        file.write(CONTENT[:before])
        file.write(source.data)
        file.write(CONTENT[:50])
    assert (tmp_path / "file").read_bytes() == CONTENT[:before] + source.tobytes() + CONTENT[:50]
    head = -before % 4096
    assert sum(given) == (source.size - head) // 4096 * 4096
    assert max(given) == BLOCK


def test_data_lies_in_files_as_in_memory(tmp_path: Path) -> None:
    """The data of the first large tensor is aligned as in memory. So are all that begin at the same offset. Small
    tensors come next, odd ones last."""
    memory = [np.zeros(3 * BLOCK, np.uint8) for _ in range(2)]
    values = [x[(64 - x.ctypes.data) % 4096 :][: 2 * BLOCK] for x in memory]
    for i, x in enumerate(values):
        x[:] = np.arange(x.size) % (250 + i)
    odd, page = np.arange(5, dtype=np.uint8), np.full(4096, 255, np.uint8)
    tensors = {"odd": odd, "page": page, "a": values[0], "b": values[1]}
    entries = [Entry(name, "uint8", x.shape, lambda x=x: x.data) for name, x in tensors.items()]
    size, sums = write_tensors(tmp_path / "x", entries, True, lambda _: None)
    file = TensorFile(tmp_path / "x", size)
    content = (tmp_path / "x").read_bytes()
    for name, x in tensors.items():
        assert file.array(name).tobytes() == x.tobytes()
        assert sums[name] == zlib.crc32(x.tobytes())
    assert [content.index(x.tobytes()) % 4096 for x in values] == [64, 64]
    assert content.endswith(odd.tobytes())


def test_what_a_system_may_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such flag, no such writes, writes that end early: the file is the same."""
    write = os.write

    def at_first(change: Any) -> Any:
        left = [change]
        return lambda file, data: left.pop()(file, data) if left else write(file, data)

    def refused(file: int, data: Any) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    for name, change in (("refused", refused), ("short", lambda file, data: write(file, bytes(data[:4096])[:100]))):
        monkeypatch.setattr(os, "write", at_first(change))
        if name == "short":  # as a device does whose blocks are smaller
            monkeypatch.setattr(disk.NewFile, "_set_direct", direct_in_name)
        with disk.NewFile(tmp_path / name, len(CONTENT)) as file:
            file.write(CONTENT)
        monkeypatch.undo()
        monkeypatch.setattr(disk, "DIRECT_FROM", BLOCK)
        monkeypatch.setattr(disk, "BLOCK", BLOCK)
        assert (tmp_path / name).read_bytes() == CONTENT
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    written(tmp_path / "without", len(CONTENT), 1000)


def direct_in_name(file: disk.NewFile, on: bool) -> bool:
    """Stands for the function that sets the flag: blocks are used, and any number of bytes can be written."""
    return True


def test_room_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written where room is missing; where a system cannot tell, files are written as usual."""
    asked: list[int] = []

    def reserving(answer: int) -> Any:
        def reserve(file: int, mode: int, start: int, size: int) -> int:
            asked.append(size)
            ctypes.set_errno(answer)
            return -1 if answer else 0

        return lambda: reserve

    monkeypatch.setattr(disk, "_fallocate", reserving(errno.ENOSPC))
    with (
        pytest.raises(CheckpointError, match="full cannot be written: No space left"),
        disk.NewFile(tmp_path / "full", len(CONTENT)),
    ):
        pytest.fail("there is no room to write to")
    for name, there in (("unknown", reserving(errno.EOPNOTSUPP)), ("missing", lambda: None)):
        monkeypatch.setattr(disk, "_fallocate", there)
        written(tmp_path / name, len(CONTENT), BLOCK)
    written(tmp_path / "small", BLOCK, BLOCK)
    assert asked == [len(CONTENT)] * 2


def test_a_system_without_reserving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    assert disk._fallocate.__wrapped__() is None


def test_a_failure_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with (
        pytest.raises(CheckpointError, match="x cannot be written: No space left"),
        disk.NewFile(tmp_path / "x", len(CONTENT)) as file,
    ):
        file.write(CONTENT)
    with (  # the rest at the end
        pytest.raises(CheckpointError, match="y cannot be written: No space left"),
        disk.NewFile(tmp_path / "y", len(CONTENT)) as file,
    ):
        file.write(CONTENT[:100])


def test_ranks_that_cannot_tell_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous save ends with an error that says why, whichever way the directory for it is lost."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    through = ThroughFiles(folder, Alone())
    assert through.gather({"x": 1}) == [{"x": 1}]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full_for_texts)
        with pytest.raises(CheckpointError, match=r"ranks/2.0 cannot be written: No space left"):
            through.gather(2)
    through.leave()
    assert not folder.exists()
    with pytest.raises(
        CheckpointError, match="the other ranks have abandoned an asynchronous save, because rank 0 did not respond"
    ):
        through.gather(3)


def full_for_texts(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
