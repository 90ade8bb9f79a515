"""Linear algebra on batches of matrices, and Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.op_table.as_called import Given, as_called, result_shapes
from hyper_parallel.platform.torch.op_table.binding import Table, UnboundCallError, dims_of, repeated

__all__ = ["table"]

#: Functions of one matrix, in torch.linalg.
_OF_ONE = """
cholesky cholesky_ex det slogdet inv inv_ex eig eigvals eigh eigvalsh svd svdvals qr lu lu_factor lu_factor_ex
ldl_factor ldl_factor_ex matrix_exp matrix_power cond polar
"""
#: Likewise in torch, or as methods.
_METHODS = """
cholesky_inverse logdet det slogdet inverse matrix_exp matrix_power pinverse svd
"""
#: Functions of several tensors: signature -> number of dimensions that each has behind its batch.
_OF_SEVERAL = {
    "householder_product": ("A tau", {0: 2, 1: 1}),
    "ldl_solve": ("LD pivots B", {0: 2, 1: 1, 2: 2}),
    "lu_solve": ("LU pivots B", {0: 2, 1: 1, 2: 2}),
    "matrix_rank": ("A tol/atol hermitian rtol", {0: 2, 1: 0, 3: 0}),
    "pinv": ("A rcond/atol hermitian rtol", {0: 2, 1: 0, 3: 0}),
    "solve_triangular": ("A B", {0: 2, 1: 2}),
    "vander": ("x", {0: 1}),
}
_METHODS_OF_SEVERAL = {
    "cholesky_solve": ("input input2", {0: 2, 1: 2}),
    "lu_solve": ("input LU_data LU_pivots", {0: 2, 1: 2, 2: 1}),
    "lu_unpack": ("input/LU_data LU_pivots", {0: 2, 1: 1}),
    "orgqr": ("input input2/tau", {0: 2, 1: 1}),
    "ormqr": ("input input2/tau input3/other", {0: 2, 1: 1, 2: 2}),
    "triangular_solve": ("input A", {0: 2, 1: 2}),
}
_MATRIX_NORM = "A ord='fro' dims=(-2,-1) keepdim=False dtype=None -> A | dims keepdim"
#: Fourier transforms, with the dimensions that they take when none are given: how many, None for all.
_TRANSFORMS = {
    "fft ifft rfft irfft hfft ihfft": 1,
    "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2": 2,
    "fftn ifftn rfftn irfftn hfftn ihfftn": None,
}


def table() -> Table:
    """Rows of linear algebra and Fourier transforms."""
    table = {
        **as_called(_OF_ONE, "batched", "A", _behind({0: 2}), torch.linalg),
        **as_called(_METHODS, "batched", "input/A", _behind({0: 2}), torch, Tensor),
        **as_called("solve solve_ex", "batched", "A B", _behind_solve, torch.linalg),
        **as_called("frexp", "batched", "input", _behind({0: 0})),
        **as_called("geqrf", "batched", "input", _behind_geqrf, torch, Tensor),
        **repeated("matrix_norm", "reduce_whole", _MATRIX_NORM, torch.linalg),
    }
    for name, (taken, counts) in _OF_SEVERAL.items():
        table |= as_called(name, "batched", taken, _behind(counts), torch.linalg)
    for name, (taken, counts) in _METHODS_OF_SEVERAL.items():
        table |= as_called(name, "batched", taken, _behind(counts), torch, Tensor)
    for names, count in _TRANSFORMS.items():
        table |= as_called(names, "along_linear", "input s/n dim", _transformed(count), torch.fft)
    return table


def _behind(counts: dict[int, int]) -> Any:
    """The static arguments of ``batched``. ``counts`` has, for the number of each argument, how many dimensions it has
    behind its batch."""

    def facts(given: Given) -> tuple:
        if any(number not in counts for number in given.numbers):
            raise UnboundCallError
        return _whole(given, tuple(counts[number] for number in given.numbers))

    return facts


def _whole(given: Given, counts: tuple[int, ...]) -> tuple:
    shapes = given.shapes
    if any(len(shape) < count for shape, count in zip(shapes, counts, strict=True)):
        raise UnboundCallError  # torch words the error
    behind = tuple(shape[len(shape) - count :] for shape, count in zip(shapes, counts, strict=True))
    return counts, result_shapes(given, behind)


def _behind_solve(given: Given) -> tuple:
    """Right sides are vectors where their shape is that of the batch and one more dimension, otherwise matrices."""
    given.need(0, 1)
    a, b = given.shapes
    vectors = len(b) == 1 or b == a[:-1]
    if not vectors and len(b) == len(a) - 1:
        raise UnboundCallError  # a matrix for several: shards of the batch could make vectors of it
    return _whole(given, (2, 1 if vectors else 2))


def _behind_geqrf(given: Given) -> tuple:
    """Torch does not tell the shapes."""
    (shape,) = given.shapes
    if len(shape) < 2:
        raise UnboundCallError
    return (2,), (shape[-2:], (min(shape[-2:]),))


def _transformed(count: int | None) -> Any:
    """Return a function that gives the static arguments of ``along_linear``. The transform has ``count`` dimensions;
    None takes them from the call."""

    def facts(given: Given) -> tuple:
        given.need(0)
        sizes, dims = given.values.get(1), dims_of(given.values.get(2))
        if dims is None and count is None and sizes is not None:
            dims = tuple(range(-len(sizes), 0))
        if dims is None and count is not None:
            dims = tuple(range(-count, 0))
        return dims, result_shapes(given, given.shapes)[0]

    return facts
