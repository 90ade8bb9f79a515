"""How weights lie in files as Hugging Face has them: in one, or in several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from hyper_parallel.checkpoint.tensor_files import Entry

__all__ = ["INDEX", "WEIGHTS", "in_files", "index_of"]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def in_files(entries: Iterable[Entry], limit: int) -> dict[str, list[Entry]]:
    """Name of a file -> what is in it, in order.

    Args:
        entries: all weights.
        limit: bytes of a file; a tensor that is larger has a file of its own.
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
    """Content of the index of several files."""
    content = {
        "metadata": {"total_size": sum(entry.nbytes for group in files.values() for entry in group)},
        "weight_map": {entry.name: name for name, group in files.items() for entry in group},
    }
    return json.dumps(content, indent=2).encode()
