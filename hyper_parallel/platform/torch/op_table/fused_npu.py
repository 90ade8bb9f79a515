"""torch_npu's own operators, which do in one kernel what takes torch several.

Only with torch_npu in the process: `hyper_parallel.platform.torch.npu` adds these rows to the table.

Source: the schemas of torch_npu 2.13, for example ``torch.ops.npu.npu_rms_norm.default._schema``.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.base import NativeOp
from hyper_parallel.platform.torch.op_table.binding import Table, global_shape, signature

__all__ = ["table"]


def table() -> Table:
    """Rows of npu_rms_norm, npu_swiglu and npu_rotary_mul."""
    rows: Table = {}
    for name, row in (
        ("npu_rms_norm", NativeOp("rms_norm", _bind_rms_norm, _call)),
        ("npu_swiglu", NativeOp("glu", _bind_swiglu, _call)),
        ("npu_rotary_mul", NativeOp("rotary", _bind_rotary, _call_rotary)),
    ):
        operator = getattr(torch.ops.npu, name)
        rows[operator] = rows[operator.default] = row
    return rows


_rms_norm_arguments = signature("self", "gamma", epsilon=1e-6)
_swiglu_arguments = signature("self", dim=-1)
_rotary_arguments = signature("self", "r1", "r2", rotary_mode="half", rotate=None)


def _bind_rms_norm(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, gamma, epsilon = _rms_norm_arguments(func, args, kwargs)
    return (x, gamma), (len(global_shape(gamma)), 1, epsilon)  # one statistic: 1 / rms


def _bind_swiglu(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, dim = _swiglu_arguments(func, args, kwargs)
    return (x,), (dim,)


def _bind_rotary(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, cos, sin, mode, rotate = _rotary_arguments(func, args, kwargs)
    if rotate is not None:
        raise TypeError("npu_rotary_mul(rotate=...) is not supported with distributed tensors: leave it out")
    return (x, cos, sin), (mode,)


def _call(func: Any, operands: tuple, statics: tuple) -> Any:
    return func(*operands, statics[-1])


def _call_rotary(func: Any, operands: tuple, statics: tuple) -> Any:
    return func(*operands, *statics)
