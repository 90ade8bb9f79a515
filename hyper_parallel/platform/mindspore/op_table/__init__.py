"""MindSpore's primitives and the canonical operations that they are: the table that interception looks up.

Keys are names of primitives as ``__fallback__`` sees them, on CPU and on Ascend; names in lower case are operations
of Python's (indexing) that `tensor` intercepts itself. Where one primitive is several operations, `VARIANTS` picks
the row by the arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.op_table import elementwise, nn, random, reduction, shape

__all__ = ["OPS", "PASS_THROUGH", "RESULTS", "VARIANTS"]

_PARTS = (elementwise, shape, reduction, nn, random)

OPS: dict[str, NativeOp] = {name: native for part in _PARTS for name, native in part.OPS.items()}

#: name -> chooser(args, kwargs) -> row, or None for a call without a rule
VARIANTS: dict[str, Callable[[tuple, dict], NativeOp | None]] = {
    name: chooser for part in _PARTS for name, chooser in part.VARIANTS.items()
}

RESULTS = {**nn.RESULTS, **random.RESULTS}

#: Not operations on values: they answer with a type.
PASS_THROUGH = frozenset({"typeof", "TypeOf"})
