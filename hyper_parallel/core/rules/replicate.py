"""Operations that need all of their operands on every rank."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule


@rule("replicate", "*xs", gathers=True)
def replicate(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Results that are no tensors, or of unknown number and type (``item``, ``tolist``): there is nothing to say."""
    return None
