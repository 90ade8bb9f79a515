"""Dtypes by their properties."""

import mindspore as ms

__all__ = ["DIFFERENTIABLE", "DISCRETE", "FLOATS"]

FLOATS = frozenset((ms.float16, ms.bfloat16, ms.float32, ms.float64))
DIFFERENTIABLE = FLOATS | {ms.complex64, ms.complex128}
#: Dtypes without gradients.
DISCRETE = frozenset((ms.bool_, ms.int8, ms.int16, ms.int32, ms.int64, ms.uint8, ms.uint16, ms.uint32, ms.uint64))
