"""Heads whose plain output holds only this rank's classes: a loss must not treat these as all classes.

Plain logits do not record which module made them. Logits may come from such a head if their number of classes is the
head's local number. If autograd records, the graph of the logits must also lead to the weight of the head's last call.
Without recorded operations, as in an evaluation, the number of classes alone decides, as long as the head exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.mesh.device_mesh import DeviceMesh

#: number of local classes -> heads with that number.
_HEADS: dict[int, list[PartOfClasses]] = {}
_OF_MODULE: weakref.WeakKeyDictionary[Any, PartOfClasses] = weakref.WeakKeyDictionary()


class PartOfClasses:
    """A head and its copies, with the weight of each in its last call.

    Args:
        module: a column-parallel layer of 1-D ``mesh`` whose output is plain.
        mesh: mesh of the layer.
        what: the message of an error about its output.
    """

    def __init__(self, module: Any, mesh: DeviceMesh, what: str) -> None:
        self._mesh, self.what = mesh, what
        #: head or copy -> weak reference to the weight of its last call; None before the first call, and if autograd
        #: did not record it.
        self._weights: weakref.WeakKeyDictionary[Any, Callable[[], Any] | None] = weakref.WeakKeyDictionary()
        self._weights[module] = None

    def noting(self, forward: Callable[..., Any], module: Any) -> Callable[..., Any]:
        """Return ``forward``, the forward of the head and its copies, extended to store the weight of each call."""
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
        """Return whether plain logits may come from the head. For None, return True."""
        if logits is None:
            return True
        weights = [ref and ref() for ref in self._weights.values()]
        return any(w is None or self._mesh.platform.is_made_with(logits, w) is not False for w in weights)


def _nothing() -> None:
    """Return None, as a dead weak reference does."""


def part_of_classes(module: Any) -> PartOfClasses | None:
    """Return the `PartOfClasses` that is registered for a module, or None."""
    return _OF_MODULE.get(module)


def remember_part_of_classes(module: Any, path: str, features: int, own: int, mesh: DeviceMesh) -> None:
    """Register a module whose plain output is this rank's shard of ``own`` features. Call this function if no following
    layer expects a shard."""
    what = (
        f"the logits have {own} classes, this rank's shard of the {features} output features of {path!r}. The "
        f"ColwiseParallel of {path!r} shards them over {mesh} and returns a plain tensor. Use "
        f"ColwiseParallel(use_local_output=False) for {path!r} and compute the loss inside loss_parallel(). Or use "
        "ColwiseParallel(output_layouts=Replicate()), or vocab_parallel_cross_entropy"
    )
    head = _OF_MODULE[module] = PartOfClasses(module, mesh, what)
    _HEADS.setdefault(own, []).append(head)


def refuse_part_of_classes(count: int, logits: Any = None) -> None:
    """Raise for plain logits in a loss that have ``count`` local classes of a head. ``logits`` is None if only the
    number of classes is known.

    Raises:
        ValueError: on each rank, when ``count`` is its number of classes of a head.
    """
    heads = _HEADS.get(count)
    if not heads:
        return
    heads[:] = [head for head in heads if head.lives]
    for head in reversed(heads):
        if head.may_give(logits):
            raise ValueError(head.what)
