"""Checksums: which rank computes which, and how a file of tensors holds its own."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hyper_parallel.checkpoint import disk

__all__ = ["checksum", "room_for", "save_in", "shared_out", "sums_in", "sums_of"]

#: The names of a file's checksums in its metadata: that of the header, computed with zeros in the place of all of them,
#: and that of the data of each tensor in the order of the header. Each is a CRC-32 in eight hexadecimal digits.
_KEY, _SAVE = "hyper_parallel.crc32", "hyper_parallel.save"
_DIGITS = 8
#: Bytes that are read at a time: few enough for a processor's cache.
_BLOCK = 1 << 20
_PLACE = re.compile(rb'"' + re.escape(_KEY).encode() + rb'":"([0-9a-f]*)"')
T = TypeVar("T")


def checksum(read: Callable[[int, memoryview], None], start: int, nbytes: int) -> int:
    """The CRC-32 of a part of a file.

    Args:
        read: ``read(start, memory)`` fills memory with the bytes of the file from a place on.
        start, nbytes: of the part.
    """
    block, found = disk.memory_for(start, min(nbytes, _BLOCK)), 0
    while nbytes:
        some = block[:nbytes]
        read(start, some)
        found = zlib.crc32(some, found)
        nbytes, start = nbytes - len(some), start + len(some)
    return found


def shared_out(pieces: Iterable[tuple[int, T]], rank: int, size: int) -> Iterator[T]:
    """Yield the pieces of one of several ranks, the largest first.

    Args:
        pieces: bytes of a piece, and the piece; the same on all ranks, in any order. Pieces can be ordered.
        rank, size: this one, and how many there are.
    """
    loads = [0] * size
    for nbytes, piece in sorted(pieces, reverse=True):
        least = loads.index(min(loads))
        loads[least] += nbytes
        if least == rank:
            yield piece


def room_for(count: int, save: str) -> dict[str, str]:
    """Metadata with room for the checksums of so many tensors.

    Args:
        count: of them.
        save: identifies a save, all files of which belong together.
    """
    return {_SAVE: save, _KEY: "0" * _DIGITS * (count + 1)}


def save_in(metadata: Any) -> str:
    """Return the identity of a file's save; empty where the file says none."""
    return str(metadata.get(_SAVE, "")) if isinstance(metadata, Mapping) else ""


def sums_of(header: bytes, sums: Sequence[int]) -> tuple[int, bytes]:
    """The start of the checksums in a header with room for them, and their bytes.

    Args:
        header: of a file, from its first byte.
        sums: of the tensors, in the order of the header.
    """
    start = header.index(f'"{_KEY}":"'.encode()) + len(_KEY) + 4
    return start, "".join(f"{x:0{_DIGITS}x}" for x in (zlib.crc32(header), *sums)).encode()


def sums_in(header: bytes, metadata: Any, names: Sequence[str]) -> dict[str, int]:
    """The checksums that a file holds, of each tensor; empty where it holds none.

    Args:
        header: of the file, from its first byte.
        metadata: the parsed metadata of the header.
        names: of the tensors, in the order of the header.

    Raises:
        ValueError: when they are damaged.
    """
    text = metadata.get(_KEY) if isinstance(metadata, Mapping) else None
    if text is None:
        return {}
    found = _PLACE.search(header)
    if found is None or len(found[1]) != _DIGITS * (len(names) + 1):
        raise ValueError("its checksums are damaged")
    own, *sums = (int(found[1][at : at + _DIGITS], 16) for at in range(0, len(found[1]), _DIGITS))
    zeros = header[: found.start(1)] + b"0" * len(found[1]) + header[found.end(1) :]
    if zlib.crc32(zeros) != own:
        raise ValueError("the checksum of its header differs")
    return dict(zip(names, sums, strict=True))
