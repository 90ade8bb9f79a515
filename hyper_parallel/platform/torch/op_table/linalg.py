"""Linear algebra on batches of matrices, and Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.contract.dispatch import Given
from hyper_parallel.platform.torch.op_table.binding import Table, UnboundCallError, as_called, dims_of, repeated
from hyper_parallel.platform.torch.op_table.result_shapes import result_shapes

__all__ = ["table"]

#: Functions of one matrix in torch.linalg.
_OF_ONE = """
cholesky cholesky_ex det slogdet inv inv_ex eig eigvals eigh eigvalsh svd svdvals qr lu lu_factor lu_factor_ex
ldl_factor ldl_factor_ex matrix_exp matrix_power cond polar
"""
#: Functions of one matrix in torch, and methods.
_METHODS = """
cholesky_inverse logdet det slogdet inverse matrix_exp matrix_power pinverse svd
"""
#: Functions of several tensors: name -> their arguments, with the dimensions after the batch.
_OF_SEVERAL = {
    "householder_product": "A(m,n) tau(k)",
    "ldl_solve": "LD(n,n) pivots(n) B(n,k)",
    "lu_solve": "LU(n,n) pivots(n) B(n,k)",
    "matrix_rank": "A(m,n) tol/atol -hermitian rtol",
    "pinv": "A(m,n) rcond/atol -hermitian rtol",
    "solve_triangular": "A(n,n) B(n,k)",
    "vander": "x(n)",
}
_METHODS_OF_SEVERAL = {
    "cholesky_solve": "input(n,k) input2(n,n)",
    "lu_solve": "input(n,k) LU_data(n,n) LU_pivots(n)",
    "lu_unpack": "input/LU_data(m,n) LU_pivots(n)",
    "orgqr": "input(m,n) input2/tau(k)",
    "ormqr": "input(m,n) input2/tau(k) input3/other(m,k)",
    "triangular_solve": "input(n,k) A(n,n)",
}
#: Fourier transforms -> number of last dimensions that are transformed by default, None for all.
_TRANSFORMS = {
    "fft ifft rfft irfft hfft ihfft": 1,
    "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2": 2,
    "fftn ifftn rfftn irfftn hfftn ihfftn": None,
}


def table() -> Table:
    """Return the op-table rows for linear algebra and Fourier transforms."""
    table = {
        **as_called(_OF_ONE, "batched", "A(m,n)", _behind, torch.linalg),
        **as_called(_METHODS, "batched", "input/A(m,n)", _behind, torch, Tensor),
        **as_called("solve solve_ex", "batched", "A B", _behind_solve, torch.linalg),
        **as_called("frexp", "batched", "input", _behind),
        **as_called("geqrf", "batched", "input", _behind_geqrf, torch, Tensor),
        **repeated("matrix_norm", "reduce_whole", "x/A ord='fro' dims=(-2,-1) keepdim=False dtype=None", torch.linalg),
    }
    for name, takes in _OF_SEVERAL.items():
        table |= as_called(name, "batched", takes, _behind, torch.linalg)
    for name, takes in _METHODS_OF_SEVERAL.items():
        table |= as_called(name, "batched", takes, _behind, torch, Tensor)
    for names, count in _TRANSFORMS.items():
        table |= as_called(names, "along_linear", "x/input sizes/s/n dims/dim", _transformed(count), torch.fft)
    return table


def _behind(given: Given) -> tuple:
    """Return the static arguments of ``batched``."""
    return _whole(given, given.behind)


def _whole(given: Given, counts: tuple[int, ...]) -> tuple:
    shapes = given.shapes
    if any(len(shape) < count for shape, count in zip(shapes, counts, strict=True)):
        raise UnboundCallError  # torch raises the error
    behind = tuple(shape[len(shape) - count :] for shape, count in zip(shapes, counts, strict=True))
    return counts, result_shapes(given, behind)


def _behind_solve(given: Given) -> tuple:
    """Return the static arguments of `solve`.

    The right-hand side is a vector if it is 1-D or has the shape ``A.shape[:-1]``, otherwise a matrix.
    """
    a, b = given.shapes
    vectors = len(b) == 1 or b == a[:-1]
    if not vectors and len(b) == len(a) - 1:
        raise UnboundCallError  # one matrix for a batch: shards of the batch could be mistaken for vectors
    return _whole(given, (2, 1 if vectors else 2))


def _behind_geqrf(given: Given) -> tuple:
    """Return the static arguments of `geqrf`, whose result shapes torch does not compute for meta tensors."""
    (shape,) = given.shapes
    if len(shape) < 2:
        raise UnboundCallError
    return (2,), (shape[-2:], (min(shape[-2:]),))


def _transformed(count: int | None) -> Any:
    """Return a function that computes the static arguments of ``along_linear``. The transform has ``count`` dimensions;
    None reads them from the call."""

    def facts(given: Given) -> tuple:
        sizes, dims = given.values.get("sizes"), dims_of(given.values.get("dims"))
        if dims is None and count is None and sizes is not None:
            dims = tuple(range(-len(sizes), 0))
        if dims is None and count is not None:
            dims = tuple(range(-count, 0))
        return dims, result_shapes(given, given.shapes)[0]

    return facts
