"""Tree of the modules that a program runs, and the module that is running now in forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from hyper_parallel.platform import Platform

__all__ = ["GLOBAL", "ModuleTree", "SeenModule"]

#: The scope outside of all modules, which is the parent of all.
GLOBAL = "Global"


class SeenModule:
    """A module that was called.

    Attributes:
        name: class of the outermost module that was called, and the path from there: ``"Mlp.up"``.
        kind: class of the module.
        parents: names of the enclosing modules at its first call, from `GLOBAL` inwards.
        children: names of the modules that were first called inside it, in order.
        parameters: parameters that it holds itself, by name.
    """

    def __init__(self, name: str, kind: str, parents: tuple[str, ...]) -> None:
        self.name, self.kind, self.parents = name, kind, parents
        self.children: list[str] = []
        self.parameters: dict[str, Any] = {}


class ModuleTree:
    """Implementation of `Observer` that stores the called modules, and forwards collectives to a function.

    Attributes:
        modules: called modules by name, in the order of their first calls; `GLOBAL` is included.
    """

    def __init__(self, platform: Platform, collective: Callable[[str, list[Any]], None]) -> None:
        self._platform, self.collective = platform, collective
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._running: list[str] = [GLOBAL]
        self._backward = GLOBAL
        self.modules: dict[str, SeenModule] = {GLOBAL: SeenModule(GLOBAL, "", ())}

    def current(self, direction: str) -> str:
        """Return the module whose forward is running. In backward outside of a forward, return the module that backward
        has reached."""
        if direction == "backward" and len(self._running) == 1:
            return self._backward
        return self._running[-1]

    def with_parents(self, name: str) -> tuple[str, ...]:
        """Return the names of the enclosing modules and the module itself."""
        return (*self.modules[name].parents, name)

    def before_module(self, module: Any) -> None:
        """Enter a module before its forward. Implements `Observer.before_module`."""
        name = self._name_of(module)
        if name not in self.modules:
            parents = tuple(dict.fromkeys(self._running))
            seen = self.modules[name] = SeenModule(name, type(module).__name__, parents)
            seen.parameters = dict(self._platform.named_parameters(module))
            self.modules[self._running[-1]].children.append(name)
        self._running.append(name)

    def after_module(self, module: Any) -> None:
        """Leave a module after its forward. Implements `Observer.after_module`."""
        if len(self._running) > 1:
            self._running.pop()

    def backward_of(self, module: Any) -> None:
        """Record that backward has reached a module. Implements `Observer.backward_of`."""
        self._backward = self._name_of(module)

    def backward_before(self, module: Any) -> None:
        """Record that backward has left a module. Implements `Observer.backward_before`."""
        seen = self.modules.get(self._name_of(module))
        self._backward = seen.parents[-1] if seen is not None and seen.parents else GLOBAL

    def _name_of(self, module: Any) -> str:
        found = self._names.get(module)
        if found is None:
            root = type(module).__name__
            for path, submodule in self._platform.named_modules(module):
                self._names.setdefault(submodule, f"{root}.{path}" if path else root)
            found = self._names[module]
        return found
