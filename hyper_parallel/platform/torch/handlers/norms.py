"""What norms of distributed tensors need of torch; core adds up those of the parts that ranks hold."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.torch.tensor import layout_of

__all__ = ["reduced", "widened"]


def reduced(x: Any) -> Any:
    """``x``; if it is distributed and a partial sum, the sum. Interception is on."""
    layout = layout_of(x)
    if layout is None or layout.cotangent is layout:
        return x
    return x.redistribute(placements=list(layout.cotangent.placements))


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype for norms of this one, and for their powers: in 16 bits, squares overflow early."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
