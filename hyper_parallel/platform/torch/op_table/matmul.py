"""Linear layers and matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.op_table.binding import Table, call_by_position, rows

__all__ = ["table"]


def table() -> Table:
    """Return the op-table rows for linear, matmul, addmm and einsum."""
    names, product = "matmul mm bmm mv dot __matmul__", "x other/mat2/vec/tensor"
    return {
        **rows("linear", "linear", "", call_by_position, F),
        **rows(names, "matmul", product, _call_matmul, torch, Tensor, torch.linalg),
        **rows("__rmatmul__", "matmul", "other x", _call_matmul, Tensor),
        **rows("cdist", "pairs", _CDIST, call_by_position, torch),
        **rows("addmm", "addmm", "", _call_addmm),
        # Torch converts the forms einsum(equation, [a, b]) and einsum(a, [0, 1], b, [1, 2]) to this one.
        **rows(
            "einsum",
            "einsum",
            lambda func, args, kwargs: (args[1:], (args[0],)),
            lambda func, operands, static_args: torch.einsum(static_args[0], *operands),
            torch,
        ),
    }


_CDIST = "x y/x2 +p=2.0 +compute_mode='use_mm_for_euclid_dist_if_necessary'"


def _call_matmul(func: Any, operands: tuple, static_args: tuple) -> Any:
    return torch.matmul(*operands)


def _call_addmm(func: Any, operands: tuple, static_args: tuple) -> Any:
    return torch.addmm(*operands, beta=static_args[0], alpha=static_args[1])
