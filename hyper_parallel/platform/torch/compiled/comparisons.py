"""Check that compiled code takes plain shards of equal size on all ranks.

Eager mode compares plain shards in the first call of a module. Compiled code compares them in the first run of a graph:
tracing leaves a call of `mark` in the graph, and `take_marks` removes it before the backend gets the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.fx import GraphModule

from hyper_parallel.platform.contract import Comparison

__all__ = ["NUMBER", "Shards", "mark", "take_marks"]

#: Attribute of a module with a style: its number in this process, as a string. Equivalent modules share compiled code,
#: but each module compares its own shards.
NUMBER = "_hyper_parallel_number"

_KEYS = count()
_BY_KEY: WeakValueDictionary[int, Shards] = WeakValueDictionary()


class Shards:
    """The plain shards at one input or output of a style.

    Args:
        compare: comparison from the data of the style.

    Attributes:
        key: number that identifies this object in a graph.
        compared: numbers of the modules whose shards the ranks have already compared.
    """

    def __init__(self, compare: Comparison) -> None:
        self.compare, self.key = compare, next(_KEYS)
        self.compared: set[str] = set()
        _BY_KEY[self.key] = self


def mark(x: Tensor, key: int, module: str, number: str = "") -> Tensor:
    """Return ``x``, a plain shard for the module with ``number``; messages call the module ``module``. Torch's compiler
    leaves the call in the graph without tracing it: see `outside`."""
    return x


def take_marks(graph: GraphModule) -> Callable[[], None] | None:
    """Remove all calls of `mark` from a graph.

    Returns:
        A function that compares the shards that were not compared yet, or None if there are none.
    """
    found: list[tuple[Shards, str, str, tuple[int, ...]]] = []
    for part in graph.modules():
        marks = [node for node in part.graph.nodes if node.target is mark] if isinstance(part, GraphModule) else []
        for node in marks:
            x, key, module, number = node.args if len(node.args) == 4 else (*node.args, "")
            shards = _BY_KEY.get(key)
            if shards is not None and number not in shards.compared:
                found.append((shards, module, number, tuple(map(_size, x.meta["example_value"].shape))))
            node.replace_all_uses_with(x)
            part.graph.erase_node(node)
        if marks:
            part.recompile()

    def compare() -> None:
        for shards, module, number, shape in found:
            if number not in shards.compared:
                shards.compare(module, shape)
                shards.compared.add(number)

    return compare if found else None


def _size(n: Any) -> int:
    """Return a size of a traced tensor: its value in the call that triggered the compilation."""
    return n if isinstance(n, int) else n.node.hint
