"""Losses over classes of plain logits: this rank's part of the classes is not taken for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hyper_parallel.platform.torch.tensor import State, stand_for

__all__ = ["whole_classes_only"]


def whole_classes_only(original: Callable) -> Callable:
    """What stands for ``cross_entropy`` and ``nll_loss`` of `torch.nn.functional`."""

    @functools.wraps(original)
    def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is Tensor and input.dim():
            State.core.refuse_part_of_classes(input.shape[min(1, input.dim() - 1)])
        return original(input, target, *args, **kwargs)

    # torch looks itself up by name when it asks a DTensor.
    stand_for(loss, original)
    return loss
