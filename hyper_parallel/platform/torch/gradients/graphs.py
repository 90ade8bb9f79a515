"""Nodes of autograd graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["nodes_below"]


def nodes_below(roots: Iterable[Any]) -> set[Any]:
    """Return the nodes of the graphs that begin at the nodes ``roots``, leaves included. A root may be None."""
    found = {node for node in roots if node is not None}
    todo = list(found)
    while todo:
        new = {node for node, _ in todo.pop().next_functions if node is not None and node not in found}
        found |= new
        todo += new
    return found
