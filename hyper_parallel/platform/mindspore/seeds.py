"""The counters behind MindSpore's random operations of the old kind: each call takes its numbers from the global seed
and the counter of its kind, and moves the counter on."""

from __future__ import annotations

import importlib

__all__ = ["COUNTERS", "undo_draw"]

# `mindspore.common.seed` is a function too, which hides the module from an import statement.
_seed = importlib.import_module("mindspore.common.seed")

#: (kernel, seed given to the operation or 0) -> counter
COUNTERS: dict[tuple[str, int], int] = _seed._KERNEL_SEED

_STRIDE: int = _seed.keyConstant[0] ^ _seed.keyConstant[2]


def undo_draw(kernel: str, drawn: int) -> int | None:
    """Move the counter that gave ``drawn`` back, because the operation will be called again.

    Returns:
        The seed given to the operation, None for none.
    """
    for (name, given), counter in COUNTERS.items():
        if name == kernel and _seed._truncate_seed(counter - _STRIDE) == drawn:
            COUNTERS[name, given] = counter - _STRIDE
            return given or None
    return None
