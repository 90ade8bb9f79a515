"""Losses of plain logits that reject one rank's shard of the classes. Torch's own losses would take the shard for all
classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.basics.tensor import State, stand_for

__all__ = ["both_overridable", "whole_classes_only"]


def _refuse(count: int) -> None:
    State.core.refuse_part_of_classes(count)


#: Set like `torch.compiler.assume_constant_result` does, without importing the compiler: it calls `_refuse` while
#: tracing.
_refuse._dynamo_marked_constant = True  # type: ignore[attr-defined]


def whole_classes_only(original: Callable) -> Callable:
    """Wrap ``cross_entropy`` and ``nll_loss`` of `torch.nn.functional` to check plain logits."""

    @functools.wraps(original)
    def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        # Torch 2.14 compiles a call of this function as one operation, and calls it with a fake tensor while it does.
        if (type(input) is Tensor or type(input).__name__ == "FakeTensor") and input.dim():
            count = input.shape[min(1, input.dim() - 1)]
            if type(input) is not Tensor or torch.compiler.is_compiling():
                _refuse(count)
            else:
                State.core.refuse_part_of_classes(count, input)
        return original(input, target, *args, **kwargs)

    # torch passes the function found under this name to a DTensor
    stand_for(loss, original)
    return loss


def both_overridable(original: Callable) -> Callable:
    """Wrap the compiler's list of overridable functions, so that it contains the losses and their replacements.

    Torch makes the list once, perhaps before these losses were replaced, perhaps later. Also used for the list of
    functions that are one operation of a graph.
    """

    @functools.cache
    def get_overridable_functions() -> set:
        losses: Any = (F.cross_entropy, F.nll_loss)
        return original() | {*losses, *(loss.__wrapped__ for loss in losses)}

    return get_overridable_functions
