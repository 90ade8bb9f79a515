"""Result shapes of functions that are called again with their original arguments, computed by torch with tensors
without data."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract.dispatch import Given
from hyper_parallel.platform.torch.op_table.binding import UnboundCallError, call_placed

__all__ = ["result_shapes"]


def result_shapes(given: Given, shapes: tuple) -> tuple[tuple[int, ...], ...]:
    """Return the result shapes of a call whose operands have ``shapes``.

    Raises:
        UnboundCallError: when torch cannot compute them, or rejects the call: its own message is then better.
    """
    found = _found(given.func, shapes, tuple(x.dtype for x in given.operands), given.places, given.rest, given.named)
    if found is None:
        raise UnboundCallError
    return found


@functools.lru_cache(1 << 12)
def _found(func: Any, shapes: tuple, dtypes: tuple, *static_args: Any) -> tuple | None:
    with no_dispatch(), torch.no_grad():
        stand_ins = [torch.empty(s, dtype=d, device="meta") for s, d in zip(shapes, dtypes, strict=True)]
        try:
            results = call_placed(func, tuple(stand_ins), static_args)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return None
    return tuple(tuple(y.shape) for y in (results if isinstance(results, (tuple, list)) else (results,)))
