"""Marks: what a plain tensor stands for on each mesh dimension, kept on the tensor while its program is followed.

A tensor without marks is the same on all ranks. Where a view is ambiguous, a tensor has several marks: it stands for
one of them. An operation keeps the marks that it can be right for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from hyper_parallel.core.communication.recorder import dim_name
from hyper_parallel.core.layouts.layout import Layout, replicated_layout
from hyper_parallel.core.layouts.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.findings import Finding
from hyper_parallel.platform.contract.observation import MARKS


@dataclass(frozen=True)
class Mark:
    """One way in which a plain tensor may lie.

    Attributes:
        layout: where its elements lie, as of a DTensor.
        summed: mesh dimensions along which it is the same on all ranks, and its cotangent is one summand a rank.
        merged: of a part whose cut dimension was merged under another one, (batch, heads) to (batch * heads): how many
            elements of the merged dimension lie on this rank in a row; else 0.
    """

    layout: Layout
    summed: tuple[int, ...] = ()
    merged: int = 0

    @property
    def sharded(self) -> bool:
        """Return whether some mesh dimension cuts the tensor."""
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
    """Pieces with different marks that were joined along a dimension: taking them apart gives the marks again.

    Attributes:
        dim: the dimension, not negative.
        sizes: of the pieces there.
        marks: of each piece.
    """

    dim: int
    sizes: tuple[int, ...]
    marks: tuple[Ways, ...]

    def __str__(self) -> str:
        return "pieces that differ in how their gradients are read"


@dataclass(frozen=True)
class Lost:
    """Nothing is known of a tensor any more.

    Attributes:
        why: the reason, for people.
        found: whether that is a finding: then the tensor has other values, or another gradient, than on one device.
    """

    why: str
    found: bool = False

    def __str__(self) -> str:
        return f"not followed ({self.why})"


#: What a tensor may stand for; None in place of a mark is the same on all ranks.
Ways: TypeAlias = "tuple[Mark | None, ...] | Joined | Lost"
WHOLE: Ways = (None,)


@dataclass(frozen=True)
class Held:
    """The marks of a tensor.

    Attributes:
        ways: the marks.
        source: name of the module whose style gave the tensor, or one that it was computed of.
        stated: whether the style itself gave it.
        findings: those that it was computed with.
    """

    ways: Ways
    source: str = ""
    stated: bool = False
    findings: tuple[Finding, ...] = ()


def held(x: Any) -> Held | None:
    """The marks that a tensor has, None for anything without."""
    return getattr(x, MARKS, None)


def ways_of(x: Any) -> Ways:
    """Return the marks of a tensor, `WHOLE` for one without."""
    found = held(x)
    return WHOLE if found is None else found.ways


def layout_of(mark: Mark | None, mesh: DeviceMesh, shape: tuple[int, ...]) -> Layout:
    """The layout of a tensor with ``mark`` and local ``shape``."""
    return replicated_layout(mesh, shape) if mark is None else mark.layout


def is_even(layout: Layout) -> bool:
    """Return whether all ranks have parts of one size. Else sizes in the program are each rank's own."""
    return all(len(layout.part_sizes(dim)) == 1 for dim in range(layout.ndim))


def mark_of(layout: Layout, summed: tuple[int, ...] = (), merged: int = 0) -> Mark | None:
    """The mark of a layout, None where that is the same on all ranks in values and gradients."""
    if not summed and all(
        p is Replicate() or size == 1 for p, size in zip(layout.placements, layout.mesh.shape, strict=True)
    ):
        return None
    return Mark(layout, summed, merged)


def describe(mark: Mark | None, shape: tuple[int, ...]) -> str:
    """A tensor of local ``shape`` with ``mark``, for messages."""
    if mark is None:
        return f"a tensor of shape {tuple(shape)}, the same on all ranks"
    if mark.sharded:
        return f"a part of shape {tuple(shape)} of {tuple(mark.layout.shape)} ({mark})"
    what = "a summand" if any(p.is_partial() for p in mark.layout.placements) else "a tensor"
    return f"{what} of shape {tuple(shape)} ({mark})"


def partial_dims(layout: Layout) -> tuple[int, ...]:
    """The mesh dimensions over which a layout is a sum or another reduction."""
    return tuple(d for d, p in enumerate(layout.placements) if isinstance(p, Partial) and layout.mesh.shape[d] > 1)
