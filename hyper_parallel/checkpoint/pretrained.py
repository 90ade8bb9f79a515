"""Weights in Hugging Face's format: one or several safetensors files of full tensors.

Each rank reads its local shards, and writes its shards into files that all ranks share. No rank holds a full tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import disk
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.index import Index, Part, StoredTensor
from hyper_parallel.checkpoint.jobs import share
from hyper_parallel.checkpoint.loading import Files, fill_together
from hyper_parallel.checkpoint.new_weights import NewWeights
from hyper_parallel.checkpoint.progress import Progress
from hyper_parallel.checkpoint.ranks import all_ranks, together
from hyper_parallel.checkpoint.targets import Filling
from hyper_parallel.checkpoint.tensor_files import Entry, TensorFile
from hyper_parallel.checkpoint.weight_files import INDEX, WEIGHTS, in_files, read_weight_index
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform import Platform, get_platform

__all__ = ["load_pretrained", "save_pretrained"]

#: Maximum attempts to open the files of a directory while other saves replace them.
_TRIES = 5
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


# ---------------------------------------------------------------------- loading
def load_pretrained(
    model: Any,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
    strict: bool = True,
    convert_dtypes: bool = False,
    verify: bool | None = None,
    mesh: DeviceMesh | None = None,
    arrange: Callable[[dict[str, StoredTensor]], dict[str, StoredTensor]] | None = None,
) -> None:
    """Fill a model with weights from files of full tensors. All ranks of the world, or of ``mesh``, call it with the
    same arguments.

    Parameters and buffers stay the same objects, with their placements and ties. Parameters on meta (on MindSpore:
    created under ``no_init_parameters``) get memory for this rank's shard, one parameter at a time.

    Args:
        model: a module with any number of distributed parameters, or a dict of names and tensors.
        path: a safetensors file, or a directory with ``model.safetensors``, or a directory with
            ``model.safetensors.index.json`` and the files that this index names.
        rename: function from names in the files to names in the model; None skips a tensor.
        strict: whether the files must have every parameter and persistent buffer of the model, and no other tensor.
        convert_dtypes: whether to convert tensors of another dtype than the model's. Otherwise they raise an error.
        verify: whether to compare data with checksums, as in `load`. Files of `save_pretrained` have checksums.
        mesh: mesh of the ranks that load; None stands for all ranks of the world.
        arrange: function from the tensors of the files, by name, to the tensors of the model, for a model of which one
            tensor is several in the files. Its results have the parts of its arguments. A part may have extra leading
            dimensions of size 1.

    Raises:
        ValueError: if a tensor is missing, unexpected, or of another shape or dtype. The message lists all such
            tensors. Nothing has been changed then.
        CheckpointError: if there are no such files, or they are damaged.

    Every error is raised on all ranks.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.checkpoint import load_pretrained, save_pretrained
        >>> directory = save_pretrained(torch.nn.Linear(4, 6), tempfile.mkdtemp())
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4, 6)
        >>> load_pretrained(model, directory)
        >>> model.weight.is_meta
        False

    Mirrors ``PreTrainedModel.from_pretrained``, for an existing model.
    """
    platform = get_platform()
    ranks = all_ranks(platform, mesh)
    path = Path(os.path.abspath(path))

    def match() -> tuple[Filling, Files, None]:
        directory, index, opened = _read_names(path, rename)
        if arrange is not None:
            arranged = arrange(index.tensors)
            index.tensors.clear()
            index.tensors.update(arranged)
        filling = Filling(index, platform, strict, convert_dtypes, ranks.members.index(ranks.rank), len(ranks.members))
        filling.place, filling.takes_meta = path, True
        filling.match(model)
        return filling, _WholeFiles(directory, index, opened), None

    fill_together(path, match, ranks, platform, verify)


class _WholeFiles(Files):
    """Files of full tensors.

    A tensor of the model may have more leading dimensions of size 1 than its tensor in a file.
    """

    def read(self, part: Part, box: tuple[slice, ...], target: np.ndarray) -> None:
        """Read the elements of ``box``, a slice for each dimension of a tensor, into an array."""
        further = len(box) - len(self._file(part.file).kind(part.entry)[1])
        super().read(part, box[further:], target[(0,) * further])


def _read_names(path: Path, rename: Callable[[str], str | None] | None) -> tuple[Path, Index, dict[str, TensorFile]]:
    """Return the directory of the files, their index, and the open files by name."""
    directory, files = _open_files(path)
    index = Index("", 0, {}, {}, {}, {})
    of_name: dict[str, str] = {}
    for name, file in files.items():
        index.files[name] = file.size
        if file.checksums:
            index.checksums[name] = file.checksums
        for entry in file.names():
            called = entry if rename is None else rename(entry)
            if called is None:
                continue
            if called in of_name:
                raise ValueError(
                    f"two tensors of {path} get the same name {called!r}: {of_name[called]!r} and {entry!r}"
                )
            of_name[called] = entry
            dtype, shape = file.kind(entry)
            index.tensors[called] = StoredTensor(dtype, shape, "plain", (Part((0,) * len(shape), shape, name, entry),))
    return directory, index, files


def _open_files(path: Path) -> tuple[Path, dict[str, TensorFile]]:
    """Open all files of one save, even if another save replaces them meanwhile.

    Raises:
        CheckpointError: if there are no files, or they are damaged, or replaced faster than they can be opened.
    """
    index = path / INDEX if path.is_dir() else path
    for _ in range(_TRIES):
        before, failure, files = disk.stamp(index), None, {}
        try:
            directory, names = _files_of(path)
            files = {name: TensorFile(directory / name) for name in names}
        except CheckpointError as error:
            failure = error
        # A save renames files that the present index does not name, so the files of one index belong together.
        if disk.stamp(index) == before:
            if failure is not None:
                raise failure
            if len({file.save for file in files.values()}) > 1:
                raise CheckpointError(f"the files of {path} come from different saves: {', '.join(files)}")
            return directory, files
    raise CheckpointError(
        f"{path} was replaced {_TRIES} times while it was being opened: load it after the saves have ended"
    )


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
            + (
                ": the path does not exist"
                if there is None
                else f". The folder contains {there[:8]}: pass the path of the file"
            )
        )
    names = sorted(read_weight_index(index)[1])
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} is damaged: it names {name!r}, which is outside of the directory of the index"
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index} names the file {name!r}, which does not exist: copy this file into the directory of the index"
            )
    return index.parent, names


# ---------------------------------------------------------------------- saving
def save_pretrained(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    checksums: bool = True,
    mesh: DeviceMesh | None = None,
) -> Path:
    """Write the weights of a model as safetensors files of full tensors. There is one file, ``model.safetensors``, or,
    beyond ``max_shard_size``, several files and ``model.safetensors.index.json``. All ranks of the world, or of
    ``mesh``, call it with the same arguments.

    Every rank writes its shards into the shared files, so tensors are not gathered. Tied parameters are written once,
    under their first name. On MindSpore the names are torch's, such as ``weight`` for ``gamma``.

    Args:
        model: a module, or a dict of names and tensors or DTensors.
        directory: directory on a file system that all ranks share; it is created. Existing weights are replaced at
            once: a reader, even after a crash, finds either the old or the new ones.
        max_shard_size: maximum size of a file, in bytes, or as ``"5GB"``. A larger tensor gets a file of its own.
        checksums: whether the headers store checksums of the data, which `load_pretrained` compares.
        mesh: mesh of the ranks that save; None stands for all ranks of the world.

    Returns:
        ``directory``.

    Raises:
        ValueError: if ranks differ, a tensor is `Partial`, or a tensor has no values (meta).
        CheckpointError: if the files cannot be written, on any rank.

    Every error is raised on all ranks.

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
    files = NewWeights(directory, in_files(wholes.values(), limit), checksums)

    def make() -> str:
        if is_first and not directory.is_dir():
            disk.make_directory(directory)
        return files.make() if is_first else ""

    def write() -> None:
        own = [(name, w, e) for name, of_name in pieces.items() for w, e in of_name if w.rank == ranks.rank]
        with Progress(what, sum(entry.nbytes for _, _, entry in own), is_first) as progress, files:
            for name, writer, entry in own:
                files.write(wholes[name], writer.rectangle, entry.read())
                progress.advance(entry.nbytes)

    def compute_sums() -> dict[str, int]:
        return files.compute_sums(ranks.members.index(ranks.rank), len(ranks.members))

    def publish() -> None:
        if is_first:
            files.publish(sums)

    try:
        files.token = together(ranks, what, make)[0]
        together(ranks, what, write)
        sums = {name: value for of_rank in together(ranks, what, compute_sums) for name, value in of_rank.items()}
        together(ranks, what, publish)
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
        raise ValueError(f"max_shard_size takes a number of bytes or a text such as '5GB', got {size!r}")
    return int(found[1]) * _UNITS[found[2]]


def _whole(name: str, x: Any, platform: Platform) -> Entry:
    dtype = next(n for n, d in platform.dtypes.items() if d == x.dtype)
    return Entry(name, dtype, tuple(x.shape), lambda: memoryview(b""))
