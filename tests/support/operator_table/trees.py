"""Tensors within nested tuples, lists and dicts, as the arguments and results of operators have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["leaves_of", "mapped"]


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """``tree`` with ``change(leaf)`` in place of each leaf."""
    if isinstance(tree, (tuple, list)):
        items = [mapped(item, change) for item in tree]
        return type(tree)(items) if type(tree) in (tuple, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    return change(tree)


def leaves_of(tree: Any) -> Iterator[Any]:
    """All leaves, from left to right."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves_of(item)
    elif isinstance(tree, dict):
        yield from leaves_of(tuple(tree.values()))
    else:
        yield tree
