"""Steps of each rank in a save. They are the same for `save` and `async_save`.

`prepare`: all ranks flatten their state, compare the results, and decide which rank writes which rectangles. `write`:
each rank writes its file next to the place of the checkpoint. The first rank also writes the index. When all data is on
disk, the draft is renamed to the checkpoint's name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import directories, disk
from hyper_parallel.checkpoint.assignment import Wanted, Writer, entry_name, share_out
from hyper_parallel.checkpoint.directories import Draft
from hyper_parallel.checkpoint.index import INDEX, LATEST, Index, Part, StoredTensor
from hyper_parallel.checkpoint.nest import Flat, flatten, layout_of
from hyper_parallel.checkpoint.progress import Progress
from hyper_parallel.checkpoint.ranks import Ranks, together
from hyper_parallel.checkpoint.tensor_files import ITEMSIZES, Entry, element_type, write_tensors
from hyper_parallel.checkpoint.values import KIND
from hyper_parallel.checkpoint.writers import LONGEST, name_of_process, new_token
from hyper_parallel.platform import Platform
from hyper_parallel.platform.terminal import printable

__all__ = ["Job", "prepare", "share", "write"]

#: Maximum bytes of a plain tensor whose values ranks compare.
COMPARED_UP_TO = 1 << 20


@dataclass
class Job:
    """One save: the entries that this rank writes, and the index of the full checkpoint."""

    draft: Draft
    index: Index
    entries: list[Entry]  # of this rank
    own: list[dict[str, Any]]  # of all ranks, values that each rank has for itself
    keep: int | None
    checksums: bool

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def prepare(
    state: Any,
    path: Path,
    ranks: Ranks,
    platform: Platform,
    keep: int | None,
    overwrite: bool,
    checksums: bool,
    exchange: bool,
) -> Job:
    """Prepare a save on all ranks, and return this rank's `Job`.

    Args:
        state: as in `save`.
        path: as in `save`.
        ranks: the ranks that save.
        platform: platform of the tensors.
        keep: as in `save`.
        overwrite: as in `save`.
        checksums: as in `save`.
        exchange: whether ranks will communicate through files, in parallel to the training. Then all data is copied,
            and the directory for these files is created.

    Raises:
        ValueError, TypeError, CheckpointError: as `save` raises. Incomplete files are removed.
    """
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"save(keep=...) takes a number of checkpoints, at least 1, got {keep!r}")
    path = Path(os.path.abspath(path))
    what, is_first = f"saving {path}", ranks.rank == ranks.members[0]

    def own(flat: Flat) -> tuple[str, dict[str, Any]]:
        _check_name(path)
        if is_first:
            _check_place(path, overwrite)
        return new_token(), flat.own

    facts = {"the path": str(path), "the argument 'checksums'": str(bool(checksums))}
    flat, writers, said = _agreed(state, what, ranks, platform, facts, own)
    run, draft = directories.run_of(path.parent), Draft(path, said[0][0])
    entries = [
        _entry(name, flat.tensors[name], writer, platform)
        for name, pieces in writers.items()
        for writer in pieces
        if writer.rank == ranks.rank
    ]
    job = Job(draft, _index(flat, writers, run, platform), entries, [values for _, values in said], keep, checksums)

    def open_draft() -> None:
        if is_first:
            draft.open(exchange, overwrite)

    def copy() -> None:
        draft.check()
        job.entries = [_copied(entry) for entry in entries]

    with _discarded_on_failure(draft, is_first, exchange):
        together(ranks, what, open_draft)
        if exchange:
            together(ranks, what, copy)
    return job


def _agreed(
    state: Any,
    what: str,
    ranks: Ranks,
    platform: Platform,
    facts: dict[str, str],
    own: Callable[[Flat], Any] = lambda flat: None,
) -> tuple[Flat, dict[str, list[Writer]], list[Any]]:
    """Flatten the state on all ranks, and compare the results.

    Args:
        state, what, ranks, platform: as in `share`.
        facts: further facts that must be equal on all ranks, by subject.
        own: function of the flat state. It returns a value that may differ between ranks.

    Returns:
        The flat state, the writers of each tensor, and the result of ``own`` on each rank.
    """
    found: list[tuple[Flat, dict[str, str], dict[str, list[Writer]]]] = []

    def describe() -> tuple[str, Any]:
        flat = flatten(state, platform)
        wanted = [
            Wanted(name, layout_of(x), tuple(x.shape), _itemsize(x, platform)) for name, x in flat.tensors.items()
        ]
        found.append((flat, _facts(flat, platform) | facts, share_out(wanted, ranks.members)))
        return hashlib.sha256(json.dumps(found[0][1]).encode()).hexdigest(), own(flat)

    said = together(ranks, what, describe)
    flat, mine, writers = found[0]
    if len({digest for digest, _ in said}) > 1:
        raise _difference(ranks.gather(mine), ranks)
    return flat, writers, [value for _, value in said]


def _check_name(path: Path) -> None:
    """Raise ValueError, on every rank, if the draft's name would be too long for the system."""
    if len(os.fsencode(path.name)) > LONGEST:
        raise ValueError(
            f"a checkpoint cannot be called {path.name[:40]!r}...: its name has {len(os.fsencode(path.name))} bytes, "
            f"and the drafts of a save have longer names. Choose a name of at most {LONGEST} bytes"
        )


def _check_place(path: Path, overwrite: bool) -> None:
    """Raise ValueError if a file or directory at the path blocks the save."""
    if not path.exists():
        return
    if not overwrite:
        raise ValueError(f"{printable(path)} exists already: choose another path, or save with overwrite=True")
    if not path.is_dir() or (any(path.iterdir()) and not (path / INDEX).exists()):
        raise ValueError(
            f"{printable(path)} exists already and is not a checkpoint, so it is not overwritten: choose another path"
        )


@contextmanager
def _discarded_on_failure(draft: Draft, is_first: bool, exchange: bool = False) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if is_first:
            draft.discard(exchange)
        raise


def _facts(flat: Flat, platform: Platform) -> dict[str, str]:
    """Return the facts that must be equal on all ranks, by subject."""
    facts = {}
    for name, x in flat.tensors.items():
        layout = layout_of(x)
        if platform.is_meta(x):
            raise ValueError(
                f"{name!r} is on the meta device and has no values: call to_empty() on the module and initialise its "
                "values first"
            )
        dtype = _dtype(x, platform)
        facts[name] = f"{dtype} of shape {tuple(x.shape)}, {_place(layout)}"
        if layout is None and 0 < math.prod(x.shape) * _itemsize(x, platform) <= COMPARED_UP_TO:
            facts[name] += f", values {hashlib.sha256(platform.bytes_of(x)).hexdigest()[:16]}"
    facts["the names of tied tensors"] = str(sorted(flat.aliases.items()))
    for path, value in _leaves(flat.values, ""):
        facts[f"value {path}"] = json.dumps(value)
    return facts


def _place(layout: Any) -> str:
    """Return the layout of a tensor as text. It is equal on all ranks, even if they hold the tensor on different slices
    of one root mesh."""
    if layout is None:
        return "plain"
    mesh = layout.mesh
    along = "" if mesh.get_root_mesh() is mesh else f" along its dimensions {mesh.slices.along}"
    return f"placed {list(layout.placements)} on {mesh.get_root_mesh()}{along}"


def _leaves(values: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(values, dict) and KIND not in values:
        return [leaf for key, value in values.items() for leaf in _leaves(value, f"{path}[{key!r}]")]
    return [(path, values)]


def _difference(all_facts: list[dict[str, str]], ranks: Ranks) -> ValueError:
    """Return the error for the first difference between a rank and the first rank, in saved values or their order."""
    first = all_facts[0]
    for rank, facts in zip(ranks.members, all_facts, strict=True):
        for name in {**first, **facts}:
            mine, other = first.get(name), facts.get(name)
            if mine != other:
                return ValueError(
                    f"ranks {ranks.members[0]} and {rank} save different states: {name} is {_short(mine)} on rank "
                    f"{ranks.members[0]}, {_short(other)} on rank {rank}. Save values that are equal on all ranks, "
                    "DTensors, or objects with `per_rank`, such as RandomState()"
                )
    rank, names = next((r, [*facts]) for r, facts in zip(ranks.members, all_facts, strict=True) if [*facts] != [*first])
    mine, other = next((x, y) for x, y in zip(first, names, strict=True) if x != y)
    return ValueError(
        f"ranks {ranks.members[0]} and {rank} save the same keys in different orders: {mine} comes first on rank "
        f"{ranks.members[0]}, {other} on rank {rank}. Add the keys to the state in the same order on all ranks"
    )


def _short(text: str | None) -> str:
    if text is None:
        return "missing"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _dtype(x: Any, platform: Platform) -> str:
    name = next((name for name, dtype in platform.dtypes.items() if dtype == x.dtype), None)
    if name not in ITEMSIZES:
        raise TypeError(
            f"a tensor of {x.dtype} cannot be saved: the safetensors format does not have this dtype. Save views of "
            "the data in other dtypes, such as the real and the imaginary part"
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
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data

    return Entry(entry_name(name, shape, r), dtype, tuple(r.sizes), read)


def _copied(entry: Entry) -> Entry:
    """Return an entry with a copy of the tensor's present bytes, which training no longer changes."""
    data = bytearray(entry.read())
    return entry._replace(read=lambda: memoryview(data))


# ---------------------------------------------------------------------- writing
def write(job: Job, ranks: Ranks) -> None:
    """Write this rank's file, and on the first rank the index. On return, the checkpoint is complete and has its final
    name.

    Raises:
        CheckpointError: on all ranks, if any rank could not write; a previous checkpoint still exists.
    """
    draft, is_first = job.draft, ranks.rank == ranks.members[0]

    def write_tensors_of_rank() -> Any:
        draft.check()
        if not job.entries:
            return None
        with Progress(f"saving {draft.path.name}", job.nbytes, is_first) as progress:
            return write_tensors(draft.directory / _file(ranks.rank), job.entries, job.checksums, progress.advance)

    def publish() -> None:
        if is_first:
            job.index.time = _time(draft.path.parent, job.index.run)
            job.index.values = _with_own(job.index.values, job.own)
            job.index.writer = name_of_process()
            content = job.index.to_json().encode()
            with disk.NewFile(draft.directory / INDEX) as file:
                file.write(content)
            draft.publish({**job.index.files, INDEX: len(content)})
            if job.keep is not None:
                _remove_old(draft.path, job.index.run, job.keep)

    with _discarded_on_failure(draft, is_first):
        results = together(ranks, f"writing {draft.path}", write_tensors_of_rank)
        for rank, written in zip(ranks.members, results, strict=True):
            if written is not None:
                job.index.files[_file(rank)] = written[0]
                if job.checksums:
                    job.index.checksums[_file(rank)] = written[1]
        together(ranks, f"completing {draft.path}", publish)


def _remove_old(path: Path, run: str, keep: int) -> None:
    try:
        directories.remove_old(path, run, keep)
    except OSError as error:  # the new checkpoint is complete, so only warn
        warnings.warn(
            f"{printable(path)} is saved, but an older checkpoint could not be removed: {error}. Remove the older "
            "checkpoint by hand",
            stacklevel=2,
        )


def _time(directory: Path, run: str) -> int:
    """Return the time to record for a save: the present, or just after the run's newest checkpoint if that is later. So
    checkpoints of a run stay in order even if clocks are wrong.
    """
    before = (index.time for _, index in directories.checkpoints_in(directory) if index.run == run)
    return min(max(time.time_ns(), max(before, default=0) + 1), LATEST)


def _with_own(values: Any, own: list[dict[str, Any]]) -> Any:
    """Insert the values of each rank into ``values``: each distinct value once, and its index for every rank."""
    if isinstance(values, list):
        return [_with_own(value, own) for value in values]
    if not isinstance(values, dict):
        return values
    if values.get(KIND) == "ranks":
        of_ranks = [json.dumps(x[values["path"]], sort_keys=True) for x in own]
        distinct = [*dict.fromkeys(of_ranks)]
        return {**values, "values": [json.loads(x) for x in distinct], "of": [distinct.index(x) for x in of_ranks]}
    return {key: _with_own(value, own) for key, value in values.items()}


# ---------------------------------------------------------------------- for files of other kinds
def share(
    state: Any, what: str, ranks: Ranks, platform: Platform
) -> tuple[Flat, dict[str, list[tuple[Writer, Entry]]]]:
    """Flatten the state on all ranks, and compare the results.

    Args:
        state: as in `save`.
        what: description of the operation in messages, such as "saving ...".
        ranks: the ranks that take part.
        platform: platform of the tensors.

    Returns:
        The flat state, and for each tensor its pieces, which are the same on all ranks. A piece has the rank that
        writes it, its rectangle, and an entry that reads it.

    Raises:
        ValueError, TypeError: as `save` raises, on all ranks.
    """
    flat, writers, _ = _agreed(state, what, ranks, platform, {"what": what})
    return flat, {
        name: [(writer, _entry(name, flat.tensors[name], writer, platform)) for writer in pieces]
        for name, pieces in writers.items()
    }
