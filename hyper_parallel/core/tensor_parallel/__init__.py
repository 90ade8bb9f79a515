"""Tensor-parallel styles, `parallelize_module` and losses. Mirrors ``torch.distributed.tensor.parallel``."""

from __future__ import annotations

import importlib
from typing import Any

#: Resolved when first used: importing the package imports no framework.
_HOME_OF = {
    "loss_parallel": "hyper_parallel.core.tensor_parallel.loss",
    "vocab_parallel_cross_entropy": "hyper_parallel.core.tensor_parallel.loss",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
