"""Files of a record: for each rank an index in JSON and an array file. Reading them executes nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from hyper_parallel.debug.records.errors import RecordError
from hyper_parallel.debug.records.samples import grid_of

__all__ = ["KINDS", "Call", "Entry", "Place", "Record", "Writer", "read_record"]

FORMAT = "hyper_parallel record"
VERSION = 1
#: Kinds of entries, in the order in which a step creates them.
KINDS = ("parameter", "buffer", "input", "output", "gradient", "parameter gradient", "update")
_FILE = re.compile(r"rank-(\d+)\.json")


@dataclass(frozen=True)
class Place:
    """The mesh of ranks that share a tensor, and the placements of the tensor.

    Attributes:
        names, shape: dimension names and shape of the mesh.
        ranks: ranks of the mesh, in row-major order.
        placements: for each mesh dimension ``"R"`` for replicas, ``"S1"`` for shards of dimension 1, ``"P"`` for
            summands, ``"?"`` if unknown.
    """

    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A call of a module.

    Attributes:
        step, path: training step, and path of the module.
        kind: class of the module.
        number: number of earlier calls of the module in the step.
        parent: index of the enclosing call, -1 if there is none.
        inputs, outputs: numbers of the tensors.
    """

    step: int
    path: str
    kind: str
    number: int
    parent: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A tensor as one rank recorded it.

    Attributes:
        kind: one of `KINDS`.
        step: training step, from 0.
        path: path of the module, or name of the parameter.
        number: number of the module's call in this step.
        slot: place among the inputs or outputs of the call; empty for a single tensor.
        of: for a gradient, ``"input"`` or ``"output"``.
        tensor: number of the tensor, as in `Call`; -1 for a parameter.
        dtype: name of the framework's dtype.
        local: shape of this rank's local tensor.
        whole: shape of the full tensor; None if unknown.
        place: index of the `Place`; -1 if no mesh is known.
        boxes: boxes of the local tensor: (offsets, sizes, offsets in the local tensor). Empty if only the placements
            are known.
        sampled: whether only the places of `samples.grid_of` are recorded.
        values: index of the first number in the array file, and count of numbers; None for a replica of another rank's
            values.
        digest: digest of the bytes. Equal digests mean equal tensors.
        squares: sum of the squares of the finite local elements.
        not_finite: number of elements that are infinite or NaN.
        sums: this rank's share of `samples.signed_sums` of the full tensor, if only samples are recorded; else empty.
        own_sums: `samples.signed_sums` of the local tensor by itself, if other ranks may have replicas; else empty.
        scale: for an update, root mean square of the parameter; else 0.
    """

    kind: str
    step: int
    path: str
    number: int
    slot: str
    of: str
    tensor: int
    dtype: str
    local: tuple[int, ...]
    whole: tuple[int, ...] | None
    place: int
    boxes: tuple[tuple[tuple[int, ...], ...], ...]
    sampled: bool
    values: tuple[int, int] | None
    digest: str
    squares: float
    not_finite: int
    sums: tuple[float, ...]
    own_sums: tuple[float, ...]
    scale: float = 0.0

    @property
    def key(self) -> tuple[str, int, str, int, str, str]:
        """Return the key of the tensor to which the entry belongs. Entries of several ranks for one tensor have equal
        keys."""
        return (self.kind, self.step, self.path, self.number, self.slot, self.of)


@dataclass
class Record:
    """The data that all ranks recorded of a run.

    Attributes:
        path: path of the folder.
        platform: name of the backend.
        largest: maximum number of elements of a tensor that is recorded in full.
        root: mesh of all ranks; None if there is none.
        calls: calls of the first rank, in the order in which they started.
        entries: entries of each rank, in the order of recording.
        places: places of each rank.
        arrays: the numbers of each rank.
        notes: tensors that could not be recorded, with reasons.
    """

    path: str
    platform: str
    largest: int
    root: Place | None
    calls: list[Call]
    entries: dict[int, list[Entry]]
    places: dict[int, list[Place]]
    arrays: dict[int, np.ndarray]
    notes: list[str] = field(default_factory=list)


class Writer:
    """Writer of the files of one rank. Values are written at once, and the index at the end."""

    def __init__(self, folder: str | Path, rank: int, ranks: int) -> None:
        self._folder, self._rank, self._count = Path(folder), rank, 0
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.glob("rank-*.json"):
            match = _FILE.fullmatch(file.name)
            # Files of this rank's earlier run, and of ranks that do not exist now.
            if match and (int(match[1]) == rank or (rank == 0 and int(match[1]) >= ranks)):
                file.unlink(missing_ok=True)
        self._arrays: IO[bytes] = (self._folder / f"rank-{rank}.bin").open("wb")

    def values(self, x: np.ndarray) -> tuple[int, int]:
        """Write numbers, and return their start and count in the file."""
        flat = np.ascontiguousarray(x, "<f8").reshape(-1)
        self._arrays.write(flat.data)
        self._count += flat.size
        return self._count - flat.size, flat.size

    def close(self, index: Mapping[str, Any], calls: list[Call], entries: list[Entry], places: list[Place]) -> None:
        """Write the index, which completes the record."""
        self._arrays.close()
        data = {
            "format": FORMAT,
            "version": VERSION,
            "rank": self._rank,
            **index,
            "numbers": self._count,
            "places": [asdict(place) for place in places],
            "calls": [asdict(call) for call in calls],
            "entries": [asdict(entry) for entry in entries],
        }
        (self._folder / f"rank-{self._rank}.json").write_text(json.dumps(data), encoding="utf-8")


def read_record(path: str | Path) -> Record:
    """Read the record in a folder.

    Raises:
        RecordError: if there is no record, or a file is missing, truncated or of another format.
    """
    folder = Path(path)
    found = {int(m[1]): file for file in sorted(folder.glob("rank-*.json")) if (m := _FILE.fullmatch(file.name))}
    if not found:
        raise RecordError(
            f"{folder} holds no record: it has no file rank-0.json. `hyper_parallel.debug.record` writes this file "
            "when its context ends"
        )
    entries, places, arrays, calls = {}, {}, {}, {}
    indexes = {rank: _index(file, rank) for rank, file in sorted(found.items())}
    first = min(indexes)
    head = indexes[first]
    for rank, index in indexes.items():
        file = found[rank]
        if index["ranks"] != head["ranks"]:
            raise RecordError(
                f"{file} belongs to a run of {index['ranks']} ranks, and {found[first].name} to a run of "
                f"{head['ranks']} ranks: one folder holds files of two runs. Record into an empty folder"
            )
        places[rank] = [_make(Place, row, file) for row in index["places"]]
        entries[rank] = [_make(Entry, row, file) for row in index["entries"]]
        arrays[rank] = _numbers(file.with_suffix(".bin"), index["numbers"])
        calls[rank] = [_make(Call, row, file) for row in index["calls"]]
        _check(entries[rank], places[rank], calls[rank], index, file)
        lacking = sorted({r for place in places[rank] for r in place.ranks} - set(found))
        if lacking:
            raise RecordError(
                f"{folder} lacks rank-{lacking[0]}.json, and rank {lacking[0]} shares tensors with rank {rank}: copy "
                "the files of all ranks into one folder"
            )
    root = None if head["root"] is None else _make(Place, head["root"], found[first])
    _check((), () if root is None else (root,), (), head, found[first])
    if root is not None and set(root.ranks) != set(found):
        root = None
    notes = list(dict.fromkeys(note for index in indexes.values() for note in index["notes"]))
    return Record(str(path), head["platform"], head["largest"], root, calls[first], entries, places, arrays, notes)


#: Fields of the index of a rank, and their types.
_INDEX: dict[str, Any] = {
    "rank": int,
    "ranks": int,
    "platform": str,
    "largest": int,
    "root": (dict, type(None)),
    "numbers": int,
    "notes": list,
    "places": list,
    "calls": list,
    "entries": list,
}


def _index(file: Path, rank: int) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RecordError(f"{file} is not the index of a record: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordError(f"{file} is not the index of a record: its format is not {FORMAT!r}")
    if data.get("version") != VERSION:
        raise RecordError(
            f"{file} has version {data.get('version')!r} of the format, and this release reads version {VERSION}: "
            "record the run again"
        )
    for name, kind in _INDEX.items():
        if not isinstance(data.get(name), kind):
            raise RecordError(f"{file} is damaged: its field {name!r} is {data.get(name)!r:.60}")
    if data["rank"] != rank or not 0 <= rank < data["ranks"]:
        raise RecordError(f"{file} is the index of rank {data['rank']} of {data['ranks']}: the file was renamed")
    return data


def _make(cls: Any, row: Any, file: Path) -> Any:
    """Return an object of class ``cls`` from a JSON object, with tuples in place of lists."""
    names = [f.name for f in fields(cls)]
    if not isinstance(row, dict) or set(row) != set(names):
        raise RecordError(f"{file} is damaged: {row!r:.80} is not a valid {cls.__name__.lower()}")
    return cls(**{name: _frozen(row[name]) for name in names})


def _frozen(x: Any) -> Any:
    return tuple(map(_frozen, x)) if isinstance(x, list) else x


def _check(entries: Sequence[Entry], places: Sequence[Place], calls: Sequence[Call], head: Any, file: Path) -> None:
    """Raise RecordError if parts of an index contradict each other."""
    checks: tuple[tuple[str, Sequence[Any], Callable[[Any], bool]], ...] = (
        ("place", places, _is_place),
        ("call", calls, lambda call: _is_call(call, len(calls))),
        ("entry", entries, lambda entry: _is_entry(entry, len(places), head["numbers"], head["largest"])),
    )
    for kind, rows, fits in checks:
        for i, row in enumerate(rows):
            try:
                right = fits(row)
            except (TypeError, ValueError):  # fields that are no numbers, or are missing
                right = False
            if not right:
                name = f" of {row.path!r} ({row.kind})" if kind != "place" else ""
                raise RecordError(f"{file} is damaged: its {kind} {i}{name} is not consistent with the others")


def _is_place(place: Place) -> bool:
    """Return whether ``place`` has one rank for each element of its mesh, and one placement for each mesh dimension."""
    letters = all(re.fullmatch(r"[RP?]|S\d+", letter) for letter in place.placements)
    known = len(place.placements) == len(place.shape) == len(place.names)
    return known and letters and math.prod(place.shape) == len(place.ranks) > 0


def _is_call(call: Call, count: int) -> bool:
    numbers = (call.step, call.number, *call.inputs, *call.outputs)
    return -1 <= call.parent < count and min(numbers) >= 0 and isinstance(call.path, str) and isinstance(call.kind, str)


def _is_entry(entry: Entry, places: int, numbers: int, largest: int) -> bool:
    start, count = entry.values or (0, 0)
    whole = entry.local if entry.whole is None else entry.whole
    if any(not isinstance(n, int) or n < 0 for n in (start, count, *entry.local, *whole)):
        return False
    expected = math.prod(map(len, grid := grid_of(whole, largest)))
    if entry.whole is not None:
        expected = 0
        for offsets, sizes, _ in entry.boxes:
            bounds = zip(offsets, sizes, whole, grid, strict=True)
            if any(o < 0 or n < 1 or o + n > size for o, n, size, _ in bounds):
                return bool(0 in whole)
            box = zip(offsets, sizes, grid, strict=True)
            expected += math.prod(int(np.searchsorted(i, o + n) - np.searchsorted(i, o)) for o, n, i in box)
    named = entry.kind in KINDS and isinstance(entry.path, str) and -1 <= entry.place < places
    held = entry.values is None or (count == expected and start + count <= numbers)
    return named and held and min(entry.squares, entry.scale, entry.not_finite) >= 0


def _numbers(file: Path, count: int) -> np.ndarray:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error}") from error
    if size != 8 * count:
        raise RecordError(
            f"{file} has {size} bytes, and its index expects {8 * count} bytes: the file was truncated or changed"
        )
    return np.memmap(file, "<f8", "r", shape=(count,)) if count else np.zeros(0)
