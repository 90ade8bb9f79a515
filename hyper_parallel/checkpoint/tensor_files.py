"""Files in the format of safetensors: eight bytes with the length of the header, the header, and the data.

The safetensors library reads and writes full tensors. A checkpoint needs slices of any dtype without a framework (NumPy
has no bfloat16). It also has to write data from its place in memory, buffer by buffer.

Source: the documentation of safetensors, https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.checkpoint import disk
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.sums import checksum, save_in, sums_in

__all__ = ["ITEMSIZES", "Entry", "TensorFile", "element_type", "header_of", "write_tensors"]

#: dtype -> its name in the files.
_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
#: dtype -> bytes of an element.
ITEMSIZES = {
    dtype: 1 if dtype.startswith(("bool", "float8")) else int(code.lstrip("BFIUC")) // 8
    for dtype, code in _CODES.items()
}
#: Maximum bytes of a header that readers of the format accept.
_LONGEST_HEADER = 100_000_000
#: Minimum bytes between two rows that are read by separate calls, because reading such gaps would take longer.
_GAP = 12 << 10
#: Minimum bytes from one row to the next at which non-contiguous rows are read one by one.
_FAR = 1 << 15
#: Minimum bytes of a row that is read directly into its place. Shorter rows are copied from a window of `_WINDOW`
#: bytes.
_LONG, _WINDOW = 1 << 12, 1 << 20
#: Windows have a multiple of this number of rows. With 4-byte elements each window then starts at the same place modulo
#: 64.
_ROWS = 16
#: Number of rows that one call reads. A system accepts 1024 pieces of memory, and gaps count as pieces.
_AT_ONCE = 256


def element_type(dtype: str) -> np.dtype:
    """Return NumPy's unsigned integer type of the size of ``dtype``.

    It stands for the dtype, because NumPy lacks some dtypes.
    """
    return np.dtype(f"u{ITEMSIZES[dtype]}")


class Entry(NamedTuple):
    """A tensor to be written.

    Attributes:
        name: name in the file.
        dtype: as in `ITEMSIZES`.
        shape: shape of the tensor.
        read: function that returns the bytes in row-major order, called when they are written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the data."""
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


def header_of(
    entries: Sequence[Entry], metadata: Mapping[str, str] | None = None, beyond: tuple[int, int] = (0, 8)
) -> tuple[bytes, list[int]]:
    """Return the header bytes of a file of tensors, and the offset of each tensor's data. One more offset is the end of
    the file.

    Args:
        entries: the tensors, in the order of the file.
        metadata: further entries of the header.
        beyond: ``(offset, multiple)``: the data starts ``offset`` bytes after a multiple of ``multiple`` bytes.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    places = [0]
    for entry in entries:
        places.append(places[-1] + entry.nbytes)
        header[entry.name] = {"dtype": _CODES[entry.dtype], "shape": [*entry.shape], "data_offsets": places[-2:]}
    text = json.dumps(header, separators=(",", ":")).encode()
    offset, multiple = beyond
    text += b" " * ((offset - 8 - len(text)) % multiple)
    text = struct.pack("<Q", len(text)) + text
    return text, [len(text) + place for place in places]


def write_tensors(
    path: Path,
    entries: Sequence[Entry],
    checksums: bool,
    advance: Callable[[int], None],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, int]]:
    """Write a file, whose data is on disk when this returns.

    Args:
        path: path of a new file.
        entries: the tensors. Large ones are stored first, and those that are no multiple of `disk.ALIGNMENT` last.
        checksums: whether to compute checksums.
        advance: function that is called with numbers of written bytes.
        metadata: further entries of the header.

    Returns:
        The size of the file in bytes, and the CRC-32 of each entry's data if asked for.
    """
    entries = sorted(entries, key=lambda entry: (entry.nbytes % disk.ALIGNMENT != 0, entry.nbytes < disk.BLOCK))
    first, beyond = None, (0, 8)
    if entries and entries[0].nbytes >= disk.BLOCK:
        # Frameworks start all large tensors at the same offset in a page. The file uses that offset too, so that they
        # are written without a copy.
        first = entries[0].read()
        beyond = (disk.address_of(first) // 8 * 8 % disk.ALIGNMENT, disk.ALIGNMENT)
    header, places = header_of(entries, metadata, beyond)
    sums: dict[str, int] = {}
    with disk.NewFile(path, places[-1]) as file, ThreadPoolExecutor(1) as beside:
        file.write(header)
        for entry in entries:
            data, first = entry.read() if first is None else first, None
            found = beside.submit(zlib.crc32, data) if checksums else None
            file.write(data)
            if found is not None:
                sums[entry.name] = found.result()
            advance(data.nbytes)
    return places[-1], sums


class TensorFile:
    """A file of tensors, of which only the requested elements are read.

    Args:
        path: path of the file.
        size: its size in bytes, if known.

    Attributes:
        path: path of the file.
        size: its size in bytes.
        checksums: the CRC-32 of each tensor's bytes, if the file stores them; otherwise empty.
        save: identifier of the save that wrote the file, if the file stores it; otherwise empty.

    Raises:
        CheckpointError: if the file is missing, truncated, too long, or of another format.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        try:
            self._file = os.fdopen(disk.open_file(path), "rb", buffering=0)
            with _closed_on_failure(self._file) as file:
                found = file.seek(0, 2)
                if size is not None and found != size:
                    raise CheckpointError(
                        f"{path} has {found} bytes instead of {size}: the file was truncated or replaced"
                    )
                self.size = found
                file.seek(0)
                self._entries, self._start, self.checksums, self.save = _read_header(path, file, found)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error

    def names(self) -> Iterable[str]:
        """Return the names of the tensors in the file."""
        return self._entries.keys()

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of a tensor.

        Raises:
            CheckpointError: if the tensor is not in the file.
        """
        if name not in self._entries:
            raise CheckpointError(f"{self.path} has no entry {name!r}")
        dtype, shape, _ = self._entries[name]
        return dtype, shape

    def array(self, name: str) -> np.ndarray:
        """Read a full tensor; return an array of its shape and of `element_type`."""
        dtype, shape = self.kind(name)
        whole = np.empty(shape, element_type(dtype))
        self.read(name, tuple(slice(0, n) for n in shape), whole)
        return whole

    def read(self, name: str, box: tuple[slice, ...], target: np.ndarray) -> None:
        """Read the elements of ``box``, a slice for each dimension, into an array. Contiguous bytes are read directly
        into the array.

        The file is not mapped into memory. If it were, a program that truncates the file would kill this process by a
        signal.

        Args:
            name: name of the tensor.
            box: a slice for each dimension, with bounds.
            target: array with the shape of the box and of `element_type`.

        Raises:
            CheckpointError: if the data cannot be read.
        """
        dtype, shape = self.kind(name)
        strides = tuple(math.prod(shape[d + 1 :]) * ITEMSIZES[dtype] for d in range(len(shape)))
        start = self._place(name)
        start += sum(s.start * stride for s, stride in zip(box, strides, strict=True))
        if target.size:
            self._fill(name, start, strides, target)

    def nbytes(self, name: str) -> int:
        """Return the number of bytes of a tensor.

        Raises:
            CheckpointError: if the tensor is not in the file.
        """
        dtype, shape = self.kind(name)
        return math.prod(shape) * ITEMSIZES[dtype]

    def checksum(self, name: str) -> int:
        """Return the CRC-32 of the bytes of a tensor.

        Raises:
            CheckpointError: if the tensor is not in the file, or cannot be read.
        """
        nbytes = self.nbytes(name)
        return checksum(lambda start, memory: self._get(name, start, memory), self._place(name), nbytes)

    def _place(self, name: str) -> int:
        """Return the offset of a tensor's data in the file."""
        return self._start + self._entries[name][2]

    def _fill(self, name: str, start: int, strides: tuple[int, ...], target: np.ndarray) -> None:
        """Fill an array, which is not empty, with elements of the file.

        Args:
            name: name of the tensor, for messages.
            start: offset of the first element in the file.
            strides: for each dimension, bytes from one element to the next in the file.
            target: the array.
        """
        if _span(target, strides) == target.nbytes and target.flags.c_contiguous:
            self._get(name, start, target.reshape(-1).view(np.uint8).data)
            return
        rows, stride, first = len(target), strides[0], target[0]
        whole = _span(first, strides[1:]) == first.nbytes and first.flags.c_contiguous
        if rows > 1 and whole and stride - first.nbytes >= _GAP:
            self._fill_by_calls(name, start, stride, target)
        elif rows > 1 and whole and first.nbytes >= _LONG:
            self._fill_with_gaps(name, start, stride, target)
        elif rows == 1 or stride >= _FAR:
            for i in range(rows):
                self._fill(name, start + i * stride, strides[1:], target[i])
        else:
            # Short rows close to each other are read together with the bytes between them.
            some = max(_WINDOW // stride // _ROWS * _ROWS, 1)
            window = disk.memory_for(start, min(some * stride, _span(target, strides)))
            for i in range(0, rows, some):
                part = target[i : i + some]
                self._get(name, start + i * stride, window[: _span(part, strides)])
                part[...] = np.ndarray(part.shape, part.dtype, window, 0, strides)

    def _fill_by_calls(self, name: str, start: int, stride: int, rows: np.ndarray) -> None:
        """Fill rows that are contiguous in the file and in memory. Each row is read by a separate call."""
        size, file = rows[0].nbytes, self._file.fileno()
        with disk.reading(self.path, name):
            for row in rows:
                if os.preadv(file, (row,), start) < size:
                    self._get(name, start, row.reshape(-1).view(np.uint8).data)
                start += stride

    def _fill_with_gaps(self, name: str, start: int, stride: int, rows: np.ndarray) -> None:
        """Fill rows as `_fill_by_calls` does, but read many rows by one call, including the bytes between them."""
        size = rows[0].nbytes
        gap = np.empty(stride - size, np.uint8)
        for i in range(0, len(rows), _AT_ONCE):
            some = [*rows[i : i + _AT_ONCE]]
            memory: Any = [gap] * (2 * len(some) - 1)
            memory[::2] = some
            place = start + i * stride
            with disk.reading(self.path, name):
                count = os.preadv(self._file.fileno(), memory, place)
            if count < (len(some) - 1) * stride + size:
                for j, row in enumerate(some):
                    self._get(name, place + j * stride, row.reshape(-1).view(np.uint8).data)

    def _get(self, name: str, start: int, memory: memoryview) -> None:
        """Fill memory with the bytes of the file from ``start`` on."""
        disk.read_at(self.path, self._file.fileno(), start, memory, name)


def _span(target: np.ndarray, strides: Sequence[int]) -> int:
    """Return the bytes of a file from the first to the last element of ``target``, for ``strides`` in the file."""
    return target.itemsize + sum((n - 1) * stride for n, stride in zip(target.shape, strides, strict=True))


@contextmanager
def _closed_on_failure(file: Any) -> Iterator[Any]:
    try:
        yield file
    except BaseException:
        file.close()
        raise


def _read_header(
    path: Path, file: Any, size: int
) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], int, dict[str, int], str]:
    """Return the tensors, the end of the header, the checksums, and the save's identifier.

    The tensors are a dict: name -> (dtype, shape, offset of the data after the header).
    """

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged, or is not a safetensors file: {what}")

    beginning = file.read(8)
    if len(beginning) < 8:
        raise wrong(f"it has {size} bytes")
    (length,) = struct.unpack("<Q", beginning)
    if length > min(size - 8, _LONGEST_HEADER):
        raise wrong(f"it has {size} bytes, and its header should have {length} bytes")
    try:
        text = disk.read_text(file, length)
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise wrong("its header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    try:
        sums = sums_in(beginning + text, metadata, [*header])
    except ValueError as error:
        raise wrong(str(error)) from error
    start, entries, end = 8 + length, {}, 0
    for name, entry in header.items():
        try:
            dtype, shape, (first, last) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            fits = all(isinstance(n, int) and n >= 0 for n in (*shape, first, last))
        except (KeyError, TypeError, ValueError) as error:
            raise wrong(f"entry {name!r} is {str(entry)[:100]}") from error
        if not fits or last - first != math.prod(shape) * ITEMSIZES[dtype]:
            raise wrong(f"entry {name!r} of shape {shape} and dtype {dtype} has bytes {first} to {last}")
        if start + last > size:
            raise wrong(f"entry {name!r} ends at byte {start + last}, the file at {size}")
        entries[name] = (dtype, shape, first)
        end = max(end, last)
    if start + end != size:
        raise wrong(f"its data ends at byte {start + end}, the file at {size}")
    return entries, start, sums, save_in(metadata)
