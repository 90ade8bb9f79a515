"""Mapping of MindSpore's primitives to canonical operations: the table that interception reads.

Keys are names of primitives as ``__fallback__`` sees them, on CPU and on Ascend. Names in lower case are Python
operations (indexing) that `tensor` intercepts itself. If one primitive is several operations, `VARIANTS` picks the row
by the arguments.
"""

from __future__ import annotations

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.op_table import (
    composed,
    elementwise,
    layers,
    linalg,
    nn,
    picks,
    random,
    reduction,
    scatter,
    shape,
)
from hyper_parallel.platform.mindspore.op_table.binding import Choose
from hyper_parallel.platform.mindspore.op_table.composed import COMPOSED as _COMPOSED

__all__ = ["COMPOSED", "OPS", "PASS_THROUGH", "RESULTS", "VARIANTS"]

OPS: dict[str, NativeOp] = {}
for _module in (elementwise, shape, reduction, nn, random, layers, linalg, scatter, picks):
    OPS |= _module.OPS

VARIANTS: dict[str, Choose] = {}
for _module in (elementwise, shape, reduction, nn, scatter, composed):
    VARIANTS |= _module.VARIANTS

COMPOSED = {**_COMPOSED, **picks.COMPOSED}

RESULTS = {**nn.RESULTS, **random.RESULTS}

#: Primitives that compute no values: they return a type.
PASS_THROUGH = frozenset({"typeof", "TypeOf"})
