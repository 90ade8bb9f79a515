"""`load`: fill a state from a checkpoint. Each rank reads its local shards."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import directories
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.index import Index, Part, StoredTensor, read_index
from hyper_parallel.checkpoint.nest import layout_of
from hyper_parallel.checkpoint.progress import Progress
from hyper_parallel.checkpoint.ranks import LOADING, Ranks, all_ranks, together
from hyper_parallel.checkpoint.saving import wait_for_saves
from hyper_parallel.checkpoint.sums import shared_out
from hyper_parallel.checkpoint.targets import Filling, Target
from hyper_parallel.checkpoint.tensor_files import ITEMSIZES, TensorFile, element_type
from hyper_parallel.core.layouts.rectangles import Rectangle, held_rectangles
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform import Platform, get_platform

__all__ = ["Files", "fill_together", "load", "read_into"]


def load(
    state: Any,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    convert_dtypes: bool = False,
    verify: bool | None = None,
    mesh: DeviceMesh | None = None,
) -> Any:
    """Fill a training job from a checkpoint of `save`. All ranks of the world, or of ``mesh``, call it with the same
    arguments.

    Modules, optimizers, tensors and DTensors are filled in place: they stay the same objects, with their dtypes,
    placements and ties. Mesh, placements, number of ranks and framework may differ from those of the save. Each rank
    reads only the bytes of its local shards.

    Args:
        state: the saved nest, or a part of it with the same keys. A value other than a tensor, module, optimizer or
            object with ``load_state_dict()`` only marks a value to return. An optimizer need not have stepped.
        path: path of the checkpoint.
        strict: whether every tensor of ``state`` must be in the checkpoint, and every tensor of the checkpoint below a
            module or optimizer must be in ``state``.
        convert_dtypes: whether to convert tensors that were saved in another dtype. Otherwise they raise an error.
        verify: whether to compare data with the checksums that `save` has stored, before anything is changed. Ranks
            share the work. None compares the data of the entries that ``state`` asks for, if there are checksums. True
            compares all data of the checkpoint; False compares none. The checksum of the index itself is always
            compared.
        mesh: mesh of the ranks that load; None stands for all ranks of the world.

    Returns:
        The nest, with the saved numbers, strings and other values; modules, optimizers and tensors are those of
        ``state``.

    Raises:
        TypeError: for a part of ``state`` that a checkpoint cannot store.
        ValueError: if an entry is missing, unexpected, or of another shape or dtype. The message lists all such
            entries. Also with ``verify=True`` for a checkpoint without checksums.
        CheckpointError: if there is no checkpoint, or it is damaged.

    Every error is raised on all ranks, before anything is changed.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.checkpoint import load, save
        >>> path = save({"weight": torch.ones(2), "step": 3}, f"{tempfile.mkdtemp()}/step-3")
        >>> load({"weight": torch.zeros(2), "step": 0}, path)
        {'weight': tensor([1., 1.]), 'step': 3}
    """
    platform = get_platform()
    wait_for_saves()
    ranks = all_ranks(platform, mesh)
    path = Path(os.path.abspath(path))

    def match() -> tuple[Filling, Files, Any]:
        place = directories.locate(path)
        index = read_index(place)
        place_of_rank, count = ranks.members.index(ranks.rank), len(ranks.members)
        filling = Filling(index, platform, strict, convert_dtypes, place_of_rank, count)
        files = Files(place, index)
        filling.place, filling.check_files = place, files.check
        result = filling.match(state)
        for target in filling.targets:
            files.check(index.tensors[target.stored])
        return filling, files, result

    filling, result = fill_together(path, match, ranks, platform, verify)
    directories.set_run(path.parent, filling.index.run)
    return result


def fill_together(
    path: Path,
    match: Callable[[], tuple[Filling, Files, Any]],
    ranks: Ranks,
    platform: Platform,
    verify: bool | None,
) -> tuple[Filling, Any]:
    """Fill tensors and objects on all ranks. Nothing is changed if ``match`` fails on any rank, or if a checksum
    differs.

    Args:
        path: path of the files, for messages.
        match: function that returns the tensors and objects to fill, the files, and a result.
        ranks: the ranks that load.
        platform: platform of the tensors.
        verify: as in `load`.

    Returns:
        The filled tensors and objects, and the result of ``match``.

    Raises:
        ValueError, TypeError, CheckpointError: the errors of ``match``, and as `load` raises, on all ranks.
    """
    what = f"loading {path}"
    matches: list[tuple[Filling, Files, Any]] = []

    def digest() -> str:
        matches.append(match())
        return matches[0][0].digest()

    asked = together(ranks, what, digest)
    filling, files, result = matches[0]
    _compare_sums(filling, files, ranks, what, verify, asked)

    def fill() -> None:
        total = sum(filling.index.tensors[target.stored].nbytes for target in filling.targets)
        with Progress(f"loading {path.name}", total, ranks.rank == ranks.members[0]) as progress:
            for target in filling.targets:
                there = filling.index.tensors[target.stored]
                if platform.is_meta(target.tensor):
                    platform.give_memory(target.tensor)
                read_into(target, there, files, platform)
                progress.advance(there.nbytes)
        loading = LOADING.set(ranks.members)
        try:
            filling.finish()
        finally:
            LOADING.reset(loading)

    together(ranks, what, fill)
    return filling, result


def _compare_sums(
    filling: Filling, files: Files, ranks: Ranks, what: str, verify: bool | None, asked: Sequence[str]
) -> None:
    """Compare data with its checksums. All ranks share the work.

    Args:
        filling: the tensors and objects to fill.
        files: files from which the tensors are filled.
        ranks: the ranks that load.
        what: description of the operation in messages.
        verify: as in `load`.
        asked: result of `Filling.digest` on each rank.

    Raises:
        ValueError, CheckpointError: as `load` raises, on all ranks.
    """
    index = filling.index

    def compare() -> None:
        wanted = [*index.tensors] if verify else [*dict.fromkeys(target.stored for target in filling.targets)]
        # Ranks that fill different tensors, such as stages of a pipeline, each compare their own tensors.
        alike = verify or len({*asked}) == 1
        share = (ranks.members.index(ranks.rank), len(ranks.members)) if alike else (0, 1)
        files.compare((index.tensors[name] for name in wanted), *share)

    if verify and not all(part.file in index.checksums for x in index.tensors.values() for part in x.parts):
        raise ValueError(f"{what} was saved without checksums: load it without verify, or save it with checksums=True")
    if verify is not False and index.checksums:
        together(ranks, what, compare)


class Files:
    """The files of a checkpoint, opened on demand.

    Args:
        directory: directory of the checkpoint.
        index: index of the checkpoint.
        opened: files that are open already, by name.
    """

    def __init__(self, directory: Path, index: Index, opened: Mapping[str, TensorFile] | None = None) -> None:
        self._directory, self._index = directory, index
        self._open: dict[str, TensorFile] = dict(opened or {})

    def check(self, tensor: StoredTensor) -> None:
        """Raise CheckpointError unless the files have all parts of a tensor as the index describes them."""
        for part in tensor.parts:
            file = self._file(part.file)
            if file.kind(part.entry) != (tensor.dtype, part.sizes):
                dtype, shape = file.kind(part.entry)
                raise CheckpointError(
                    f"{file.path}: entry {part.entry!r} has dtype {dtype} and shape {shape}, but the index has "
                    f"{tensor.dtype} and {part.sizes}. The file and the index belong to different checkpoints"
                )

    def compare(self, tensors: Iterable[StoredTensor], rank: int = 0, size: int = 1) -> None:
        """Compare data with its checksums, for files that have checksums.

        Args:
            tensors: the tensors, the same on all ranks that share the work.
            rank, size: index of this rank, and number of ranks that share the work.

        Raises:
            CheckpointError: if any data is damaged.
        """
        sums = self._index.checksums
        parts = {(part.file, part.entry) for x in tensors for part in x.parts if part.file in sums}
        for name, entry in shared_out(((self._file(f).nbytes(e), (f, e)) for f, e in parts), rank, size):
            file = self._file(name)
            if file.checksum(entry) != sums[name].get(entry):
                raise CheckpointError(f"{file.path}: entry {entry!r} is damaged: its checksum differs")

    def read(self, part: Part, box: tuple[slice, ...], target: np.ndarray) -> None:
        """Read the elements of ``box``, a slice for each dimension of a stored part, into an array."""
        self._file(part.file).read(part.entry, box, target)

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self._directory / name, self._index.files[name])
        return self._open[name]


def read_into(target: Target, there: StoredTensor, files: Any, platform: Platform) -> None:
    """Fill a plain tensor, or this rank's shard of a DTensor.

    Args:
        target: the tensor to fill.
        there: its source in the checkpoint.
        files: object with ``read(part, box, target)``, such as `Files`.
        platform: platform of the tensor.
    """
    x, layout = target.tensor, layout_of(target.tensor)
    if layout is None:
        held: tuple[Rectangle, ...] = (Rectangle((0,) * len(there.shape), there.shape, (0,) * len(there.shape)),)
    else:
        coordinate = layout.mesh.get_coordinate()
        held = () if coordinate is None else held_rectangles(layout, coordinate)
    if not held or 0 in there.shape:
        return
    with platform.no_dispatch(), platform.no_grad():
        local_shape, dtype = platform.shape_of(x), platform.dtypes[there.dtype]
        stored_shape = tuple(local_shape)
        if target.singleton is not None and layout is not None:
            held = tuple(_in_file(r, target.singleton, there) for r in held)
        if target.singleton is not None:
            stored_shape = _with_dims_of(stored_shape, target.singleton, there, 1)

        def fill(memory: Any) -> None:
            local = np.frombuffer(memory, element_type(there.dtype)).reshape(stored_shape)
            for part in there.parts:
                for rectangle in held:
                    _copy_overlap(rectangle, local, part, files)

        if x.dtype == dtype:
            platform.write_bytes(x, math.prod(local_shape) * ITEMSIZES[there.dtype], fill)
        else:
            values = np.empty(math.prod(local_shape) * ITEMSIZES[there.dtype], np.uint8)
            fill(values)
            platform.write(x, platform.to_dtype(platform.from_bytes(values, local_shape, dtype), x.dtype))
    platform.clear_cache(x)


def _in_file(r: Rectangle, singleton: int, there: StoredTensor) -> Rectangle:
    """Return a rectangle of a tensor as a rectangle of its source in the checkpoint.

    If either the tensor or its source lacks the dimension `Target.singleton`, of size 1, the dimension is removed or
    inserted.
    """
    fills = zip(r, (0, 1, 0), strict=True)
    return Rectangle(*(_with_dims_of(values, singleton, there, fill) for values, fill in fills))


def _with_dims_of(values: tuple[int, ...], dim: int, there: StoredTensor, fill: int) -> tuple[int, ...]:
    """Return one entry of ``values`` for each dimension of ``there``: remove entry ``dim``, or insert ``fill`` at
    ``dim``.
    """
    if len(values) > len(there.shape):
        return (*values[:dim], *values[dim + 1 :])
    return (*values[:dim], fill, *values[dim:])


def _copy_overlap(r: Rectangle, local: np.ndarray, part: Part, files: Any) -> None:
    """Read the intersection of a rectangle of this rank and a part of the checkpoint."""
    source, target = [], []
    for offset, size, at, part_offset, part_size in zip(
        r.offsets, r.sizes, r.local_offsets, part.offsets, part.sizes, strict=True
    ):
        first, last = max(offset, part_offset), min(offset + size, part_offset + part_size)
        if first >= last:
            return
        source.append(slice(first - part_offset, last - part_offset))
        target.append(slice(at + first - offset, at + last - offset))
    place: Any = (*target, ...)  # a view, even for a 0-D tensor
    files.read(part, tuple(source), local[place])
