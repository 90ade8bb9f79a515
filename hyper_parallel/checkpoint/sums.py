"""Checksums: which rank computes each of them, and how a file of tensors stores its checksums."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hyper_parallel.checkpoint import disk

__all__ = ["checksum", "room_for", "save_in", "shared_out", "sums_in", "sums_of"]

#: The names of a file's checksums in its metadata. First comes the checksum of the header, computed with zeros in the
#: place of all checksums. The checksums of each tensor's data follow, in the order of the header. Each is a CRC-32 in
#: eight hexadecimal digits.
_KEY, _SAVE = "hyper_parallel.crc32", "hyper_parallel.save"
_DIGITS = 8
#: Bytes that are read at a time: few enough for the cache of a processor.
_BLOCK = 1 << 20
_PLACE = re.compile(rb'"' + re.escape(_KEY).encode() + rb'":"([0-9a-f]*)"')
T = TypeVar("T")


def checksum(read: Callable[[int, memoryview], None], start: int, nbytes: int) -> int:
    """Return the CRC-32 of a part of a file.

    Args:
        read: ``read(start, memory)`` fills memory with the bytes of the file from ``start`` on.
        start, nbytes: start and length of the part.
    """
    block, found = disk.memory_for(start, min(nbytes, _BLOCK)), 0
    while nbytes:
        some = block[:nbytes]
        read(start, some)
        found = zlib.crc32(some, found)
        nbytes, start = nbytes - len(some), start + len(some)
    return found


def shared_out(pieces: Iterable[tuple[int, T]], rank: int, size: int) -> Iterator[T]:
    """Yield the pieces that this rank has to process, the largest first.

    Args:
        pieces: pairs of the bytes of a piece, and the piece; the same on all ranks, in any order. Pieces can be
            ordered.
        rank, size: index of this rank, and number of ranks.
    """
    loads = [0] * size
    for nbytes, piece in sorted(pieces, reverse=True):
        least = loads.index(min(loads))
        loads[least] += nbytes
        if least == rank:
            yield piece


def room_for(count: int, save: str) -> dict[str, str]:
    """Return metadata for a header that reserves characters for the checksums of ``count`` tensors.

    Args:
        count: number of tensors.
        save: identifier of a save, the same in all its files.
    """
    return {_SAVE: save, _KEY: "0" * _DIGITS * (count + 1)}


def save_in(metadata: Any) -> str:
    """Return the identifier of the save that wrote a file; empty if the file has none."""
    return str(metadata.get(_SAVE, "")) if isinstance(metadata, Mapping) else ""


def sums_of(header: bytes, sums: Sequence[int]) -> tuple[int, bytes]:
    """Return the offset in ``header`` of the characters that `room_for` reserved, and the bytes of the checksums.

    Args:
        header: header of a file, from its first byte.
        sums: checksums of the tensors, in the order of the header.
    """
    start = header.index(f'"{_KEY}":"'.encode()) + len(_KEY) + 4
    return start, "".join(f"{x:0{_DIGITS}x}" for x in (zlib.crc32(header), *sums)).encode()


def sums_in(header: bytes, metadata: Any, names: Sequence[str]) -> dict[str, int]:
    """Return the checksums stored in a file, by tensor; empty for a file without checksums.

    Args:
        header: header of the file, from its first byte.
        metadata: the parsed metadata of the header.
        names: names of the tensors, in the order of the header.

    Raises:
        ValueError: if the checksums are damaged.
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
