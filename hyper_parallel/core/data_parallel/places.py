"""Where the modules of a unit look for its parameters, and what stands there."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem, is_, setitem
from typing import Any

from hyper_parallel.core.layouts.layout import Layout

__all__ = ["Places", "Slot", "found_there"]

_LAYOUT = attrgetter("_layout")


@dataclass(frozen=True)
class Slot:
    """A parameter in one of the modules that hold it.

    Attributes:
        path: of the module, from that of the unit.
        root: which of the unit's modules that is, where it is of several.
        name: of the parameter there.
        index: which of the unit's parameters it is; modules that share one have slots of the same index.
        layout: of the shard.
    """

    path: str
    name: str
    index: int
    layout: Layout
    root: int = 0

    def __str__(self) -> str:
        return repr(f"{self.path}.{self.name}" if self.path else self.name)


class Places:
    """The slots of the module objects of a unit. It keeps none of the modules alive, but their tables of parameters.

    Args:
        modules: those of the unit.
        slots: all of the unit.
        what: the unit, for messages.
    """

    def __init__(self, platform: Any, modules: Sequence[Any], slots: Sequence[Slot], what: str) -> None:
        self._platform, self._what, self._described = platform, what, slots
        holders = [_module_at(modules[slot.root], slot.path) for slot in slots]
        #: By slot: the table in which its module looks, which is its own as long as it lives, the name there, the
        #: layout of the shard, and which parameter it is: None where each has one slot, in their order.
        self._tables = [platform.own_parameters(holder) for holder in holders]
        self._names, self._layouts = [slot.name for slot in slots], [slot.layout for slot in slots]
        indices = [slot.index for slot in slots]
        self._indices = None if indices == list(range(len(slots))) else indices
        self._gone: list[Any] = []
        self._holders = [weakref.ref(holder, self._gone.append) for holder in holders]
        self._count = 1 + max((slot.index for slot in slots), default=-1)
        self.take_beside()  # what a copy of a module has taken along
        #: The parameters, while something else stands in their place, and that, by index.
        self._shards: list[Any] | None = None
        self._shown: Sequence[Any] = ()

    @property
    def holds_others(self) -> bool:
        """Whether something else stands in the place of the parameters now."""
        return self._shards is not None

    def parameters(self) -> list[Any]:
        """The parameters in the order of their indices: shards, whatever stands in their place now.

        Raises:
            ValueError: where something else has taken the place of one since, or a module is gone.
        """
        if self._shards is not None:
            return self._shards
        self._check_holders()
        try:
            found = list(map(getitem, self._tables, self._names))
            as_planned = all(map(is_, map(_LAYOUT, found), self._layouts))
        except (KeyError, AttributeError):  # nothing is there, or something plain
            as_planned = False
        if not as_planned:
            raise self._taken([getattr(x, "_layout", None) for x in self._found()], self._layouts)
        if self._indices is None:
            return found
        by_index: list[Any] = [None] * self._count
        for i, x in zip(self._indices, found, strict=True):
            by_index[i] = x
        return by_index

    def _by_slot(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return tensors if self._indices is None else [tensors[i] for i in self._indices]

    def _found(self) -> list[Any]:
        """By slot, what is there; None for nothing."""
        return [table.get(name) for table, name in zip(self._tables, self._names, strict=True)]

    def _check_holders(self) -> None:
        if self._gone:
            raise self._taken([holder() is None for holder in self._holders], [False] * len(self._holders))

    def _taken(self, found: Sequence[Any], wanted: Sequence[Any]) -> ValueError:
        """The error for the first slot in which the two differ."""
        at = next(i for i, (x, y) in enumerate(zip(found, wanted, strict=True)) if x is not y)
        return ValueError(
            f"{self._what}: something has taken the place of its parameter {self._described[at]}. Copy values into the "
            "parameter that is there instead, and replace modules before fully_shard"
            f"{found_there(self._platform, self._found()[at])}"
        )

    def put(self, tensors: Sequence[Any], parameters: list[Any] | None = None) -> Any:
        """Let modules find these tensors, by index; returns what `take_back` wants.

        Args:
            tensors: one for each parameter.
            parameters: what `parameters` has said before, if anybody has asked.

        Raises:
            ValueError: as `parameters`.
        """
        before = self._shards, self._shown
        if self._shards is None:
            if parameters is None:
                parameters = self.parameters()
            else:
                self.check_there(parameters)
            self._shards = parameters
        self._shown = tensors
        self._write(tensors)
        return before

    def check_there(self, tensors: Sequence[Any]) -> None:
        """Raise ValueError where modules are gone, or have something else than ``tensors``, by index, in tables."""
        self._check_holders()
        wanted = self._by_slot(tensors)
        try:
            unchanged = all(map(is_, map(getitem, self._tables, self._names), wanted))
        except KeyError:
            unchanged = False
        if not unchanged:
            raise self._taken(self._found(), wanted)

    def check_shown(self) -> None:
        """Raise ValueError where something else has taken the place of what `put` has put there."""
        self.check_there(self._shown)

    def take_back(self, before: Any) -> None:
        """Let modules find what they found before a `put`."""
        found: Any = self._shards if before[0] is None else before[1]
        self._shards, self._shown = before
        self._write(found)

    def put_beside(self, tensors: Sequence[Any]) -> None:
        """Let the attributes of modules be these tensors, by index, and leave their tables as they are: who asks for
        parameters gets the parameters."""
        for holder, name, x in zip(self._holders, self._names, self._by_slot(tensors), strict=True):
            module = holder()
            if module is not None:
                vars(module)[name] = x

    def take_beside(self) -> None:
        """Undo `put_beside`."""
        for holder, table, name in zip(self._holders, self._tables, self._names, strict=True):
            module = holder()
            if module is not None and vars(module) is not table:
                vars(module).pop(name, None)

    def _write(self, tensors: Sequence[Any]) -> None:
        # `setitem` returns None each time, so `any` comes to the last of them, without a loop in Python.
        any(map(setitem, self._tables, self._names, self._by_slot(tensors)))


def found_there(platform: Any, x: Any) -> str:
    """The end of a message about ``x`` in the place of a parameter: what it is, if no DTensor could be made of it."""
    foreign = platform.foreign_tensor(x)
    return "" if foreign is None else f". There is {foreign}"


def _module_at(module: Any, path: str) -> Any:
    return attrgetter(path)(module) if path else module
