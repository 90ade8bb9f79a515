"""Traversal of tensors inside the arguments and results of modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(tree: Any, convert: Callable[[Any], Any], platform: Any, unknown: Callable[[Any], Any]) -> Any:
    """Return ``tree`` with ``convert(x)`` in place of each tensor in tuples, lists, mappings and dataclasses.

    Named tuples keep their class. ``unknown(x)`` replaces other objects, which may also contain tensors.
    """
    if platform.is_tensor(tree):
        return convert(tree)
    if isinstance(tree, (type(None), bool, int, float, complex, str, bytes)):
        return tree
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(item, convert, platform, unknown) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        entries = {key: map_tensors(value, convert, platform, unknown) for key, value in tree.items()}
        if all(entries[key] is value for key, value in tree.items()):
            return tree
        if type(tree) is dict:
            return entries
        new = copy.copy(tree)
        for key, value in entries.items():
            new[key] = value  # type: ignore[index]
        return new
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        changed = {name: map_tensors(value, convert, platform, unknown) for name, value in fields.items()}
        if all(changed[name] is value for name, value in fields.items()):
            return tree
        return dataclasses.replace(tree, **changed)
    return unknown(tree)


def tensors_in(tree: Any, platform: Any) -> list[Any]:
    """Return the tensors of a tree that `map_tensors` would convert."""
    found: list[Any] = []
    _collect(tree, platform.is_tensor, found)
    return found


def _collect(tree: Any, is_tensor: Callable[[Any], bool], found: list[Any]) -> None:
    if is_tensor(tree):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, is_tensor, found)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            _collect(item, is_tensor, found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for f in dataclasses.fields(tree):
            _collect(getattr(tree, f.name, None), is_tensor, found)
