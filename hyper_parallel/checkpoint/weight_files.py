"""Layout of Hugging Face's weight files: one file, or several files with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint import disk
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.tensor_files import Entry

__all__ = ["INDEX", "WEIGHTS", "in_files", "index_of", "read_weight_index"]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def in_files(entries: Iterable[Entry], limit: int) -> dict[str, list[Entry]]:
    """Return the entries of each file by its name, in order.

    Args:
        entries: entries of all weights.
        limit: maximum bytes of a file. A larger tensor gets a file of its own.
    """
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.nbytes for e in groups[-1]) + entry.nbytes > limit:
            groups.append([])
        groups[-1].append(entry)
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    stem, suffix = WEIGHTS.split(".")
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.{suffix}": group for i, group in enumerate(groups, 1)}


def index_of(files: Mapping[str, Sequence[Entry]]) -> bytes:
    """Return the content of the index of several files."""
    content = {
        "metadata": {"total_size": sum(entry.nbytes for group in files.values() for entry in group)},
        "weight_map": {entry.name: name for name, group in files.items() for entry in group},
    }
    return json.dumps(content, indent=2).encode()


def read_weight_index(path: Path) -> tuple[dict[str, Any], set[str]]:
    """Read the index of several files; return its content, and the names of the files.

    Raises:
        CheckpointError: if the index cannot be read, or is damaged.
    """
    try:
        content = json.loads(disk.read_file(path))
        return content, {str(name) for name in content["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__} {error}") from error
