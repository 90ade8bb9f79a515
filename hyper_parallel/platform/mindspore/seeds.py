"""Where MindSpore's random operations of the old kind take their numbers from.

A function such as `ops.dropout` makes a new primitive for each call, with the global seed and a counter of its kind,
which it moves on. A cell such as `nn.Dropout` makes one primitive when it is made; its kernel then keeps a stream of
numbers of its own, one for each shape that it meets. Without a global seed both have the seeds (0, 0), which let every
process draw what it likes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from mindspore import ops

__all__ = ["COUNTERS", "is_of_one_call", "layer_stream", "undo_draw"]

# `mindspore.common.seed` is a function too, which hides the module from an import statement.
_seed = importlib.import_module("mindspore.common.seed")

#: (kernel, seed given to the operation or 0) -> counter
COUNTERS: dict[tuple[str, int], int] = _seed._KERNEL_SEED

_STRIDE: int = _seed.keyConstant[0] ^ _seed.keyConstant[2]

#: primitive of a layer -> mesh -> the primitive in its place, None for one without a seed
_STREAMS: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


def undo_draw(kernel: str, seeds: tuple[int, int]) -> int | None:
    """Move the counter that gave ``seeds`` to an operation back, because the operation will be called again.

    Returns:
        The seed given to the operation, None for none.
    """
    if seeds == (0, 0):
        return None  # without a global seed nothing was drawn
    for (name, given), counter in COUNTERS.items():
        if name == kernel and _seed._truncate_seed(counter - _STRIDE) == seeds[1]:
            COUNTERS[name, given] = counter - _STRIDE
            return given or None
    return None


def is_of_one_call(primitive: Any) -> bool:
    """Whether a function made the primitive for one call, and not a cell or a program, which keep it."""
    return primitive.attrs.get("random_cache") is False


def layer_stream(primitive: Any, mesh: Any, of_first_rank: Callable[[Any, Any], Any]) -> Any:
    """The dropout that stands for that of a layer on a mesh: with the layer's seeds as the mesh's first rank has them,
    and a stream that begins anew, so that all ranks draw the same, and what the unsharded layer draws.

    Args:
        primitive: the layer's.
        mesh: the mesh.
        of_first_rank: core's function.

    Returns:
        A primitive, the same for each call; None for a layer without a seed, of which each call may draw its own.
    """
    streams = _STREAMS.setdefault(primitive, WeakKeyDictionary())
    if mesh not in streams:
        seeds = of_first_rank((primitive.Seed0, primitive.Seed1), mesh)
        streams[mesh] = None if seeds == (0, 0) else ops.Dropout(primitive.keep_prob, *seeds)
    return streams[mesh]
