"""Dtypes by their properties."""

from __future__ import annotations

from typing import Any

import mindspore as ms

from hyper_parallel.platform.mindspore.basics.private import type_id_to_type

__all__ = ["DIFFERENTIABLE", "DISCRETE", "FLOATS", "as_dtype"]

FLOATS = frozenset((ms.float16, ms.bfloat16, ms.float32, ms.float64))
DIFFERENTIABLE = FLOATS | {ms.complex64, ms.complex128}
#: Dtypes without gradients.
DISCRETE = frozenset((ms.bool_, ms.int8, ms.int16, ms.int32, ms.int64, ms.uint8, ms.uint16, ms.uint32, ms.uint64))


def as_dtype(dtype: Any) -> Any:
    """Return the dtype of an argument, or None. Overloads pass the dtype itself, and generated code passes its
    number."""
    return type_id_to_type(dtype) if isinstance(dtype, int) else dtype
