"""`mindspore.recompute` of a cell, which would give gradients to the tensors that replace the cell's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Parameter, nn

__all__ = ["checked_block"]


def checked_block(original: Callable, recomputed: Any, block: Any) -> Any:
    """Run ``original(recomputed, block)``, which gives the parameters of ``block``, a cell or a method, to the cell
    ``recomputed``.

    While a unit of data parallelism runs, other tensors stand in its table of parameters. MindSpore would compute
    gradients for these tensors.

    Raises:
        ValueError: for a cell with parameters of a unit that runs.
    """
    cell = getattr(block, "__self__", block)
    if isinstance(cell, nn.Cell):
        for path, part in cell.cells_and_names():
            for name, p in part._params.items():
                if p is not None and not isinstance(p, Parameter) and p.requires_grad:
                    raise ValueError(
                        f"mindspore.recompute({type(cell).__name__}) gives no gradient of "
                        f"{'.'.join(filter(None, (path, name)))!r}, a parameter of an outer unit of fully_shard or "
                        f"replicate. Apply fully_shard or replicate to the {type(cell).__name__} too, or recompute "
                        "the whole unit, or call mindspore.recompute(..., use_reentrant=False)"
                    )
    return original(recomputed, block)
