"""The functions and classes of a framework, to see which of them have been replaced."""

from __future__ import annotations

import re
import sys
from types import FunctionType
from typing import Any

__all__ = ["Snapshot", "changes", "snapshot"]

#: (identity of a module or class, name) -> the module or class, its attribute of that name.
Snapshot = dict[tuple[int, str], tuple[Any, Any]]


def snapshot(framework: str) -> Snapshot:
    """Every function with its code, class, descriptor and pattern in the loaded modules of ``framework`` and in their
    classes."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if module is not None and name.partition(".")[0] == framework
    ]
    found = {(id(m), name): (m, value) for m in modules for name, value in list(vars(m).items()) if _is_code(value)}
    # Not isinstance: some objects that stand for a class warn when they are asked for theirs.
    classes = [value for _, value in found.values() if issubclass(type(value), type) and _belongs(value, framework)]
    for cls in classes:
        found.update({(id(cls), name): (cls, value) for name, value in vars(cls).items() if _is_code(value)})
    functions = [value for _, value in found.values() if type(value) is FunctionType and _belongs(value, framework)]
    found.update({(id(f), "__code__"): (f, f.__code__) for f in functions})
    return found


def _belongs(value: Any, framework: str) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == framework


def _is_code(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__") or type(value) is re.Pattern


def changes(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Attributes that were replaced, removed, or added to a class that existed before: name -> the value now."""
    classes = {id(value) for _, value in before.values() if issubclass(type(value), type)}
    changed = {}
    for key in before.keys() | after.keys():
        holder, value = after.get(key, (before.get(key, (None, None))[0], None))
        is_changed = before[key][1] is not value if key in before else key[0] in classes
        if key[1] == "__code__" and not (key in before and key in after):
            continue  # of a function that was replaced itself, or that is new
        if is_changed:
            where = f"{holder.__module__}.{holder.__qualname__}" if id(holder) in classes else holder.__name__
            changed[f"{where}.{key[1]}"] = value
    return changed
