"""MindSpore's primitives and the canonical operations that they are: the table that interception looks up.

Keys are names of primitives as ``__fallback__`` sees them, on CPU and on Ascend; names that start in lower case are
operations of Python's (indexing) that `tensor` intercepts itself. Where one primitive is several operations,
`VARIANTS` picks the row by the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.base import NativeOp
from hyper_parallel.platform.mindspore import ops_elementwise, ops_nn, ops_shape
from hyper_parallel.platform.mindspore.op_bind import Function

__all__ = ["OPS", "PASS_THROUGH", "VARIANTS", "Function"]

OPS: dict[str, NativeOp] = {**ops_elementwise.OPS, **ops_shape.OPS, **ops_nn.OPS}

#: name -> chooser(args, kwargs) -> row, or None for an operation without a rule
VARIANTS: dict[str, Callable[[tuple, dict], NativeOp | None]] = {
    **ops_elementwise.VARIANTS,
    **ops_shape.VARIANTS,
    **ops_nn.VARIANTS,
}

#: Not operations on values: they answer with a type, or order side effects.
PASS_THROUGH = frozenset({"typeof", "TypeOf", "Shape", "Rank", "DType"})


def _check(name: str, func: Any) -> None:  # keeps mypy and readers sure of what a key is
    assert isinstance(name, str), func
