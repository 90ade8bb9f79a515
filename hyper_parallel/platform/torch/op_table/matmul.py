"""Linear layers and matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import Table, UnboundCallError, find, global_shape, signature

__all__ = ["table"]

T: Any = torch.Tensor
_linear = F.linear
_no_statics: tuple = ()


def table() -> Table:
    """Rows of linear, matmul and addmm."""
    rows: Table = {F.linear: NativeOp("linear", _bind_linear, _call_linear)}
    matmul = NativeOp("matmul", _bind_matmul, _call_matmul)
    rows.update(dict.fromkeys(find(["matmul", "mm", "bmm", "mv", "dot", "__matmul__"], torch, T), matmul))
    rows[torch.linalg.matmul] = matmul
    reflected = NativeOp("matmul", lambda func, args, kwargs: ((args[1], args[0]), _no_statics), _call_matmul)
    rows[T.__rmatmul__] = reflected
    rows.update(dict.fromkeys([torch.addmm, T.addmm], NativeOp("addmm", _bind_addmm, _call_addmm)))
    rows[torch.einsum] = NativeOp("einsum", _bind_einsum, lambda func, ops, statics: torch.einsum(statics[0], *ops))
    return rows


_linear_arguments = signature("input", "weight", bias=None)


def _bind_linear(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    if len(args) == 3 and not kwargs:
        return args, _no_statics
    return tuple(_linear_arguments(func, args, kwargs)), _no_statics


def _call_linear(func: Any, operands: tuple, statics: tuple) -> Any:
    return _linear(*operands)


_matmul_arguments = signature("input", "other")


def _bind_matmul(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    if len(args) == 2 and not kwargs:
        return args, _no_statics
    kwargs = {{"mat2": "other", "vec": "other", "tensor": "other"}.get(k, k): v for k, v in kwargs.items()}
    return tuple(_matmul_arguments(func, args, kwargs)), _no_statics


def _call_matmul(func: Any, operands: tuple, statics: tuple) -> Any:
    return torch.matmul(*operands)


_addmm_arguments = signature("input", "mat1", "mat2", beta=1, alpha=1)


def _bind_addmm(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    c, a, b, beta, alpha = _addmm_arguments(func, args, kwargs)
    if len(global_shape(a)) != 2 or len(global_shape(b)) != 2:
        raise UnboundCallError
    return (c, a, b), (beta, alpha)


def _call_addmm(func: Any, operands: tuple, statics: tuple) -> Any:
    return torch.addmm(*operands, beta=statics[0], alpha=statics[1])


def _bind_einsum(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    # Torch brings the forms einsum(equation, [a, b]) and einsum(a, [0, 1], b, [1, 2]) into this one.
    return args[1:], (args[0],)
