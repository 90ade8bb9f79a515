"""The index of a checkpoint: the file of each rectangle of each tensor, and all values other than tensors."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel.checkpoint import disk
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.tensor_files import ITEMSIZES
from hyper_parallel.checkpoint.tilings import is_tiling
from hyper_parallel.checkpoint.values import check

__all__ = ["INDEX", "LATEST", "Index", "Part", "StoredTensor", "read_index", "seal"]

#: Name of the index file. A directory without it is no checkpoint.
INDEX = "index.json"
#: The latest time that an index may have, in the year 2116, and the largest size of a file or of a tensor's dimension.
LATEST, _LARGEST = 1 << 62, 1 << 62
#: Allowed names of files and runs, because later saves and messages use the names of an index.
_FILE, _RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}"), re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Indexes of version 1 have no checksum.
_FORMAT, _VERSION = "hyper_parallel.checkpoint", 2
#: The end of an index: the SHA-256 of all text before it.
_SEAL = re.compile(rb',"sum":"([0-9a-f]{64})"\}')
_SEAL_LENGTH = 74


class Part(NamedTuple):
    """A rectangle of a tensor in a file.

    Attributes:
        offsets: offset of its first element, per tensor dimension.
        sizes: size per tensor dimension.
        file: name of the file, in the directory of the checkpoint.
        entry: name of this rectangle in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    entry: str


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype: common name of the dtype, such as ``"bfloat16"``.
        shape: global shape.
        placement: description of the placement in the save, for people. Loading ignores it.
        parts: rectangles that tile the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    placement: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the full tensor."""
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


@dataclass
class Index:
    """Contents of the index.

    Attributes:
        run: identifier of the run that saved it.
        time: time of the save in nanoseconds since 1970; later than all previous checkpoints of the run.
        files: name -> size in bytes.
        tensors: tensors by name.
        aliases: further names of tensors, such as names of tied parameters -> the name in ``tensors``.
        values: the saved nest, as JSON, with a placeholder for each tensor, module and optimizer.
        checksums: file -> entry -> CRC-32; empty if they were not requested.
        writer: name of the process that saved it, for people.
    """

    run: str
    time: int
    files: dict[str, int]
    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]
    values: Any
    checksums: dict[str, dict[str, int]] = field(default_factory=dict)
    writer: str = ""

    def find(self, name: str) -> str | None:
        """Return the key in ``tensors`` of a tensor named ``name``; None if there is no such tensor."""
        return name if name in self.tensors else self.aliases.get(name)

    def to_json(self) -> str:
        """Return the text of the index file."""
        files = {name: at for at, name in enumerate(self.files)}
        tensors = {
            name: {
                "dtype": x.dtype,
                "shape": x.shape,
                "placement": x.placement,
                "parts": [[p.offsets, p.sizes, files[p.file], p.entry] for p in x.parts],
            }
            for name, x in self.tensors.items()
        }
        content = {"format": _FORMAT, "version": _VERSION, "run": self.run, "writer": self.writer, "time": self.time}
        content |= {"files": self.files}
        content |= {"tensors": tensors, "aliases": self.aliases, "values": self.values, "checksums": self.checksums}
        return seal(json.dumps(content, separators=(",", ":"), allow_nan=False))


def seal(content: str) -> str:
    """Return the JSON of an index with its checksum at the end.

    Args:
        content: JSON of an index without a checksum.
    """
    body = content[:-1]
    return f'{body},"sum":"{hashlib.sha256(body.encode()).hexdigest()}"}}'


def _is_whole(content: bytes) -> bool:
    """Return whether an index matches its checksum."""
    found = _SEAL.fullmatch(content, max(len(content) - _SEAL_LENGTH, 0))
    return found is not None and hashlib.sha256(content[: found.start()]).hexdigest().encode() == found[1]


def read_index(directory: Path) -> Index:
    """Return the index of a checkpoint.

    Raises:
        CheckpointError: if there is no index, or it is damaged, of another format, or of a later version.
    """
    path = directory / INDEX
    try:
        text = disk.read_file(path)
        content = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_missing(directory)) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        said = f"{error}" or type(error).__name__
        raise CheckpointError(f"{path} is damaged: it is not JSON ({said})") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not the index of a checkpoint: its format is not {_FORMAT!r}")
    version = content.get("version")
    if type(version) is not int or not 1 <= version <= _VERSION:
        raise CheckpointError(
            f"{path} is of version {version!r} of the format, and this release of hyper_parallel reads versions up to "
            f"{_VERSION}: load it with the release that saved it, or a later one"
        )
    if "sum" in content if version == 1 else not _is_whole(text):
        raise CheckpointError(f"{path} is damaged: its checksum differs, so the file was changed after it was saved")
    try:
        return _parse(path, content)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__} {error}") from error


def _missing(directory: Path) -> str:
    if not directory.exists():
        return f"there is no checkpoint at {directory}, which does not exist"
    if not directory.is_dir():
        return f"{directory} is a file: a checkpoint of hyper_parallel is a directory"
    if any((directory / name).exists() for name in (".metadata", "model.safetensors.index.json", "model.safetensors")):
        return (
            f"{directory} has no {INDEX}: it is a checkpoint in another format. Load checkpoints of "
            "torch.distributed.checkpoint with torch.distributed.checkpoint"
        )
    inside = sorted(p.parent.name for p in directory.glob(f"*/{INDEX}"))
    if inside:
        return (
            f"{directory} holds {len(inside)} checkpoint(s), such as {inside[-1]}: pass the path of one checkpoint, "
            "such as the result of latest(directory)"
        )
    return f"{directory} has no {INDEX}: it is not a checkpoint, or its save was never completed"


def _parse(path: Path, content: Mapping[str, Any]) -> Index:
    files = dict(content["files"])
    if wrong := [name for name, size in files.items() if type(size) is not int or not 0 <= size <= _LARGEST]:
        raise ValueError(f"file {str(wrong[0])[:100]!r} has the invalid size {files[wrong[0]]!r}")
    if wrong_names := [name for name in files if _FILE.fullmatch(name) is None]:
        raise ValueError(
            f"{wrong_names[0]!r} is outside of the checkpoint, or is not the name of a file of a checkpoint"
        )
    names = [*files]
    tensors = {}
    for name, x in content["tensors"].items():
        shape = _sizes(x["shape"])
        parts = tuple(Part(_sizes(at), _sizes(n), names[_sizes([f])[0]], str(entry)) for at, n, f, entry in x["parts"])
        stored = StoredTensor(str(x["dtype"]), shape, str(x["placement"]), parts)
        if stored.dtype not in ITEMSIZES:
            raise ValueError(f"tensor {name!r} has the unknown dtype {stored.dtype!r}")
        _check_parts(name, stored)
        tensors[name] = stored
    aliases = {str(name): str(target) for name, target in content["aliases"].items()}
    if lost := [target for target in aliases.values() if target not in tensors]:
        raise ValueError(f"another name refers to tensor {lost[0]!r}, which is missing")
    check(content["values"])
    sums = content["checksums"]
    if not isinstance(sums, dict) or not all(isinstance(of_file, dict) for of_file in sums.values()):
        raise ValueError(f"the checksums are not a dict of dicts, one for each file: {str(sums)[:100]}")
    time = content["time"]
    if type(time) is not int or not 0 <= time <= LATEST:
        raise ValueError(f"it has an invalid time of saving, {time!r}")
    run, writer = content["run"], content.get("writer")
    if not isinstance(run, str) or _RUN.fullmatch(run) is None:
        raise ValueError(f"{str(run)[:100]!r} is not the identifier of a run")
    return Index(
        run,
        time,
        files,
        tensors,
        aliases,
        content["values"],
        sums,
        writer if isinstance(writer, str) and len(writer) <= 200 and writer.isprintable() else "",
    )


def _sizes(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n <= _LARGEST for n in numbers):
        raise ValueError(f"{numbers!r} is not a list of sizes")
    return tuple(numbers)


def _check_parts(name: str, x: StoredTensor) -> None:
    """Raise ValueError unless the parts tile the tensor."""
    for part in x.parts:
        fits = len(part.offsets) == len(part.sizes) == len(x.shape)
        if not fits or any(o + n > size for o, n, size in zip(part.offsets, part.sizes, x.shape, strict=True)):
            raise ValueError(
                f"tensor {name!r} of shape {x.shape} has a part of sizes {part.sizes} at offsets {part.offsets}: the "
                "part exceeds the tensor"
            )
    held, whole = sum(math.prod(part.sizes) for part in x.parts), math.prod(x.shape)
    if held != whole:
        raise ValueError(
            f"the parts of tensor {name!r} of shape {x.shape} {'overlap' if held > whole else 'do not cover it'}"
        )
    if len(x.parts) > 1 and not is_tiling(x.shape, [(part.offsets, part.sizes) for part in x.parts]):
        raise ValueError(f"the parts of tensor {name!r} of shape {x.shape} overlap")
