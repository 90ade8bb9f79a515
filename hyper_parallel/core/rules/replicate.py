"""Operations that need unsharded operands on every rank."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule


@rule("replicate", "*xs", gathers=True)
def replicate(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Results that are not tensors, or have an unknown number or type (``item``, ``tolist``).

    Such an operation has no sharding, so the rule returns None.
    """
    return None
