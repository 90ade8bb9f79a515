"""Tensors that share memory on a single device, and the effect of a write to one on the others.

A view that needs no communication shares the memory of its base here too, and the framework does the rest. If data had
to move first (``x[0]`` of sharded rows), the view has separate memory. Then these rules apply:

* A write to the view is copied to the base at once, or refused if that is impossible.
* A write to the base, or to another view of it, makes the view stale. Its next use raises an error that asks to take
  the view again. An update would communicate, and ranks may differ in which views are still in use.

Optimizers, clipping and backward write without dispatch. `notice_writes` applies the rules after such writes.

A `Family` stores the known facts about tensors that share one piece of memory. Only operations that write read a
`Family`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import ref

from hyper_parallel.core.communication.read_past import forget_sources

if TYPE_CHECKING:
    from hyper_parallel.platform.contract import Platform


class Family:
    """The DTensors that share one piece of memory.

    Attributes:
        members: weak references to the tensors that cache facts about their values, or may become stale.
        children: weak references to the families of views that had to move data of this family.
        source: on a family whose view had to move data, the base of the view. None on others.
        rivals: weak references to families that may share memory on a single device. Local shards do not determine
            this.
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
        """Add ``x`` as a member."""
        if len(self.members) >= self._limit:
            self.members = [member for member in self.members if member() is not None]
            self._limit = 2 * len(self.members) + 16
        self.members.append(ref(x))
        x._family = self

    def add_child(self, child: Family) -> None:
        """Add the family of a view which has its own memory, because a redistribution moved data of this family."""
        self.children = (*(other for other in self.children if other() is not None), ref(child))


class _Source:
    """The base of a view that had to move data.

    Attributes:
        base: the base tensor.
        copy: the result of the operation, outside the view's family. The view is an alias of it.
        back: ``back(base, copy)`` writes the view to the base; None if that is impossible.
        call: a marker that the views of one call share. These views do not overlap.
        what: the operation, for messages.
        busy: whether a write to the view is being copied to the base. Such a write does not make the view stale.
        base_counts: the tensors that count writes to the base, and their numbers of writes when the view was valid.
        view_count: number of writes to the view when the base had its values.
    """

    __slots__ = ("back", "base", "base_counts", "busy", "call", "copy", "view_count", "what")

    def __init__(self, base: Any, copy: Any, back: Callable[[Any, Any], None] | None, call: Any, what: str) -> None:
        self.base, self.copy, self.back, self.call, self.what, self.busy = base, copy, back, call, what, False
        self.note_base()
        self.note_view()

    def note_base(self) -> None:
        """Store how often the base was written to. Members count too, because ``x.data`` does not count writes to x."""
        members = [x for member in self.base._family.members if (x := member()) is not None]
        self.base_counts = [(ref(x), _count_of(x)) for x in (self.base, *members)]

    def note_view(self) -> None:
        """Store how often the view was written to."""
        self.view_count = _count_of(self.copy)

    def is_base_written(self) -> bool:
        """Return whether the base was written to since `note_base`."""
        return any((x := member()) is not None and _count_of(x) != count for member, count in self.base_counts)

    def is_view_written(self) -> bool:
        """Return whether the view was written to since `note_view`."""
        return _count_of(self.copy) != self.view_count

    def refuse(self) -> None:
        """Raise for a write to the view that cannot reach the base.

        Raises:
            ValueError: on every rank.
        """
        if self.back is None:
            raise ValueError(
                f"writing in place to a view made by {self.what}, which moved data between ranks: the write cannot "
                "change the base tensor. Write to the base tensor (x[index] = value), or redistribute the base tensor "
                "to Replicate() first. To change only a copy, clone() the view"
            )


#: References to the families of views that had to move data and are in use. Code that writes without dispatch reads it.
MOVED: set[ref[Family]] = set()


def _count_of(x: Any) -> int:
    """Return the number of writes that the framework counted; 0 in inference mode, which counts none."""
    try:
        return x._version
    except RuntimeError:
        return 0


class CurrentLayout:
    """Descriptor of ``DTensor._layout`` that is used for instances without a layout attribute.

    Such an instance is a stale view, is pending, or is being created. The descriptor has no ``__set__``, so the
    attribute of an instance has precedence.
    """

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        if x is not None and (pending := x.__dict__.pop("_pending", None)) is not None:
            pending.wait()
            x._layout = pending.layout
            return pending.layout
        if x is not None and (what := x.__dict__.get("_out_of_date")) is not None:
            raise ValueError(
                f"this DTensor is a view made by {what}, which moved data between ranks, and its base tensor was "
                "written to afterwards: make the view again after the write"
            )
        return None


def share(x: Any, y: Any) -> None:
    """Register ``y`` as a view of ``x`` with the same memory."""
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
    """Return ``local_operands`` for a write to operand 0, with copies of other operands that share its memory.

    Frameworks refuse operands that overlap with the written tensor. On a rank with a small shard they may not overlap,
    so ranks would disagree. The copy gives the intended result on all ranks.
    """
    x = operands[0]
    return tuple(
        platform.clone(local) if local is y and y is not x and getattr(y, "_family", None) is x._family else local
        for y, local in zip(operands, local_operands, strict=True)
    )


def part(x: Any, y: Any) -> None:
    """Register that ``y``, which has separate memory, may share memory with ``x`` on a single device."""
    for tensor in (x, y):
        if tensor._family is None:
            Family(tensor)
    x._family.rivals += _all_of(y._family)
    y._family.rivals += _all_of(x._family)


def _all_of(family: Any) -> tuple[ref[Family], ...]:
    """Return the family ``family``, and all families to which its writes are copied."""
    source = family.source
    return (ref(family),) if source is None else (ref(family), *_all_of(source.base._family))


def follow(x: Any, results: Any, backs: Any, what: str) -> list[Any]:
    """Return views of ``x`` with the data of ``results``, which are copies, but would be views on a single device.

    Each view is an alias of a result, which the view's source keeps. A source must not keep an alias of the view: an
    alias refers to its tensor where no garbage collector looks, so both would stay for ever.

    Args:
        x: the base.
        results: the results of one call.
        backs: for each view, a function ``back(x, view)`` that writes it to the base, or None.
        what: the operation, for messages.
    """
    if x._family is None:
        Family(x)
    platform, call, views = x._layout.mesh.platform, object(), []
    for y, back in zip(results, backs, strict=True):
        view = platform.wrap(platform.alias(y), y._layout)
        family = Family(view)
        family.source = _Source(x, y, back, call, what)
        x._family.add_child(family)
        MOVED.add(ref(family, MOVED.discard))
        views.append(view)
    return views


def before_write(x: Any) -> None:
    """Raise for a write to ``x`` that would change another tensor on a single device, and would be lost here.

    Raises:
        ValueError: on every rank, before the write.
    """
    family = getattr(x, "_family", None)  # plain tensors have no family
    while family is not None:
        if any(rival() is not None for rival in family.rivals):
            raise ValueError(
                "writing in place to the result of contiguous() or reshape(): the shards do not tell whether the "
                "result shares memory with its source, and both tensors are in use. Use clone(), which always copies, "
                "or delete one of the two tensors"
            )
        source = family.source
        if source is None:
            return
        source.refuse()
        family = source.base._family


def forget_value(x: Any, platform: Platform) -> None:
    """Discard cached facts about the old value of ``x``, a DTensor or plain tensor that was written to."""
    platform.clear_cache(x)
    if getattr(x, "_layout", None) is not None:
        forget_sources(x)
        x._ties = None
        x._writes += 1


def after_write(x: Any) -> None:
    """Update the family of ``x`` after a write. If ``x`` is a view of a base that had to move data, write to the base.

    Call it with interception on.
    """
    family = getattr(x, "_family", None)
    if family is not None:
        _finish_write(family, x)


def _finish_write(family: Family, x: Any = None) -> None:
    """Apply a write to the member ``x`` of a family to everything that shares its memory on a single device."""
    if family.source is not None:
        family.source.refuse()
    for member in family.members:
        y = member()
        if y is not None and y is not x:
            forget_value(y, y._layout.mesh.platform)
    children: list[Any] = [child for reference in family.children if (child := reference()) is not None]
    busy = [child.source.call for child in children if child.source.busy]
    for child in children:
        if child.source.call not in busy:
            _outdate(child)
        else:
            child.source.note_base()
    source: Any = family.source
    if source is not None:
        source.busy = True
        try:
            source.back(source.base, source.copy)
        finally:
            source.busy = False
        source.note_view()


def before_writes(xs: Iterable[Any]) -> None:
    """Check writes to several tensors that are about to be made without dispatch, as by an optimizer.

    Raises:
        ValueError: on every rank, as `before_write` does, and if one tensor is a view of another whose data moved.
    """
    if not MOVED:
        return
    families = [family for x in xs if (family := getattr(x, "_family", None)) is not None]
    for family in families:
        source = family.source
        while source is not None:
            source.refuse()
            if source.base._family in families:
                raise ValueError(
                    f"one call writes to a tensor and to a view of the tensor made by {source.what}, which moved data "
                    "between ranks: the two writes would not reach each other. Write to one of them, such as an "
                    "optimizer of the base tensor alone"
                )
            source = source.base._family.source


def notice_writes(xs: Iterable[Any] = ()) -> None:
    """Finish writes that were made without dispatch, as by an optimizer. Call it with interception on.

    Args:
        xs: tensors that were written to. The framework's counts show writes to other tensors.

    Raises:
        ValueError: when a view was written to whose write cannot reach its base.
    """
    if not MOVED:
        return
    for x in xs:
        family = getattr(x, "_family", None)
        if family is not None and (family.source is None or ref(family) in MOVED):  # a stale view is left alone
            with x._layout.mesh.platform.no_grad():
                _finish_write(family)
    for family in [found for reference in [*MOVED] if (found := reference()) is not None]:
        source: Any = family.source
        platform = source.copy._layout.mesh.platform
        if not platform.counts_writes or ref(family) not in MOVED:
            continue
        if source.is_base_written():
            _outdate(family)
        elif source.is_view_written():
            with platform.no_grad():
                _finish_write(family)


def outdate_views(x: Any) -> None:
    """Make views of ``x`` that had to move data stale, because ``x`` gets another shape or other memory."""
    for reference in x._family.children if x._family is not None else ():
        if (child := reference()) is not None:
            _outdate(child)


def _outdate(family: Any) -> None:
    MOVED.discard(ref(family))
    for member in family.members:
        x = member()
        if x is not None and "_layout" in x.__dict__:
            x._out_of_date = family.source.what if family.source is not None else ""
            del x._layout
    for child in family.children:
        if (found := child()) is not None:
            _outdate(found)
