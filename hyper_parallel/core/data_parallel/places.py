"""Where the modules of a unit look for its parameters, and what stands there."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from hyper_parallel.core.dtensor.layouts.layout import Layout

__all__ = ["Places", "Slot"]


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
    """The slots of the module objects of a unit. It keeps none of the modules alive.

    Args:
        modules: those of the unit.
        slots: all of the unit.
        what: the unit, for messages.
    """

    def __init__(self, platform: Any, modules: Sequence[Any], slots: Sequence[Slot], what: str) -> None:
        self._own, self._what = platform.own_parameters, what
        self._slots = [
            (weakref.ref(_module_at(modules[slot.root], slot.path)), slot.name, slot.index, slot.layout)
            for slot in slots
        ]
        self._described = slots
        self._count = 1 + max((slot.index for slot in slots), default=-1)
        #: The parameters, while something else stands in their place.
        self._shards: list[Any] | None = None

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
        found: list[Any] = [None] * self._count
        own = self._own
        for holder, name, index, layout in self._slots:
            module = holder()
            p: Any = None if module is None else own(module).get(name)
            if getattr(p, "_layout", None) is not layout:
                raise self._taken(name, index)
            found[index] = p
        return found

    def _taken(self, name: str, index: int) -> ValueError:
        slot = next(s for s in self._described if s.index == index and s.name == name)
        return ValueError(
            f"{self._what}: something has taken the place of its parameter {slot}. Copy values into the parameter that "
            "is there instead"
        )

    def put(self, tensors: Sequence[Any], parameters: list[Any] | None = None) -> tuple[Any, list[Any]]:
        """Let modules find these tensors, by index; returns what `take_back` wants.

        Args:
            tensors: one for each parameter.
            parameters: what `parameters` has said before, if anybody has asked.

        Raises:
            ValueError: as `parameters`.
        """
        before, own, found = self._shards, self._own, []
        if before is None:
            self._shards = parameters = self.parameters() if parameters is None else parameters
        else:
            parameters = None
        try:
            for holder, name, index, _ in self._slots:
                module = holder()
                table: Any = {} if module is None else own(module)
                x = table.get(name)
                if parameters is not None and x is not parameters[index]:
                    raise self._taken(name, index)
                found.append((table, name, x))
                table[name] = tensors[index]
        except ValueError:
            self.take_back((before, found))
            raise
        return before, found

    def take_back(self, kept: tuple[Any, list[Any]]) -> None:
        """Let modules find what they found before a `put`."""
        self._shards, found = kept
        for table, name, x in found:
            table[name] = x


def _module_at(module: Any, path: str) -> Any:
    return attrgetter(path)(module) if path else module
