"""`save` and `async_save`.

On the caller's thread, all ranks take their nest apart, compare what they have, and work out who writes what. Then each
writes its file and the first one the index, beside the place of the checkpoint; when all is on the disk it gets its
name. `save` does the second part at once, `async_save` does it in a thread, from copies in the memory of the host.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import directories, disk
from hyper_parallel.checkpoint.directories import Draft
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.index import INDEX, Index, Part, StoredTensor
from hyper_parallel.checkpoint.nest import Flat, flatten, layout_of
from hyper_parallel.checkpoint.plan import Wanted, Writer, entry_name, share_out
from hyper_parallel.checkpoint.progress import Progress
from hyper_parallel.checkpoint.ranks import Ranks, ThroughFiles, all_ranks, together
from hyper_parallel.checkpoint.tensor_files import ITEMSIZES, Entry, element_type, write_tensors
from hyper_parallel.checkpoint.values import KIND
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.platform import Platform, get_platform

__all__ = ["AsyncSave", "async_save", "save", "wait_for_saves"]

#: Bytes of a plain tensor up to which ranks compare its values.
COMPARED_UP_TO = 1 << 20


def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    overwrite: bool = False,
    checksums: bool = False,
    mesh: DeviceMesh | None = None,
) -> Path:
    """Save a training job, or a part of it, into a directory. All ranks of the world call it with the same arguments,
    or all of ``mesh``.

    Every rank writes the shards that it alone holds, and ranks that hold the same share the work. The checkpoint
    appears under its name when all of it is on the disk; until then, and after a crash, what was there before is there.
    It can be loaded on any mesh, by any number of ranks, with other placements, and on the other framework.

    Args:
        state: a module, an optimizer, or a nest (dicts, lists, tuples) of these and of tensors, DTensors, numbers,
            strings, None, NumPy's arrays, and objects with ``state_dict()`` and ``load_state_dict()``, such as
            schedulers and samplers. All must be the same on all ranks, but for what has the attribute ``per_rank``,
            such as `RandomState`.
        path: of a directory that does not exist yet, on a file system that all ranks share. Directories above it are
            made.
        keep: how many checkpoints of this run to keep in the directory above; older ones are removed. None keeps all.
        overwrite: whether a checkpoint at ``path`` is replaced.
        checksums: whether to store the CRC-32 of what is written, for ``load(verify=True)``.
        mesh: whose ranks save; None is all of the world.

    Returns:
        ``path``.

    Raises:
        TypeError: for something that a checkpoint does not take.
        ValueError: where ranks differ, ``path`` is there, a tensor is `Partial`, or has no values (meta).
        CheckpointError: when it cannot be written, on any rank.
        All on all ranks.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.checkpoint import load, save
        >>> model = torch.nn.Linear(4, 6)
        >>> path = save({"model": model, "step": 2}, f"{tempfile.mkdtemp()}/step-2")
        >>> load({"model": model, "step": 0}, path)["step"]
        2
    """
    platform = get_platform()
    wait_for_saves()
    ranks = all_ranks(platform, mesh)
    job = _prepare(state, Path(path), ranks, platform, keep, overwrite, checksums, exchange=False)
    _write(job, ranks)
    return job.draft.path


class AsyncSave:
    """A save that is under way, from `async_save`.

    A program that does not ask for its result learns of a failure from the next `save`, `async_save` or `load`, or by a
    warning when it ends.
    """

    def __init__(self, run: Callable[[], None], path: Path) -> None:
        self._path, self._failure, self._told = path, None, False
        self._failure: BaseException | None

        def work() -> None:
            try:
                run()
            except BaseException as error:  # told to whoever asks
                self._failure = error

        self._thread = threading.Thread(target=work, name="hyper_parallel.checkpoint")
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def result(self) -> Path:
        """Wait for the end; returns the path of the checkpoint.

        Raises:
            CheckpointError: when it could not be written, on all ranks.
        """
        self._thread.join()
        self._told = True
        if self._failure is not None:
            raise self._failure
        return self._path


#: The save of this process that is under way, or whose end nobody has asked for.
_UNDER_WAY: list[AsyncSave] = []


def async_save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    overwrite: bool = False,
    checksums: bool = False,
    mesh: DeviceMesh | None = None,
) -> AsyncSave:
    """As `save`, but it returns when all is copied into the memory of the host, and the rest happens beside the
    training, without collectives. It first waits for the save before it.

    Args:
        state: as in `save`; it may be changed as soon as this returns.
        path: as in `save`, and so are the other arguments.
        keep: see there.
        overwrite: see there.
        checksums: see there.
        mesh: see there.

    Raises:
        TypeError, ValueError, CheckpointError: as `save`, for what is known before writing; also what the save before
            it has raised, unless its `AsyncSave.result` was asked for.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.checkpoint import async_save, latest
        >>> directory = tempfile.mkdtemp()
        >>> under_way = async_save({"weight": torch.ones(4)}, f"{directory}/step-1")
        >>> under_way.result() == latest(directory)
        True
    """
    platform = get_platform()
    wait_for_saves()
    ranks = all_ranks(platform, mesh)
    job = _prepare(state, Path(path), ranks, platform, keep, overwrite, checksums, exchange=True)
    job.entries = [_copied(entry) for entry in job.entries]
    beside = ThroughFiles(job.draft.exchange, ranks)

    def run() -> None:
        _write(job, beside)
        beside.leave()

    under_way = AsyncSave(run, job.draft.path)
    _UNDER_WAY.append(under_way)
    return under_way


def wait_for_saves() -> None:
    """Return when the save that is under way has ended.

    Raises:
        CheckpointError: what it raised, unless its result was asked for.
    """
    while _UNDER_WAY:
        before = _UNDER_WAY.pop()
        told = before._told
        try:
            before.result()
        except Exception:
            if not told:
                raise


@atexit.register
def _at_exit() -> None:
    try:
        wait_for_saves()
    except Exception as error:
        warnings.warn(f"an asynchronous save has failed: {error}", stacklevel=1)


# ---------------------------------------------------------------------- what to write
@dataclass
class _Job:
    """What one rank writes, and what the index says."""

    draft: Draft
    index: Index
    entries: list[Entry]  # of this rank
    own: list[dict[str, Any]]  # of all ranks, what each alone has
    keep: int | None
    checksums: bool

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def _prepare(
    state: Any,
    path: Path,
    ranks: Ranks,
    platform: Platform,
    keep: int | None,
    overwrite: bool,
    checksums: bool,
    exchange: bool,
) -> _Job:
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"save(keep=...) takes how many checkpoints to keep, 1 or more, got {keep!r}")
    path = Path(os.path.abspath(path))
    found: list[tuple[Flat, dict[str, str]]] = []

    def describe() -> dict[str, Any]:
        flat = flatten(state, platform)
        facts = _facts(flat, platform)
        found.append((flat, facts))
        token = ""
        if ranks.rank == ranks.members[0]:
            run = directories.run_of(path.parent)
            directories.remove_drafts(path.parent, run)
            if path.exists() and not overwrite:
                raise ValueError(f"{path} is there already: choose another path, or save with overwrite=True")
            token = directories.new_token(run)
            Draft(path, token).open(exchange)
        return {"digest": _digest(facts), "token": token, "own": flat.own, "path": str(path)}

    said = together(ranks, f"saving {path}", describe)
    flat, facts = found[0]
    draft = Draft(path, said[0]["token"])
    try:
        if len({x["digest"] for x in said}) > 1 or len({x["path"] for x in said}) > 1:
            raise _difference(ranks.gather({**facts, "the path": str(path)}), ranks)
        together(ranks, f"saving {path}", draft.check)
        wanted = [Wanted(name, layout_of(x), tuple(x.shape), _itemsize(x, platform)) for name, x in flat.tensors.items()]
        writers = share_out(wanted, ranks.members)
    except BaseException:
        if ranks.rank == ranks.members[0]:
            draft.discard()
            disk.remove_tree(draft.exchange)
        raise
    index = _index(flat, writers, directories.run_of(path.parent), platform)
    entries = [
        _entry(name, flat.tensors[name], writer, platform)
        for name, pieces in writers.items()
        for writer in pieces
        if writer.rank == ranks.rank
    ]
    return _Job(draft, index, entries, [x["own"] for x in said], keep, checksums)


def _facts(flat: Flat, platform: Platform) -> dict[str, str]:
    """What must be equal on all ranks, by what it is about."""
    facts = {}
    for name, x in flat.tensors.items():
        layout = layout_of(x)
        if platform.is_meta(x):
            raise ValueError(f"{name!r} has no values: it is on the meta device. Make them first, with to_empty()")
        dtype = _dtype(x, platform)
        facts[name] = f"{dtype} of shape {tuple(x.shape)}, {_place(layout)}"
        if layout is None and 0 < math.prod(x.shape) * _itemsize(x, platform) <= COMPARED_UP_TO:
            facts[name] += f", values {hashlib.sha256(platform.bytes_of(x)).hexdigest()[:16]}"
    facts["the names of tied tensors"] = str(sorted(flat.aliases.items()))
    for path, value in _leaves(flat.values, ""):
        facts[f"value {path}"] = json.dumps(value)
    return facts


def _place(layout: Any) -> str:
    """How a tensor lies: the same on all ranks that hold it, and on those of other slices of the same mesh."""
    if layout is None:
        return "plain"
    mesh = layout.mesh
    along = "" if mesh.get_root_mesh() is mesh else f" along its dimensions {mesh._along}"
    return f"placed {list(layout.placements)} on {mesh.get_root_mesh()}{along}"


def _leaves(values: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(values, dict) and KIND not in values:
        return [leaf for key, value in values.items() for leaf in _leaves(value, f"{path}[{key!r}]")]
    return [(path, values)]


def _digest(facts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _difference(all_facts: list[dict[str, str]], ranks: Ranks) -> ValueError:
    """The first thing in which a rank differs from the first one."""
    first = all_facts[0]
    for rank, facts in zip(ranks.members, all_facts, strict=True):
        for name in {**first, **facts}:
            mine, other = first.get(name), facts.get(name)
            if mine != other:
                return ValueError(
                    f"ranks {ranks.members[0]} and {rank} do not save the same: {name} is {_short(mine)} on the one, "
                    f"{_short(other)} on the other. Save what all ranks have alike, DTensors, and objects with `per_rank`, such as "
                    "RandomState()"
                )
    raise RuntimeError("digests differ, and what they are of does not")


def _short(text: str | None) -> str:
    if text is None:
        return "missing"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _dtype(x: Any, platform: Platform) -> str:
    name = next((name for name, dtype in platform.dtypes.items() if dtype == x.dtype), None)
    if name not in ITEMSIZES:
        raise TypeError(
            f"a tensor of {x.dtype} cannot be saved: the format of safetensors has no such dtype. Save another view of "
            "its data, such as real and imaginary part"
        )
    return name


def _itemsize(x: Any, platform: Platform) -> int:
    return ITEMSIZES[_dtype(x, platform)]


def _index(flat: Flat, writers: dict[str, list[Writer]], run: str, platform: Platform) -> Index:
    tensors = {}
    for name, x in flat.tensors.items():
        shape, layout = tuple(x.shape), layout_of(x)
        parts = tuple(
            Part(w.rectangle.offsets, w.rectangle.sizes, _file(w.rank), entry_name(name, shape, w.rectangle))
            for w in writers[name]
        )
        placement = "plain" if layout is None else f"{list(layout.placements)} on a mesh {tuple(layout.mesh.shape)}"
        tensors[name] = StoredTensor(_dtype(x, platform), shape, placement, parts)
    return Index(run, 0, {}, tensors, flat.aliases, flat.values)


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _entry(name: str, x: Any, writer: Writer, platform: Platform) -> Entry:
    shape, r, dtype = tuple(x.shape), writer.rectangle, _dtype(x, platform)

    def read() -> memoryview:
        with platform.no_dispatch(), platform.no_grad():
            local = platform.detach(x)
            held = np.frombuffer(platform.host_memory(local), element_type(dtype)).reshape(platform.shape_of(local))
        part = held[tuple(slice(o, o + n) for o, n in zip(r.local_offsets, r.sizes, strict=True))]
        return memoryview(np.ascontiguousarray(part).reshape(-1)).cast("B")

    return Entry(entry_name(name, shape, r), dtype, tuple(r.sizes), read)


def _copied(entry: Entry) -> Entry:
    """The same with the bytes that there are now."""
    data = bytearray(entry.read())
    return entry._replace(read=lambda: memoryview(data))


# ---------------------------------------------------------------------- writing
def _write(job: _Job, ranks: Ranks) -> None:
    """Write this rank's file; the first rank also the index. The checkpoint has its name when this returns."""
    draft = job.draft
    progress = Progress(f"saving {draft.path.name}", job.nbytes, ranks.rank == ranks.members[0])

    def write_tensors_of_rank() -> Any:
        if not job.entries:
            return None
        with progress:
            return write_tensors(draft.directory / _file(ranks.rank), job.entries, job.checksums, progress.advance)

    def publish() -> None:
        if ranks.rank == ranks.members[0]:
            job.index.time = _time(draft.path.parent, job.index.run)
            job.index.values = _with_own(job.index.values, job.own)
            index = disk.create(draft.directory / INDEX)
            try:
                disk.write(index, [memoryview(job.index.to_json().encode())])
            finally:
                disk.finish(index)
            draft.publish()
            if job.keep is not None:
                directories.remove_old(draft.path.parent, job.index.run, job.keep)

    try:
        results = together(ranks, f"writing {draft.path}", write_tensors_of_rank)
        for rank, written in zip(ranks.members, results, strict=True):
            if written is not None:
                job.index.files[_file(rank)] = written[0]
                if job.checksums:
                    job.index.checksums[_file(rank)] = written[1]
        together(ranks, f"completing {draft.path}", publish)
    except CheckpointError:
        if ranks.rank == ranks.members[0]:
            draft.discard()
        raise


def _time(directory: Path, run: str) -> int:
    """Now, and later than all checkpoints that the run has in the directory, whatever clocks say."""
    before = (index.time for _, index in directories.checkpoints_in(directory) if index.run == run)
    return max(time.time_ns(), max(before, default=0) + 1)


def _with_own(values: Any, own: list[dict[str, Any]]) -> Any:
    """``values`` with what each rank alone has: each different value once, and for every rank which it is."""
    if isinstance(values, list):
        return [_with_own(value, own) for value in values]
    if not isinstance(values, dict):
        return values
    if values.get(KIND) == "ranks":
        of_ranks = [json.dumps(x[values["path"]], sort_keys=True) for x in own]
        distinct = [*dict.fromkeys(of_ranks)]
        return {**values, "values": [json.loads(x) for x in distinct], "of": [distinct.index(x) for x in of_ranks]}
    return {key: _with_own(value, own) for key, value in values.items()}
