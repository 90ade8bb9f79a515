"""Places where the modules of a unit look for its parameters, and the tensors that are there."""

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
        path: path of the module, from the module of the unit.
        root: index of that among the modules of the unit.
        name: name of the parameter in the module.
        index: index of the parameter in the unit. Modules that share one have slots of the same index.
        layout: layout of the shard.
    """

    path: str
    name: str
    index: int
    layout: Layout
    root: int = 0

    def __str__(self) -> str:
        return repr(f"{self.path}.{self.name}" if self.path else self.name)


class Places:
    """The slots of the module objects of a unit. It keeps their tables of parameters alive, but no modules.

    Args:
        modules: the modules of the unit.
        slots: all slots of the unit.
        what: the unit, for messages.
    """

    def __init__(self, platform: Any, modules: Sequence[Any], slots: Sequence[Slot], what: str) -> None:
        self._platform, self._what, self._described = platform, what, slots
        holders = [_module_at(modules[slot.root], slot.path) for slot in slots]
        #: By slot: the parameter table of its module, the same one as long as the module lives; the name there; the
        #: layout of the shard; the index of the parameter. Indices are None where each has one slot, in their order.
        self._tables = [platform.own_parameters(holder) for holder in holders]
        self._names, self._layouts = [slot.name for slot in slots], [slot.layout for slot in slots]
        indices = [slot.index for slot in slots]
        self._indices = None if indices == list(range(len(slots))) else indices
        self._gone: list[Any] = []
        self._holders = [weakref.ref(holder, self._gone.append) for holder in holders]
        self._count = 1 + max((slot.index for slot in slots), default=-1)
        self.take_beside()  # attributes that a copy of a module has inherited
        #: The shards by index, while other tensors are in their place, and these.
        self._shards: list[Any] | None = None
        self._shown: Sequence[Any] = ()

    @property
    def holds_others(self) -> bool:
        """Return whether other tensors are in the place of the parameters now."""
        return self._shards is not None

    def parameters(self) -> list[Any]:
        """Return the shards in the order of their indices, also while other tensors are in their place.

        Raises:
            ValueError: where something has taken the place of one since, or a module is gone.
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
        """Return the entry of each slot, None where there is none."""
        return [table.get(name) for table, name in zip(self._tables, self._names, strict=True)]

    def _check_holders(self) -> None:
        if self._gone:
            raise self._taken([holder() is None for holder in self._holders], [False] * len(self._holders))

    def _taken(self, found: Sequence[Any], wanted: Sequence[Any]) -> ValueError:
        """Return the error for the first slot in which the two differ."""
        at = next(i for i, (x, y) in enumerate(zip(found, wanted, strict=True)) if x is not y)
        return ValueError(
            f"{self._what}: something has taken the place of its parameter {self._described[at]}. Copy values into the "
            "parameter that is there instead, and replace modules before fully_shard"
            f"{found_there(self._platform, self._found()[at])}"
        )

    def put(self, tensors: Sequence[Any], parameters: list[Any] | None = None) -> Any:
        """Let modules find these tensors, by index; returns the argument of `take_back`.

        Args:
            tensors: one for each parameter.
            parameters: an earlier result of `parameters`, if there is one.

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
        """Raise ValueError where a module is gone, or its table has something else than ``tensors``, by index."""
        self._check_holders()
        wanted = self._by_slot(tensors)
        try:
            unchanged = all(map(is_, map(getitem, self._tables, self._names), wanted))
        except KeyError:
            unchanged = False
        if not unchanged:
            raise self._taken(self._found(), wanted)

    def check_shown(self) -> None:
        """Raise ValueError where something has taken the place of a tensor that `put` has put there."""
        self.check_there(self._shown)

    def take_back(self, before: Any) -> None:
        """Let modules find the tensors that they found before a `put`."""
        found: Any = self._shards if before[0] is None else before[1]
        self._shards, self._shown = before
        self._write(found)

    def put_beside(self, tensors: Sequence[Any]) -> None:
        """Let the attributes of modules be these tensors, by index. Parameters are looked for in the modules' tables,
        and there the shards stay."""
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
        # `setitem` returns None each time, so `any` goes through all of them, without a loop in Python.
        any(map(setitem, self._tables, self._names, self._by_slot(tensors)))


def found_there(platform: Any, x: Any) -> str:
    """Return the end of a message about ``x`` in the place of a parameter, where it cannot become a DTensor."""
    foreign = platform.foreign_tensor(x)
    return "" if foreign is None else f". There is {foreign}"


def _module_at(module: Any, path: str) -> Any:
    return attrgetter(path)(module) if path else module
