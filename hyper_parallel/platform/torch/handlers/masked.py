"""`torch.masked.std` and `torch.masked.var` of DTensors without a mask, computed with a distributed mask of ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.platform.torch.basics.tensor import is_dtensor

__all__ = ["counting_by_mask"]


def counting_by_mask(original: Callable[..., Any], input: Any, *args: Any, mask: Any, **kwargs: Any) -> Any:
    """Replace torch's function for std and var.

    Without a mask, torch would count the elements of a plain tensor of ones.
    """
    if mask is None and is_dtensor(input):
        mask = torch.ones_like(input, dtype=torch.bool)
    return original(input, *args, mask=mask, **kwargs)
