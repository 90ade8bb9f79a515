"""What functions and classes a framework consists of, to see what has been put in their places."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["changes", "snapshot"]


def snapshot(framework: str) -> dict[str, Any]:
    """Every function, class and descriptor in the loaded modules of ``framework`` and in their classes, by name."""
    found: dict[str, Any] = {}
    classes: dict[type, str] = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] != framework:
            continue
        for name, value in list(vars(module).items()):
            if not _is_code(value):
                continue
            found[f"{module_name}.{name}"] = value
            # Not isinstance: some objects that stand for a class warn when they are asked for theirs.
            if issubclass(type(value), type) and str(getattr(value, "__module__", "")).partition(".")[0] == framework:
                classes.setdefault(value, f"{module_name}.{name}")
    for cls, where in classes.items():
        found.update({f"{where}.{name}": value for name, value in vars(cls).items() if _is_code(value)})
    return found


def _is_code(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was replaced, removed, or added to a class that was there before: name -> what is there after."""
    added = {name for name in after.keys() - before.keys() if name.rpartition(".")[0] in before}
    changed = {name for name, value in before.items() if after.get(name) is not value}
    return {name: after.get(name) for name in added | changed}
