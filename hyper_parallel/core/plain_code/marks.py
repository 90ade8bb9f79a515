"""Marks: records of how a plain tensor is placed on each mesh dimension, for a program that is followed.

A mark is stored on its tensor. A tensor without a mark is replicated. After an ambiguous view a tensor has several
possible marks. Later operations drop the marks for which they would be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from hyper_parallel.core.communication.recorder import dim_name
from hyper_parallel.core.layouts.layout import Layout, replicated_layout
from hyper_parallel.core.layouts.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.findings import Finding
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.observation import MARKS


class Mark(NamedTuple):
    """A possible placement of a plain tensor.

    Attributes:
        layout: layout that the tensor would have as a DTensor.
        summed: mesh dimensions along which the tensor is replicated and its cotangent is partial.
        merged: number of consecutive local elements, if the sharded dimension was merged into an outer dimension, such
            as (batch, heads) into (batch * heads); otherwise 0.
    """

    layout: Layout
    summed: tuple[int, ...] = ()
    merged: int = 0

    @property
    def sharded(self) -> bool:
        """Return whether any mesh dimension shards the tensor."""
        return any(isinstance(p, Shard) for p in self.layout.placements)

    def __str__(self) -> str:
        names = [dim_name(self.layout.mesh, d) for d in range(self.layout.mesh.ndim)]
        words = [
            "the same on all ranks, with summands as gradients" if d in self.summed else str(p)
            for d, p in enumerate(self.layout.placements)
        ]
        return ", ".join(f"{word} on {name}" for word, name in zip(words, names, strict=True))


@dataclass(frozen=True)
class Joined:
    """Marks of a tensor that was concatenated from pieces with different marks. Splitting the tensor restores these
    marks.

    Attributes:
        dim: the joined dimension, not negative.
        sizes: sizes of the pieces along ``dim``.
        marks: marks of each piece.
    """

    dim: int
    sizes: tuple[int, ...]
    marks: tuple[Ways, ...]

    def __str__(self) -> str:
        return "pieces that differ in how their gradients are read"


@dataclass(frozen=True)
class Lost:
    """The mark of a tensor whose placement is no longer known.

    Attributes:
        why: the reason, for reports.
        found: whether a finding is the reason: the values or gradient of the tensor are wrong.
    """

    why: str
    found: bool = False

    def __str__(self) -> str:
        return f"not followed ({self.why})"


#: Possible marks of a tensor. None in place of a mark means replicated.
Ways: TypeAlias = "tuple[Mark | None, ...] | Joined | Lost"
WHOLE: Ways = (None,)


@dataclass(frozen=True)
class Held:
    """The record on a marked tensor: its possible placements, and findings about it.

    Attributes:
        ways: possible marks of the tensor.
        source: name of the module whose style returned the tensor, or returned a tensor that it was computed from.
        stated: whether the style itself returned the tensor.
        findings: findings that affect the tensor.
    """

    ways: Ways
    source: str = ""
    stated: bool = False
    findings: tuple[Finding, ...] = ()


def held(x: Any) -> Held | None:
    """Return the `Held` of a marked tensor, or None for any other object."""
    return getattr(x, MARKS, None)


def ways_of(x: Any) -> Ways:
    """Return the possible placements of a tensor; `WHOLE` for a tensor without a mark."""
    found = held(x)
    return WHOLE if found is None else found.ways


def layout_of(mark: Mark | None, mesh: DeviceMesh, shape: tuple[int, ...]) -> Layout:
    """Return the layout, with its global shape, of a tensor with ``mark`` and the local ``shape``."""
    return replicated_layout(mesh, shape) if mark is None else mark.layout


def is_even(layout: Layout) -> bool:
    """Return whether all ranks have shards of one size. Otherwise sizes in the program differ between ranks."""
    return all(len(layout.part_sizes(dim)) == 1 for dim in range(layout.ndim))


def mark_of(layout: Layout, summed: tuple[int, ...] = (), merged: int = 0) -> Mark | None:
    """Return the `Mark` for a layout, or None for replicated values with replicated gradients."""
    if not summed and all(
        p is Replicate() or size == 1 for p, size in zip(layout.placements, layout.mesh.shape, strict=True)
    ):
        return None
    return Mark(layout, summed, merged)


def write_marks(platform: Platform, tensors: Sequence[Any], record: Held, ways: Sequence[Ways]) -> None:
    """Mark ``tensors[i]`` with a copy of ``record`` that has the possible placements ``ways[i]``.

    Replicated tensors without findings get no mark. Numbers without a cotangent, such as indices of scores, get no
    partial cotangent.
    """
    for x, found in zip(tensors, ways, strict=False):
        if isinstance(found, tuple) and not (platform.is_floating_point(x) or "complex" in str(x.dtype).lower()):
            found = tuple(dict.fromkeys(m and mark_of(m.layout, merged=m.merged) for m in found))
        if found != WHOLE or record.findings:
            platform.write_mark(x, replace(record, ways=found))
        elif held(x) is not None:
            platform.write_mark(x, None)


def describe(mark: Mark | None, shape: tuple[int, ...]) -> str:
    """Return a description of a tensor with ``mark`` and local ``shape``, for messages."""
    if mark is None:
        return f"a tensor of shape {tuple(shape)}, the same on all ranks"
    if mark.sharded:
        return f"a part of shape {tuple(shape)} of {tuple(mark.layout.shape)} ({mark})"
    what = "a summand" if any(p.is_partial() for p in mark.layout.placements) else "a tensor"
    return f"{what} of shape {tuple(shape)} ({mark})"


def partial_dims(layout: Layout) -> tuple[int, ...]:
    """Return the mesh dimensions along which a layout is partial."""
    return tuple(d for d, p in enumerate(layout.placements) if isinstance(p, Partial) and layout.mesh.shape[d] > 1)
