"""Tensors that share memory on the single device, and the effect of a write to one on the others.

A view whose operation needs no communication shares the memory of its base here too. Then the framework does the rest.
Where data had to move first (``x[0]`` of rows that are sharded), the view has memory of its own.
Then the rules are:

* A write to the view is written back to the base at once, or refused where it cannot be.
* A write to the base, or to another view of it, makes the view stale: a later use raises an error that asks to take the
  view again. Bringing it up to date would communicate, and which views are still in use is one rank's own knowledge.

A `Family` holds the known facts about the tensors that share one piece of memory. Only operations that write look into
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from hyper_parallel.platform.contract import Platform


class Family:
    """The DTensors that share one piece of memory.

    Attributes:
        members: weak references to those that keep something about their values, or may be out of date one day.
        children: weak references to the families of views that had to move data of this one.
        source: of such a family, its base and how to write to it.
        rivals: weak references to families that may share memory on the single device, which cannot be known.
    """

    members: list[Any]
    children: tuple[ref[Family], ...] = ()
    source: _Source | None = None
    rivals: tuple[ref[Family], ...] = ()
    _limit = 16

    def __init__(self, x: Any) -> None:
        self.members = [ref(x)]
        x._family = self

    def add(self, x: Any) -> None:
        """Make ``x`` a member."""
        if len(self.members) >= self._limit:
            self.members = [member for member in self.members if member() is not None]
            self._limit = 2 * len(self.members) + 16
        self.members.append(ref(x))
        x._family = self

    def add_child(self, child: Family) -> None:
        """Note a family of views that had to move data of this one."""
        self.children = (*(other for other in self.children if other() is not None), ref(child))


class _Source:
    """Source of a view that had to move data.

    Attributes:
        base: the tensor.
        copy: the whole view, as a tensor that is no member of its family: no circle of references.
        back: ``back(base, copy)`` writes it to the base; None where that is not possible.
        call: a mark that the views of one call share: they do not overlap.
        what: the operation, for messages.
        busy: whether a write is on its way to the base, which does not make the view out of date.
    """

    __slots__ = ("back", "base", "busy", "call", "copy", "what")

    def __init__(self, base: Any, copy: Any, back: Callable[[Any, Any], None] | None, call: Any, what: str) -> None:
        self.base, self.copy, self.back, self.call, self.what, self.busy = base, copy, back, call, what, False


class CurrentLayout:
    """``_layout`` of the DTensor class: the answer of an instance without a layout of its own. Then its view is stale,
    its values are pending, or it is just being made. As it has no ``__set__``, the layout of an instance goes before
    it."""

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        if x is not None and (pending := x.__dict__.pop("_pending", None)) is not None:
            pending.wait()
            x._layout = pending.layout
            return pending.layout
        if x is not None and (what := x.__dict__.get("_out_of_date")) is not None:
            raise ValueError(
                f"this DTensor is a view made by {what}, which had to move data between ranks, and the tensor that it "
                "is a view of was written to since: take the view again after the write"
            )
        return None


def share(x: Any, y: Any) -> None:
    """Note that ``y`` is a view of ``x`` with the same memory."""
    if y is x:
        return
    family = x._family
    if family is None:
        family = Family(x)
    if family.source is None:
        y._family = family
    else:
        family.add(y)


def apart(operands: tuple, local_operands: tuple, platform: Platform) -> tuple:
    """``local_operands`` of a write to the first, with copies of the others that share its memory. Frameworks refuse
    operands that overlap with the written tensor. On a rank whose part is small nothing may overlap: the ranks would
    not agree. A copy gives the result that the program means on all of them."""
    x = operands[0]
    return tuple(
        platform.clone(local) if local is y and y is not x and getattr(y, "_family", None) is x._family else local
        for y, local in zip(operands, local_operands, strict=True)
    )


def part(x: Any, y: Any) -> None:
    """Note that ``y`` may share memory with ``x`` on the single device, and does not here: this cannot be known."""
    for tensor in (x, y):
        if tensor._family is None:
            Family(tensor)
    x._family.rivals += _all_of(y._family)
    y._family.rivals += _all_of(x._family)


def _all_of(family: Any) -> tuple[ref[Family], ...]:
    """A family, and the families that receive its writes."""
    source = family.source
    return (ref(family),) if source is None else (ref(family), *_all_of(source.base._family))


def follow(x: Any, results: Any, backs: Any, what: str) -> None:
    """Note that ``results`` are views of ``x`` on the single device, and copies here.

    Args:
        x: the base.
        results: the views that one call gave.
        backs: for each a function ``back(x, view)`` that writes it to the base, or None.
        what: the operation, for messages.
    """
    if x._family is None:
        Family(x)
    platform, call = x._layout.mesh.platform, object()
    for y, back in zip(results, backs, strict=True):
        family = Family(y)
        family.source = _Source(x, platform.wrap(platform.alias(y), y._layout), back, call, what)
        x._family.add_child(family)


def before_write(x: Any) -> None:
    """Refuse a write to ``x`` that a single device would show in another tensor and that is lost here.

    Raises:
        ValueError: on every rank, before anything is written.
    """
    family = getattr(x, "_family", None)  # a plain number may be written to too
    while family is not None:
        if any(rival() is not None for rival in family.rivals):
            raise ValueError(
                "writing in place: whether this DTensor shares its memory with the tensor that it was made from by "
                "contiguous() or reshape() cannot be told from its shards, and both are still in use. Use clone(), "
                "which always copies, or drop one of the two"
            )
        source = family.source
        if source is None:
            return
        if source.back is None:
            raise ValueError(
                f"writing in place to a view made by {source.what}, which had to move data between ranks: the write "
                "cannot be brought back to the tensor that it is a view of. Write to that tensor (x[index] = value), "
                "redistribute it to Replicate() first, or clone() the view if only the copy is to be changed"
            )
        family = source.base._family


def forget_value(x: Any, platform: Platform) -> None:
    """``x``, a DTensor or a plain tensor, was written to: cached results of its old value are void."""
    platform.clear_cache(x)
    if getattr(x, "_layout", None) is not None:
        x._gathered = x._origin = x._ties = x._summands = None
        x._writes += 1


def after_write(x: Any) -> None:
    """Tell the others of the family of ``x`` that it was written to. Where ``x`` is a view, bring the write to its
    base.

    Call it with interception on.
    """
    family = getattr(x, "_family", None)
    if family is None:
        return
    for member in family.members:
        y = member()
        if y is not None and y is not x:
            forget_value(y, y._layout.mesh.platform)
    children: list[Any] = [child for reference in family.children if (child := reference()) is not None]
    busy = [child.source.call for child in children if child.source.busy]
    for child in children:
        if child.source.call not in busy:
            _outdate(child)
    source = family.source
    if source is not None:
        source.busy = True
        try:
            source.back(source.base, source.copy)
        finally:
            source.busy = False


def _outdate(family: Any) -> None:
    for member in family.members:
        x = member()
        if x is not None and "_layout" in x.__dict__:
            x._out_of_date = family.source.what if family.source is not None else ""
            del x._layout
    for child in family.children:
        if (found := child()) is not None:
            _outdate(found)
