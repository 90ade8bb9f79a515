"""Heads that give this rank's part of the classes as a plain tensor, which a loss must not take for all of them."""

from __future__ import annotations

import weakref
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh

#: how many classes this rank has of a head -> heads: (module, what messages say of it).
_HEADS: dict[int, list[tuple[weakref.ref[Any], str]]] = {}


def remember_part_of_classes(module: Any, path: str, features: int, own: int, mesh: DeviceMesh) -> None:
    """Remember a module whose plain output has ``own`` of its ``features``, and no layer beside it that takes these."""
    what = (
        f"the logits have {own} classes, which is this rank's part of the {features} that {path!r} gives: its "
        f"ColwiseParallel shards them over {mesh}, and its output is plain. Give {path!r} "
        "ColwiseParallel(use_local_output=False) and compute the loss inside loss_parallel(), or "
        "ColwiseParallel(output_layouts=Replicate()), or use vocab_parallel_cross_entropy for the part"
    )
    _HEADS.setdefault(own, []).append((weakref.ref(module), what))


def refuse_part_of_classes(count: int) -> None:
    """To be called where a loss takes plain logits of ``count`` classes.

    Raises:
        ValueError: on each rank, when this is its part of the classes of a head.
    """
    heads = _HEADS.get(count)
    if not heads:
        return
    heads[:] = [(module, what) for module, what in heads if module() is not None]
    if heads:
        raise ValueError(heads[-1][1])
