"""torch_npu's own operators, each of which fuses several kernels of torch.

These operators exist only with torch_npu in the process: `hyper_parallel.platform.torch.npu` adds these rows to the
table.

Source: the schemas of torch_npu 2.13 and 2.14, for example ``torch.ops.npu.npu_rms_norm.default._schema``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import WORDS, Bound, Table, UnboundCallError, call_by_position

__all__ = ["table"]


def table() -> Table:
    """Return the op-table rows for npu_rms_norm, npu_add_rms_norm, npu_swiglu, npu_rotary_mul and
    npu_fusion_attention."""
    attention = NativeOp("fused_attention", _bind_attention, _call_attention)
    rotary = NativeOp("rotary", f"{_TURNED} +rotate=None", call_by_position, words=WORDS, adjust=_not_rotated)
    operators = {
        # The kernel returns one statistic: 1 / rms.
        "npu_rms_norm": NativeOp("rms_norm", _NORM, _call_rms_norm, words=WORDS),
        "npu_add_rms_norm": NativeOp("add_rms_norm", "", _call_add_rms_norm, words=WORDS),
        "npu_swiglu": NativeOp("glu", "", call_by_position, words=WORDS),
        "npu_rotary_mul": rotary,
        **dict.fromkeys(["npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3"], attention),
    }
    table: Table = {}
    for name, row in operators.items():
        operator = getattr(torch.ops.npu, name, None)
        if operator is not None:  # an older torch_npu lacks some operators
            table[operator] = table[operator.default] = row
    return table


_NORM = "by_weight: x weight/gamma eps/epsilon=1e-6"
_TURNED = "x r1 r2 mode/rotary_mode='half'"


def _call_rms_norm(func: Any, operands: tuple, static_args: tuple) -> Any:
    return func(*operands, static_args[2])


def _not_rotated(func: Any, operands: tuple, static_args: tuple) -> Bound:
    mode, rotate = static_args
    if rotate is not None:
        raise TypeError("npu_rotary_mul(rotate=...) is not supported with distributed tensors: leave rotate out")
    return operands, (mode,)


class _AddRmsNorm(torch.autograd.Function):
    """npu_add_rms_norm with a backward, which torch_npu 2.14 lacks. The backward of npu_rms_norm is applied to the
    sum."""

    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> Any:
        y, rstd, total = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
        ctx.save_for_backward(total, gamma, rstd)
        ctx.mark_non_differentiable(rstd)
        return y, rstd, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_y: Tensor, by_rstd: Tensor, by_total: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            total, gamma, rstd = ctx.saved_tensors
            by_sum, by_gamma = torch.ops.npu.npu_rms_norm_backward(by_y, total, gamma, rstd)
            by_sum = by_sum + by_total
            return by_sum, by_sum, by_gamma.to(gamma.dtype), None


def _call_add_rms_norm(func: Any, operands: tuple, static_args: tuple) -> Any:
    return _AddRmsNorm.apply(*operands, *static_args)


# ------------------------------------------------------------------------------------------------------ attention
#: Size of the last dimension of the statistics that the kernel returns.
_STATISTIC = 8
#: Arguments that are tensors, after query, key and value: those that the rule knows, and lengths of sequences.
_TENSORS = ("pse", "atten_mask", "sink", "query_rope", "key_rope")
_LENGTHS = ("actual_seq_qlen", "actual_seq_kvlen")


def _bind_attention(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    """Bind a call of attention.

    ``static_args`` end with pairs (name, value) for the remaining passed arguments.
    """
    schema = getattr(func, "default", func)._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    given = {name: value for name, value in {**given, **kwargs}.items() if value is not None}
    required = ("query", "key", "value", "head_num", "input_layout")
    unknown = given.keys() - {argument.name for argument in schema}
    if unknown or len(args) > len(schema) or any(name not in given for name in required):
        raise UnboundCallError  # torch raises the error
    if "padding_mask" in given or "dropout_mask" in given:
        raise UnboundCallError
    query, key, value, heads, layout = (given.pop(name) for name in required)
    layout, keep = layout.upper(), float(given.pop("keep_prob", 1.0))
    tensors = tuple(given.pop(name, None) for name in _TENSORS)
    per_batch = "prefix" in given or (layout != "TND" and any(name in given for name in _LENGTHS))
    tokens_first = given.get("softmax_layout") == "TND"
    rest = tuple((name, _hashable(x)) for name, x in sorted(given.items()))
    return (query, key, value, *tensors), (layout, heads, keep, per_batch, _STATISTIC, tokens_first, rest)


def _hashable(x: Any) -> Any:
    """Return lists as tuples. Lengths of sequences, which npu_fusion_attention_v3 takes as tensors, become numbers."""
    if isinstance(x, Tensor):
        if getattr(x, "_layout", None) is not None:
            raise UnboundCallError
        return ("lengths", *x.tolist())
    return tuple(x) if isinstance(x, (list, tuple)) else x


def _call_attention(func: Any, operands: tuple, static_args: tuple) -> Any:
    query, key, value, *tensors = operands
    layout, heads, keep, _, _, tokens_first, rest = static_args
    options = {name: x for name, x in zip(_TENSORS, tensors, strict=True) if x is not None}
    for name, x in rest:
        options[name] = torch.tensor(x[1:]) if isinstance(x, tuple) and x[:1] == ("lengths",) else x
    if keep < 1.0:
        options["keep_prob"] = keep
    found = func(query, key, value, heads, layout, **options)
    if layout == "TND" and not tokens_first:
        # The shape is (tokens, heads, 8), but memory is ordered by heads first. For shards of heads only the latter is
        # meaningful.
        statistics = [x.reshape(x.shape[1], x.shape[0], *x.shape[2:]) for x in found[1:3]]
        found = (found[0], *statistics, *found[3:])
    return found
