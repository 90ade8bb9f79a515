"""Dtypes that the backends of `torch.distributed` move and reduce."""

from __future__ import annotations

import torch

__all__ = ["COMPLEX", "FLOATS", "INTEGERS", "REDUCED"]

INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64})
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
COMPLEX = frozenset({torch.complex64, torch.complex128})
#: Reduction -> dtypes that gloo and nccl support.
REDUCED = {
    "sum": INTEGERS | FLOATS | COMPLEX,
    "avg": FLOATS,
    **dict.fromkeys(("max", "min", "product"), INTEGERS | FLOATS),
}
