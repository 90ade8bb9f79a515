"""Surroundings of `fully_shard`, for the tables of both frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.pairs import covering, drawn

__all__ = ["CHOICES", "HAS_TENSOR_PARALLELISM", "full_set", "pairs", "settle", "title"]

Row = dict[str, Any]

#: Name of a choice -> its options, of which the first goes with everything.
CHOICES: dict[str, tuple[Any, ...]] = {
    "mesh": ("dp x tp", "dp", "replicate x shard", "replicate x shard x tp"),
    "units": ("blocks", "nested", "root"),
    "reshard": (None, True, False),
    #: The part that is recomputed in backward, and how: by restoring the values of forward, or as a function of its
    #: own.
    "checkpoint": ("none", "non-reentrant", "reentrant"),
    #: In which dtype is computed: single or double, by autocast, or by the policy of `fully_shard`.
    "lower": ("no", "autocast", "policy"),
    "tied": (False, True),
    "frozen": (False, True),
    #: A parameter without dimensions, a unit without parameters, a unit that is not called.
    "scalar": (False, True),
    "empty": (False, True),
    "idle": (False, True),
    "sequence": (False, True),
    "coalesce": (False, True),
    "accumulate": (False, True),
    "loss_parallel": (False, True),
    #: One batch of all ranks, as DTensors.
    "distributed": (False, True),
    "offload": (False, True),
    "calls": (1, 2),
    "sizes": ("even", "uneven"),
}
#: Meshes with a dimension of tensor parallelism.
HAS_TENSOR_PARALLELISM = ("dp x tp", "replicate x shard x tp")


def settle(row: Row) -> Row:
    """``row`` without choices that mean nothing next to others."""
    row = dict(row)
    if row["mesh"] not in HAS_TENSOR_PARALLELISM:
        row.update(sequence=False, coalesce=False, loss_parallel=False)
    else:
        # The styles of the decoder take this rank's part of a batch.
        row.update(distributed=False)
    if not row["sequence"]:
        row.update(coalesce=False)
    return row


def pairs(settle: Callable[[Row], Row] = settle) -> list[Row]:
    """Rows in which each pair of choices occurs that can."""
    return covering(CHOICES, settle)


def full_set(settle: Callable[[Row], Row], more: int, seed: int) -> list[Row]:
    """Rows in which every three choices occur that can, after those of `pairs`, and ``more`` at random."""
    rows = pairs(settle)
    rows += covering(CHOICES, settle, 3, rows)
    return rows + drawn(CHOICES, settle, more, seed)


def title(row: Row) -> str:
    """A row as the name of a test."""
    words = []
    for kind, value in row.items():
        if value is True:
            words.append(kind)
        elif value is not False and value != CHOICES[kind][0]:
            words.append(f"{kind}={value}".replace(" ", ""))
    return "-".join(words) or "plain"
