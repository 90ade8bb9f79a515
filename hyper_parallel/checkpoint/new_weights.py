"""Files of full tensors that several ranks write together. They replace the old files all at once, or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import disk, writers
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.sums import checksum, room_for, shared_out, sums_of
from hyper_parallel.checkpoint.tensor_files import Entry, header_of
from hyper_parallel.checkpoint.weight_files import INDEX, WEIGHTS, index_of, read_weight_index
from hyper_parallel.checkpoint.writers import DRAFT, hidden_in, hidden_name, new_token

__all__ = ["NewWeights"]

#: Endings of hidden names: of files that are being written, and of old files while new ones take over their names.
#: Readers of Hugging Face recognize files by the second ending.
_INCOMPLETE, _ASIDE = ".incomplete", ".safetensors"
#: Part of the hidden name of an index of old weights whose files are set aside.
_OLD_INDEX = f"old-{INDEX}"


class NewWeights:
    """Files of full tensors that several ranks write, under hidden names until they are complete.

    Args:
        directory: directory of the files.
        contents: file name -> entries of the file.
        checksums: whether the files store checksums of their data.

    Attributes:
        token: token of this save in hidden names. `make` sets it on one rank, and the caller sets it on the other
            ranks.
    """

    token = ""

    def __init__(self, directory: Path, contents: dict[str, list[Entry]], checksums: bool) -> None:
        self._directory, self._contents, self._checksums = directory, contents, checksums
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._open: dict[str, int] = {}
        # Only the first rank writes headers, but all ranks need their lengths.
        save = secrets.token_hex(8)
        for name, entries in contents.items():
            # Hugging Face's reader asks for the format; "pt" means the names and layouts of torch.
            metadata = {"format": "pt"} | (room_for(len(entries), save) if checksums else {})
            self._headers[name], places = header_of(entries, metadata)
            self._sizes[name] = places[-1]
            self._places |= {entry.name: (name, place) for entry, place in zip(entries, places, strict=False)}

    def _hidden(self, name: str) -> Path:
        return self._directory / hidden_name(name, self.token, _INCOMPLETE)

    def make(self) -> str:
        """Create the files with their headers, on one rank, and remove files whose writers have ended. Return the
        token."""
        self.token = new_token()
        for name, header in self._headers.items():
            self._write(name, header)
            os.truncate(self._hidden(name), self._sizes[name])
        now = max(self._hidden(name).stat().st_mtime for name in self._contents)
        writers.remove_abandoned(self._directory, now, _INCOMPLETE, DRAFT)
        return self.token

    def __enter__(self) -> NewWeights:
        return self

    def write(self, whole: Entry, r: Any, data: memoryview) -> None:
        """Write a rectangle of a tensor to its place in the file."""
        name, start = self._places[whole.name]
        path = self._hidden(name)
        try:
            if name not in self._open:
                self._open[name] = os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
            for place, part in _runs(whole, r, data):
                disk.step("write", path)
                while part:
                    written = os.pwrite(self._open[name], part, start + place)
                    part, place = part[written:], place + written
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error

    def __exit__(self, *error: object) -> None:
        for name, file in self._open.items():
            try:
                if error[0] is None:
                    disk.step("sync", self._hidden(name))
                    os.fsync(file)
            finally:
                os.close(file)
        self._open.clear()

    def compute_sums(self, rank: int, size: int) -> dict[str, int]:
        """Compute this rank's share of the checksums, and return them by the names of the tensors.

        All ranks must have written their data before the call.

        Args:
            rank, size: index of this rank, and number of ranks.
        """
        if not self._checksums:
            return {}
        entries = {entry.name: entry.nbytes for of_file in self._contents.values() for entry in of_file}
        found = {}
        for name in shared_out(((nbytes, name) for name, nbytes in entries.items()), rank, size):
            file, start = self._places[name]
            path = self._hidden(file)
            opened = disk.open_file(path)
            try:
                found[name] = checksum(partial(_read, path, opened, name), start, entries[name])
            finally:
                os.close(opened)
        return found

    def _write_sums(self, sums: Mapping[str, int]) -> None:
        for name, entries in self._contents.items():
            start, text = sums_of(self._headers[name], [sums[entry.name] for entry in entries])
            with open(self._hidden(name), "r+b", buffering=0) as file:
                disk.step("write", self._hidden(name))
                os.pwrite(file.fileno(), text, start)
                disk.step("sync", self._hidden(name))
                os.fsync(file.fileno())

    def publish(self, sums: Mapping[str, int]) -> None:
        """Rename the files to their visible names, on one rank, and remove the files of the old weights.

        During the call, and after a crash, a reader finds either all old weights or all new ones.

        Args:
            sums: checksums of all tensors, merged from `compute_sums` on all ranks.

        Raises:
            CheckpointError: if a file is missing, or another program keeps renaming files in the directory.
        """
        if self._checksums:
            self._write_sums(sums)
        index = self._directory / INDEX
        if len(self._contents) > 1:
            self._write(INDEX, index_of(self._contents))
        with disk.alone_in(self._directory) as alone:
            if not alone:
                raise CheckpointError(
                    f"{self._directory} was not saved: another program has been renaming files in this directory for "
                    f"too long.{self._others()} Wait until that program ends, or end it, and save again"
                )
            sizes = {self._hidden(name).name: size for name, size in self._sizes.items()}
            writers.check_whole(self._directory, self._directory, sizes, self._others)
            self._set_aside(index)
            for name in self._contents:
                self._rename(self._hidden(name), name)
            # Readers use the index if it exists, and the single file otherwise.
            if len(self._contents) > 1:
                self._rename(self._hidden(INDEX), INDEX)
            else:
                self._unlink(index)
            for other in self._directory.glob("model*.safetensors"):
                is_old = re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", other.name) is not None
                if is_old and other.name not in self._contents:
                    self._unlink(other)
            for aside in hidden_in(self._directory, _ASIDE):
                self._unlink(aside.path)
        disk.sync_directory(self._directory)

    def _set_aside(self, index: Path) -> None:
        """Rename old files whose names the new files need, to hidden names.

        The old index then lists the hidden names, so the old weights stay loadable.
        """
        try:
            content, names = read_weight_index(index)
        except CheckpointError:
            return  # no reader uses this index
        aside = {
            name: hidden_name(name.removesuffix(_ASIDE), self.token, _ASIDE)
            for name in sorted(names & self._contents.keys())
        }
        if not aside:
            return
        try:
            for name, hidden in aside.items():
                disk.step("rename", self._directory / name)
                os.link(self._directory / name, self._directory / hidden)
        except OSError:
            # The file system has no hard links: readers find nothing until all new files are in place.
            self._unlink(self._directory / WEIGHTS)
            self._unlink(index)
            return
        content["weight_map"] = {entry: aside.get(str(name), name) for entry, name in content["weight_map"].items()}
        # The index is not synced, because it is used only for milliseconds. After a power failure it may be damaged.
        old = self._hidden(_OLD_INDEX)
        old.write_text(json.dumps(content, indent=2))
        self._rename(old, INDEX)

    def _write(self, name: str, content: bytes) -> None:
        with disk.NewFile(self._hidden(name)) as file:
            file.write(content)

    def _rename(self, hidden: Path, name: str) -> None:
        disk.step("rename", hidden)
        os.replace(hidden, self._directory / name)

    def _unlink(self, path: Path) -> None:
        disk.step("remove", path)
        path.unlink(missing_ok=True)

    def _others(self) -> str:
        return writers.others_in(self._directory, self.token, _INCOMPLETE)

    def discard(self) -> None:
        """Remove incomplete files of this save, on one rank."""
        for hidden in hidden_in(self._directory, _INCOMPLETE):
            if hidden.token == self.token:
                with suppress(OSError):
                    hidden.path.unlink()


def _read(path: Path, file: int, entry: str, start: int, memory: memoryview) -> None:
    disk.read_at(path, file, start, memory, entry)


def _runs(whole: Entry, r: Any, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield each contiguous run of a rectangle with the bytes ``data``: (offset in the tensor's bytes, bytes of the
    run).
    """
    shape, itemsize = whole.shape, whole.nbytes // math.prod(whole.shape)
    cut = max((d for d, n in enumerate(r.sizes) if n != shape[d]), default=0)
    length = math.prod(r.sizes[cut:]) * itemsize
    for number, above in enumerate(np.ndindex(*r.sizes[:cut])):
        offsets = [*(o + i for o, i in zip(r.offsets[:cut], above, strict=True)), *r.offsets[cut:]]
        place = int(np.ravel_multi_index(offsets, shape)) * itemsize if shape else 0
        yield place, data[number * length : (number + 1) * length]
