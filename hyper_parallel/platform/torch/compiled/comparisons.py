"""Check that the plain shards that compiled code takes are equal in size on all ranks.

Eager mode compares them in the first call of a module. Compiled code does in the first run of a graph: `mark` leaves a
mark in the graph that is traced, which is taken out before a backend gets the graph.
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
#: and compare their shards each for itself.
NUMBER = "_hyper_parallel_number"

_KEYS = count()
_BY_KEY: WeakValueDictionary[int, Shards] = WeakValueDictionary()


class Shards:
    """The plain shards that a style takes at one place.

    Args:
        compare: of the style's data.

    Attributes:
        key: the number that stands for it in a graph.
        compared: the modules, by number, for which the ranks have compared such shards.
    """

    def __init__(self, compare: Comparison) -> None:
        self.compare, self.key = compare, next(_KEYS)
        self.compared: set[str] = set()
        _BY_KEY[self.key] = self


def mark(x: Tensor, key: int, module: str, number: str = "") -> Tensor:
    """``x``, a plain shard for the module ``number``, which messages call ``module``. Torch's compiler does not look
    inside: see `outside`."""
    return x


def take_marks(graph: GraphModule) -> Callable[[], None] | None:
    """Take all marks out of a graph.

    Returns:
        A function that compares the shards that were not compared yet; None without these.
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
    """A size of a tensor that the compiler traces with: that of the call for which it compiles."""
    return n if isinstance(n, int) else n.node.hint
