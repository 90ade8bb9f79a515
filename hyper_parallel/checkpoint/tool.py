"""Display of checkpoints, and conversion of their weights to other files, without any framework."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import directories, disk
from hyper_parallel.checkpoint.index import Index, read_index
from hyper_parallel.checkpoint.loading import Files
from hyper_parallel.checkpoint.nest import joined
from hyper_parallel.checkpoint.progress import Progress
from hyper_parallel.checkpoint.tensor_files import Entry, element_type, write_tensors
from hyper_parallel.checkpoint.values import KIND
from hyper_parallel.checkpoint.weight_files import INDEX, in_files, index_of
from hyper_parallel.debug.text import fold_lines, format_table
from hyper_parallel.platform.terminal import printable

__all__ = ["contents", "convert", "show"]

#: Maximum bytes of a file of weights, unless one tensor is larger. It is Hugging Face's limit.
SHARD = 5 * 10**9


def contents(path: Path) -> dict[str, Any]:
    """Return the contents that `show` prints, as JSON. Values are encoded as in ``index.json``.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged.
    """
    index = read_index(directories.locate(path))
    return {
        "path": str(path),
        "saved": _time_of(index).isoformat(),
        "run": index.run,
        "files": len(index.files),
        "bytes": _bytes_of(index),
        "tensors": {
            name: {"shape": list(x.shape), "dtype": x.dtype, "bytes": x.nbytes, "placement": x.placement}
            for name, x in index.tensors.items()
        },
        "aliases": dict(index.aliases),
        "values": {name: value for name, value, _ in _values(index.values, "")},
    }


def show(path: Path, width: int | None = None) -> str:
    """Return a table of a checkpoint's tensors (name, shape, dtype, size and placement), and its values.

    Args:
        path: path of the checkpoint.
        width: width of a terminal. In a wider table, names have separate lines.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged.
    """
    index = read_index(directories.locate(path))
    tensors = [(name, str(x.shape), x.dtype, f"{x.nbytes:,}", x.placement) for name, x in index.tensors.items()]
    tensors += [(name, "", "", "", f"the same tensor as {target}") for name, target in index.aliases.items()]
    rows = [tuple(map(printable, row)) for row in tensors]
    table = format_table(("tensor", "shape", "dtype", "bytes", "placement when it was saved"), rows, right=[3])
    if width is not None and max(map(len, table.split("\n"))) > width:
        table = "\n".join(_under_its_name(*row) for row in rows)
    values = [(name, printable(f"{name} = {text}")) for name, _, text in _values(index.values, "")]
    lines = [
        printable(path),
        f"saved {_time_of(index):%Y-%m-%d %H:%M:%S UTC} by run {index.run}: {len(index.tensors)} tensors, "
        f"{_bytes_of(index):,} bytes, {len(index.files)} files",
        *(line for name, line in values if name == "step"),
        "",
        table,
    ]
    others = [line for name, line in values if name != "step"]
    text = "\n".join([*lines, *(["", *others] if others else [])])
    return text if width is None else fold_lines(text, width)


def _under_its_name(name: str, shape: str, dtype: str, size: str, placement: str) -> str:
    return f"{name}\n    " + (f"{shape} {dtype}, {size} bytes, {placement}" if shape else placement)


def _time_of(index: Index) -> datetime:
    return datetime.fromtimestamp(index.time / 1e9, timezone.utc)


def _bytes_of(index: Index) -> int:
    return sum(x.nbytes for x in index.tensors.values())


def _values(x: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yield path, value and a short text for each entry that is neither tensor nor module."""
    if isinstance(x, dict) and KIND not in x:
        for name, value in x.items():
            yield from _values(value, joined(path, name))
    elif isinstance(x, dict) and x[KIND] in ("tensor", "module"):
        return
    elif isinstance(x, dict) and x[KIND] == "optimizer":
        yield path, x, f"an optimizer of {sum(len(group['parameters']) for group in x['groups'])} parameters"
    elif isinstance(x, dict) and x[KIND] == "ranks":
        yield path, x, f"one for each of {len(x['of'])} ranks"
    elif isinstance(x, dict) and x[KIND] == "object":
        yield from _values(x["state"], path)
    else:
        text = json.dumps(x)
        yield path, x, text if len(text) <= 100 else f"{text[:100]}..."


def convert(path: Path, to: str, out: Path, part: str | None = None) -> list[Path]:
    """Write the weights of a checkpoint as full tensors. One tensor at a time is in memory.

    Args:
        path: path of the checkpoint.
        to: ``"one-file"``: all tensors, by their names, in one safetensors file; ``"huggingface"``: the tensors of a
            model in a directory as Hugging Face's `save_pretrained` writes it, without ``config.json``. Large weights
            get several files and an index.
        out: the new file or directory.
        part: name of a part of the checkpoint, which is removed from the names. None stands for the only module with
            ``"huggingface"``, and for everything with ``"one-file"``.

    Returns:
        The paths of the written files.

    Raises:
        ValueError: if ``out`` exists, or the checkpoint has no such part, or ``part`` is None and there are several
            modules.
        CheckpointError: if the checkpoint is damaged, or the disk is full.
    """
    place = directories.locate(path)
    index = read_index(place)
    if out.exists():
        raise ValueError(f"{printable(out)} exists already: choose another path")
    if part is None:
        part = _only_module(index, path) if to == "huggingface" else ""
    names = [name for name in index.tensors if not part or name.startswith(f"{part}.")]
    if not names:
        raise ValueError(f"{printable(path)} has no tensors under the key {part!r}")
    files = Files(place, index)
    entries = [_entry(name, name[len(part) + 1 :] if part else name, index, files) for name in names]
    if index.checksums:
        files.compare(index.tensors[name] for name in names)
    with Progress(f"converting {path.name}", sum(entry.nbytes for entry in entries), True) as progress:
        if to == "one-file":
            _write(out, entries, progress.advance)
            return [out]
        return _write_directory(out, entries, progress.advance)


def _only_module(index: Index, path: Path) -> str:
    found: list[str] = []

    def visit(x: Any, place: str) -> None:
        if isinstance(x, dict) and x.get(KIND) == "module":
            found.append(place)
        elif isinstance(x, dict) and KIND not in x:
            for name, value in x.items():
                visit(value, joined(place, name))

    visit(index.values, "")
    if len(found) != 1:
        listed = ", ".join(map(repr, found)) or "none"
        raise ValueError(
            f"{printable(path)} has {len(found)} modules ({listed}): name the part to convert with --part NAME"
        )
    return found[0]


def _entry(name: str, called: str, index: Index, files: Files) -> Entry:
    x = index.tensors[name]
    files.check(x)

    def read() -> memoryview:
        whole = np.empty(x.shape, element_type(x.dtype))
        for part in x.parts:
            box = tuple(slice(0, n) for n in part.sizes)
            place: Any = (*(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True)), ...)
            files.read(part, box, whole[place])
        return whole.reshape(-1).view(np.uint8).data

    return Entry(called, x.dtype, x.shape, read)


def _write(path: Path, entries: list[Entry], advance: Callable[[int], None]) -> None:
    """Write a file that gets its name when all data is on disk."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    write_tensors(draft, entries, False, advance, {"format": "pt"})
    disk.rename(draft, path)
    disk.sync_directory(path.parent)


def _write_directory(out: Path, entries: list[Entry], advance: Callable[[int], None]) -> list[Path]:
    out.mkdir(parents=True)
    files = in_files(entries, SHARD)
    for name, group in files.items():
        _write(out / name, group, advance)
    written = [out / name for name in files]
    if len(files) > 1:
        written.append(out / INDEX)
        with disk.NewFile(written[-1]) as file:
            file.write(index_of(files))
    return written
