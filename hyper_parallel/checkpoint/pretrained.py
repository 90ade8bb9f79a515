"""Weights as Hugging Face keeps them: files of whole tensors in the format of safetensors, one or several.

Each rank reads what it holds, and writes what it holds into files that all ranks share: nobody has a whole tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import disk
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.index import Index, Part, StoredTensor
from hyper_parallel.checkpoint.jobs import share
from hyper_parallel.checkpoint.loading import Files, read_into
from hyper_parallel.checkpoint.progress import Progress
from hyper_parallel.checkpoint.ranks import all_ranks, together
from hyper_parallel.checkpoint.targets import Filling
from hyper_parallel.checkpoint.tensor_files import Entry, TensorFile, header_of
from hyper_parallel.checkpoint.weight_files import INDEX, WEIGHTS, in_files, index_of
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.platform import Platform, get_platform

__all__ = ["load_pretrained", "save_pretrained"]

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


# ---------------------------------------------------------------------- loading
def load_pretrained(
    model: Any,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
    strict: bool = True,
    convert_dtypes: bool = False,
    mesh: DeviceMesh | None = None,
) -> None:
    """Fill a model with weights in files of whole tensors. All ranks of the world call it with the same arguments, or
    all of ``mesh``.

    Parameters and buffers stay the same objects, with their placements and ties. Those that are on meta (on MindSpore:
    made under ``no_init_parameters``) get memory for what this rank holds of them, one after the other.

    Args:
        model: a module of which some, all or no parameters are distributed, or a dict of names and tensors.
        path: of a file in the format of safetensors, or of a directory with ``model.safetensors``, or with
            ``model.safetensors.index.json`` and the files that it names.
        rename: from names in the files to names in the model; None leaves a tensor out.
        strict: whether the files must have every parameter and persistent buffer of the model, and nothing else.
        convert_dtypes: whether tensors of another dtype than the model's are converted; otherwise they are an error.
        mesh: whose ranks load; None is all of the world.

    Raises:
        ValueError: where something is missing, unexpected, or of another shape or dtype: all of it is listed. Nothing
            has been changed then.
        CheckpointError: where there are no such files, or they are damaged.

    Each is raised on all ranks.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.checkpoint import load_pretrained, save_pretrained
        >>> directory = save_pretrained(torch.nn.Linear(4, 6), tempfile.mkdtemp())
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4, 6)
        >>> load_pretrained(model, directory)
        >>> model.weight.is_meta
        False

    Mirrors ``PreTrainedModel.from_pretrained``, for a model that is there.
    """
    load_arranged(model, path, None, rename=rename, strict=strict, convert_dtypes=convert_dtypes, mesh=mesh)


def load_arranged(
    model: Any,
    path: str | os.PathLike[str],
    arrange: Callable[[dict[str, StoredTensor]], dict[str, StoredTensor]] | None,
    *,
    rename: Callable[[str], str | None] | None,
    strict: bool,
    convert_dtypes: bool,
    mesh: DeviceMesh | None,
) -> None:
    """`load_pretrained` of tensors of which several in the files can be one in the model.

    Args:
        model, path, rename, strict, convert_dtypes, mesh: as there.
        arrange: from the tensors in the files, by name, to those of the model, made of their parts. A part may have
            dimensions of size 1 in front of those that it has in the file.
    """
    platform = get_platform()
    ranks = all_ranks(platform, mesh)
    path = Path(os.path.abspath(path))
    plans: list[tuple[Filling, Files]] = []

    def plan() -> None:
        directory, index = _read_names(path, rename)
        if arrange is not None:
            arranged = arrange(index.tensors)
            index.tensors.clear()
            index.tensors.update(arranged)
        filling = Filling(index, platform, strict, convert_dtypes, ranks.members.index(ranks.rank), len(ranks.members))
        filling.takes_meta = True
        filling.plan(model)
        plans.append((filling, _WholeFiles(directory, index)))

    together(ranks, f"loading {path}", plan)
    filling, files = plans[0]

    def fill() -> None:
        total = sum(filling.index.tensors[target.stored].nbytes for target in filling.targets)
        with Progress(f"loading {path.name}", total, ranks.rank == ranks.members[0]) as progress:
            for target in filling.targets:
                there = filling.index.tensors[target.stored]
                if platform.is_meta(target.tensor):
                    platform.give_memory(target.tensor)
                read_into(target, there, files, platform)
                progress.advance(there.nbytes)

    together(ranks, f"loading {path}", fill)


class _WholeFiles(Files):
    """Files of whole tensors, of which a part may have further dimensions in front."""

    def read(self, part: Part, box: tuple[slice, ...], target: np.ndarray) -> None:
        """Fill an array with a box of a part."""
        further = len(box) - len(self._file(part).kind(part.entry)[1])
        super().read(part, box[further:], target[(0,) * further])


def _read_names(path: Path, rename: Callable[[str], str | None] | None) -> tuple[Path, Index]:
    """Where the files are, and what is in them."""
    directory, names = _files_of(path)
    index = Index("", 0, {}, {}, {}, {})
    of_name: dict[str, str] = {}
    for name in names:
        file = TensorFile(directory / name)
        index.files[name] = file.path.stat().st_size
        for entry in file.names():
            called = entry if rename is None else rename(entry)
            if called is None:
                continue
            if called in of_name:
                raise ValueError(f"two tensors of {path} would be called {called!r}: {of_name[called]!r} and {entry!r}")
            of_name[called] = entry
            dtype, shape = file.kind(entry)
            index.tensors[called] = StoredTensor(dtype, shape, "plain", (Part((0,) * len(shape), shape, name, entry),))
    return directory, index


def _files_of(path: Path) -> tuple[Path, list[str]]:
    if path.is_file() and path.suffix != ".json":
        return path.parent, [path.name]
    index = path if path.is_file() else path / INDEX
    if not index.exists():
        if (path / WEIGHTS).is_file():
            return path, [WEIGHTS]
        there = sorted(p.name for p in path.glob("*")) if path.is_dir() else None
        raise CheckpointError(
            f"{path} has neither {WEIGHTS} nor {INDEX}"
            + (": there is nothing of that name" if there is None else f", it has {there[:8]}: give the file itself")
        )
    try:
        names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {type(error).__name__} {error}") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index} is damaged: {name!r} lies outside of its directory")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name!r}, which is not there")
    return index.parent, names


# ---------------------------------------------------------------------- saving
def save_pretrained(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    mesh: DeviceMesh | None = None,
) -> Path:
    """Write the weights of a model as files of whole tensors in the format of safetensors: ``model.safetensors``, or,
    where that would be larger than ``max_shard_size``, several files and ``model.safetensors.index.json``. All ranks of
    the world call it with the same arguments, or all of ``mesh``.

    Every rank writes what it holds into the files, which all share; tensors are not gathered. Tied parameters are
    written once, under their first name. On MindSpore the names are torch's, such as ``weight`` for ``gamma``.

    Args:
        model: a module, or a dict of names and tensors or DTensors.
        directory: on a file system that all ranks share; it is made. Weights that are there are replaced.
        max_shard_size: of a file, in bytes, or as ``"5GB"``. A tensor that is larger has a file of its own.
        mesh: whose ranks save; None is all of the world.

    Returns:
        ``directory``.

    Raises:
        ValueError: where ranks differ, a tensor is `Partial`, or has no values (meta).
        CheckpointError: when it cannot be written, on any rank.

    Each is raised on all ranks.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import load_file
        >>> from hyper_parallel.checkpoint import save_pretrained
        >>> directory = save_pretrained(torch.nn.Linear(4, 6), tempfile.mkdtemp())
        >>> load_file(directory / "model.safetensors")["weight"].shape
        torch.Size([6, 4])

    Mirrors ``PreTrainedModel.save_pretrained``.
    """
    platform = get_platform()
    ranks = all_ranks(platform, mesh)
    limit = _bytes(max_shard_size)
    directory = Path(os.path.abspath(directory))
    what, is_first = f"saving {directory}", ranks.rank == ranks.members[0]
    flat, pieces = share(model, what, ranks, platform)
    wholes = {name: _whole(name, x, platform) for name, x in flat.tensors.items()}
    files = _Files(directory, in_files(wholes.values(), limit))

    def make() -> None:
        if is_first:
            if not directory.is_dir():
                disk.make_directory(directory)
            files.make()

    def write() -> None:
        own = [(name, w, e) for name, of_name in pieces.items() for w, e in of_name if w.rank == ranks.rank]
        with Progress(what, sum(entry.nbytes for _, _, entry in own), is_first) as progress, files:
            for name, writer, entry in own:
                files.write(wholes[name], writer.rectangle, entry.read())
                progress.advance(entry.nbytes)

    def publish() -> None:
        if is_first:
            files.publish()

    try:
        for step in (make, write, publish):
            together(ranks, what, step)
    except BaseException:
        if is_first:
            files.discard()
        raise
    return directory


def _bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"([0-9]+) ?([KMG]I?B)", size.upper())
    if found is None:
        raise ValueError(f"max_shard_size is a number of bytes, or such as '5GB', got {size!r}")
    return int(found[1]) * _UNITS[found[2]]


def _whole(name: str, x: Any, platform: Platform) -> Entry:
    dtype = next(n for n, d in platform.dtypes.items() if d == x.dtype)
    return Entry(name, dtype, tuple(x.shape), lambda: memoryview(b""))


class _Files:
    """Files of whole tensors that several ranks write, under hidden names until they are complete.

    Args:
        directory: of the files.
        contents: name of a file -> what is in it.
    """

    def __init__(self, directory: Path, contents: dict[str, list[Entry]]) -> None:
        self._directory, self._contents = directory, contents
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._open: dict[str, int] = {}
        for name, entries in contents.items():
            # Hugging Face's own reader wants to know what wrote a file; "pt" are the names and layouts of torch.
            self._headers[name], places = header_of(entries, {"format": "pt"})
            self._sizes[name] = places[-1]
            self._places |= {entry.name: (name, place) for entry, place in zip(entries, places, strict=False)}

    def _hidden(self, name: str) -> Path:
        return self._directory / f".{name}.incomplete"

    def make(self) -> None:
        """Make the files with their headers, on one rank."""
        for name, header in self._headers.items():
            self._hidden(name).unlink(missing_ok=True)
            with disk.NewFile(self._hidden(name)) as file:
                file.write(header)
            os.truncate(self._hidden(name), self._sizes[name])

    def __enter__(self) -> _Files:
        return self

    def write(self, whole: Entry, r: Any, data: memoryview) -> None:
        """Write a rectangle of a tensor where it belongs."""
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

    def publish(self) -> None:
        """Give the files their names, on one rank, and remove those of other weights that were there."""
        for name in self._contents:
            disk.step("rename", self._hidden(name))
            os.replace(self._hidden(name), self._directory / name)
        index = self._directory / INDEX
        if len(self._contents) > 1:
            hidden = self._hidden(INDEX)
            hidden.unlink(missing_ok=True)
            with disk.NewFile(hidden) as file:
                file.write(index_of(self._contents))
            os.replace(hidden, index)
        else:
            index.unlink(missing_ok=True)
        for other in self._directory.glob("model*.safetensors"):
            if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", other.name) and other.name not in self._contents:
                other.unlink()
        disk.sync_directory(self._directory)

    def discard(self) -> None:
        """Remove what is not complete, on one rank."""
        for name in (*self._contents, INDEX):
            with suppress(OSError):
                self._hidden(name).unlink()


def _runs(whole: Entry, r: Any, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(place in the tensor's data, bytes) of what lies together of a rectangle, whose bytes are ``data``."""
    shape, itemsize = whole.shape, whole.nbytes // math.prod(whole.shape)
    cut = max((d for d, n in enumerate(r.sizes) if n != shape[d]), default=0)
    length = math.prod(r.sizes[cut:]) * itemsize
    for number, above in enumerate(np.ndindex(*r.sizes[:cut])):
        offsets = [*(o + i for o, i in zip(r.offsets[:cut], above, strict=True)), *r.offsets[cut:]]
        place = int(np.ravel_multi_index(offsets, shape)) * itemsize if shape else 0
        yield place, data[number * length : (number + 1) * length]
