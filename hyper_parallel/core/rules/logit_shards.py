"""Heads that give this rank's part of the classes as a plain tensor. A loss must not take it for all classes.

Plain logits do not say where they come from. They say how many classes they have and, where operations are recorded,
which tensors they were computed with. If a backward would not reach the weight of the head's last call, they are not
the head's. Where nothing is recorded, as in an evaluation, the number alone counts, as long as the head lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.mesh.device_mesh import DeviceMesh

#: how many classes this rank has of a head -> heads.
_HEADS: dict[int, list[PartOfClasses]] = {}
_OF_MODULE: weakref.WeakKeyDictionary[Any, PartOfClasses] = weakref.WeakKeyDictionary()


class PartOfClasses:
    """A head and its copies, with the weight of each in its last call.

    Args:
        module: a column-parallel layer of 1-D ``mesh`` whose output is plain.
        mesh: its mesh.
        what: the text of an error about its output.
    """

    def __init__(self, module: Any, mesh: DeviceMesh, what: str) -> None:
        self._mesh, self.what = mesh, what
        #: None before the first call, and where nothing was recorded of it.
        self._weights: weakref.WeakKeyDictionary[Any, Callable[[], Any] | None] = weakref.WeakKeyDictionary()
        self._weights[module] = None

    def noting(self, forward: Callable[..., Any], module: Any) -> Callable[..., Any]:
        """``forward(module, ...)`` of the head, and of its copies, that notes the weight in each call."""
        platform = self._mesh.platform
        name, own, records = platform.kind_of(module).weight, platform.own_parameters, platform.requires_grad
        last: tuple[Any, Any, bool] = (weakref.ref(module), _nothing, False)

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal last
            weight = own(module).get(name)
            recorded = weight is not None and records(weight)
            of, noted, was_recorded = last
            if of() is not module or noted() is not weight or was_recorded is not recorded:
                found = None if weight is None else weakref.ref(weight)
                self._weights[module] = found if recorded else None
                last = (weakref.ref(module), found or _nothing, recorded)
            return forward(module, *args, **kwargs)

        return call

    @property
    def lives(self) -> bool:
        """Return whether the head, or a copy of it, is alive."""
        return bool(self._weights)

    def may_give(self, logits: Any) -> bool:
        """Return whether plain logits may be the output of the head, or computed of it; of None nothing is known."""
        if logits is None:
            return True
        weights = [ref and ref() for ref in self._weights.values()]
        return any(w is None or self._mesh.platform.is_made_with(logits, w) is not False for w in weights)


def _nothing() -> None:
    """Stand in for a dead weak reference."""


def part_of_classes(module: Any) -> PartOfClasses | None:
    """Return the part of the classes that is remembered for a module."""
    return _OF_MODULE.get(module)


def remember_part_of_classes(module: Any, path: str, features: int, own: int, mesh: DeviceMesh) -> None:
    """Remember a module whose plain output has ``own`` of its ``features``, with no layer next to it that takes
    these."""
    what = (
        f"the logits have {own} classes, which is this rank's part of the {features} that {path!r} gives: its "
        f"ColwiseParallel shards them over {mesh}, and its output is plain. Give {path!r} "
        "ColwiseParallel(use_local_output=False) and compute the loss inside loss_parallel(), or "
        "ColwiseParallel(output_layouts=Replicate()), or use vocab_parallel_cross_entropy for the part"
    )
    head = _OF_MODULE[module] = PartOfClasses(module, mesh, what)
    _HEADS.setdefault(own, []).append(head)


def refuse_part_of_classes(count: int, logits: Any = None) -> None:
    """Refuse plain logits of ``count`` classes in a loss; None where only their number is known.

    Raises:
        ValueError: on each rank, when this is its part of the classes of a head.
    """
    heads = _HEADS.get(count)
    if not heads:
        return
    heads[:] = [head for head in heads if head.lives]
    for head in reversed(heads):
        if head.may_give(logits):
            raise ValueError(head.what)
