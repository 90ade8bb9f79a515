"""Places in a framework that patches change: attributes, entries of lists, sets and dicts, code of functions."""

from __future__ import annotations

import inspect
import pkgutil
from functools import reduce
from typing import Any

__all__ = ["ABSENT", "Attribute", "Entry", "Place", "place_of"]

#: Marker for a missing attribute.
ABSENT: Any = object()


def _resolved(path: str) -> Any:
    """Resolve a dotted name, in which one component may be an entry of a dict: ``package.module.table[key].name``."""
    dotted, bracket, rest = path.partition("[")
    found = pkgutil.resolve_name(dotted)
    if not bracket:
        return found
    key, _, names = rest.partition("]")
    return reduce(getattr, filter(None, names.split(".")), found[key])


class Attribute:
    """An attribute of a module or class."""

    def __init__(self, target: str) -> None:
        path, _, self._name = target.rpartition(".")
        self._holder = _resolved(path)

    def held(self) -> str:
        if self._name in vars(self._holder):
            return "own"
        return "absent" if self.original() is ABSENT else "inherited"

    def original(self) -> Any:
        return inspect.getattr_static(self._holder, self._name, ABSENT)

    def write(self, value: Any) -> None:
        self._was_own = self.held() == "own"
        setattr(self._holder, self._name, value)

    def put_back(self, replacement: Any, original: Any) -> bool:
        """Restore the original, unless other code has put another object there."""
        if self.original() is not replacement:
            return False
        if self._was_own:
            setattr(self._holder, self._name, original)
        else:
            delattr(self._holder, self._name)
        return True


class Entry:
    """An additional entry of a list or set, or of a dict under a key."""

    def __init__(self, target: str) -> None:
        self._path, self._key = target[:-1].rsplit("[", 1)
        self.original()

    @property
    def _holder(self) -> Any:
        """The container, resolved each time because frameworks may replace it by another list or set."""
        return _resolved(self._path)

    def held(self) -> str:
        if self._key:
            return "own" if self._key in self._holder else "absent"
        return "absent"

    def original(self) -> Any:
        return self._holder

    def write(self, value: Any) -> None:
        if self._key:
            self._holder[self._key] = value
        elif isinstance(self._holder, set):
            self._holder.update(_several(value))
        else:
            self._holder.extend(_several(value))

    def put_back(self, replacement: Any, original: Any) -> bool:
        if self._key and self._holder.get(self._key) is replacement:
            del self._holder[self._key]
            return True
        if not self._key and all(entry in self._holder for entry in _several(replacement)):
            for entry in _several(replacement):
                self._holder.remove(entry)
            return True
        return False


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class _Code:
    """Code of a function, ``package.module.function.__code__``, which runs under every name of the function."""

    def __init__(self, target: str) -> None:
        self._function = _resolved(target.rpartition(".")[0])

    def held(self) -> str:
        return "own" if inspect.isfunction(self._function) else "absent"

    def original(self) -> Any:
        return getattr(self._function, "__code__", ABSENT)

    def write(self, value: Any) -> None:
        self._function.__code__ = value

    def put_back(self, replacement: Any, original: Any) -> bool:
        """Restore the original code, unless the function has other code since."""
        if self._function.__code__ is not replacement:
            return False
        self._function.__code__ = original
        return True


Place = Attribute | _Code | Entry


def place_of(target: str) -> Place:
    """Return the place of a patch target; `patching.Patch` describes the dotted names."""
    if target.endswith("]"):
        return Entry(target)
    return _Code(target) if target.endswith(".__code__") else Attribute(target)
