"""Functions that are compositions of products, sums and differences."""

from __future__ import annotations

import functools
import itertools
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.basics.tensor import dispatch, handles
from hyper_parallel.platform.torch.handlers.composing import composed
from hyper_parallel.platform.torch.op_table import OP_TABLE
from hyper_parallel.platform.torch.op_table.binding import Bound, UnboundCallError, dims_of, find, global_shape

__all__: list[str] = []


# ---------------------------------------------------------------------------------------------------- products


def _plus_product(product: Callable[[Any, Any], Any], dims: tuple[int, int]) -> Callable:
    """Return a function that computes ``beta * input + alpha * product(a, b)``. If beta is 0, ``input`` is ignored."""

    def plus_product(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if (a.dim(), b.dim()) != dims:
            raise UnboundCallError  # torch words the error
        y = product(a, b)
        if torch.broadcast_shapes(tuple(input.shape), tuple(y.shape)) != tuple(y.shape):
            raise UnboundCallError
        y = y if alpha == 1 else y * alpha
        if beta == 0 and not input.requires_grad:
            return y
        if beta == 0:  # without the values, which may be NaN, and with a gradient of zeros
            return input.masked_fill(torch.ones_like(input, dtype=torch.bool), 0.0) + y
        return (input if beta == 1 else input * beta) + y

    return plus_product


def _named(composition: Callable, *names: str) -> Callable:
    """Return ``composition`` so that its second and third arguments can also be passed by these names."""
    return lambda input, *given, **how: composition(input, *given, *(how.pop(n) for n in names if n in how), **how)


def _sum_of_products(a: Any, b: Any) -> Any:
    return torch.einsum("bij,bjk->ik", a, b)


composed(*find("addmv"))(_named(_plus_product(torch.mv, (2, 1)), "mat", "vec"))
composed(*find("addr"))(_named(_plus_product(torch.outer, (1, 1)), "vec1", "vec2"))
composed(*find("baddbmm"))(_named(_plus_product(torch.bmm, (3, 3)), "batch1", "batch2"))
composed(*find("addbmm"))(_named(_plus_product(_sum_of_products, (3, 3)), "batch1", "batch2"))


def _product(a: Any, a_dims: Sequence[int], b: Any, b_dims: Sequence[int]) -> Any:
    """Contract ``a`` and ``b`` over these dimensions; the other dimensions of ``a`` precede the other dimensions of
    ``b``."""
    if a.dim() + b.dim() > len(string.ascii_letters) or a.dtype != b.dtype:
        raise UnboundCallError
    letters = iter(string.ascii_letters)
    of_a = [next(letters) for _ in range(a.dim())]
    of_b = [next(letters) for _ in range(b.dim())]
    for i, k in zip(a_dims, b_dims, strict=True):
        if a.shape[i] != b.shape[k]:
            raise UnboundCallError  # stretched, or an error
        of_b[k] = of_a[i]
    kept = [c for i, c in enumerate(of_a) if i not in a_dims] + [c for k, c in enumerate(of_b) if k not in b_dims]
    return torch.einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(kept)}", a, b)


@composed(*find("inner"))
def inner(input: Any, other: Any) -> Any:
    """Contract over the last dimensions. Mirrors `torch.inner`."""
    if not input.dim() or not other.dim():
        return input * other
    return _product(input, [input.dim() - 1], other, [other.dim() - 1])


@composed(*find("tensordot"))
def tensordot(a: Any, b: Any, dims: Any = 2) -> Any:
    """Contract over the last dimensions of ``a`` and the first dimensions of ``b``, or over the given dimensions.
    Mirrors `torch.tensordot`."""
    if isinstance(dims, Tensor):
        raise UnboundCallError
    if isinstance(dims, int):
        dims = (range(a.dim() - dims, a.dim()), range(dims))
    of_a, of_b = (dims_of(given) or () for given in map(tuple, dims))
    if len(of_a) != len(of_b):
        raise UnboundCallError
    of_a, of_b = tuple(d % a.dim() for d in of_a), tuple(d % b.dim() for d in of_b)
    for i, k in zip(of_a, of_b, strict=True):  # a dimension of size 1 is broadcast
        if a.shape[i] == 1 != b.shape[k]:
            b = b.sum(k, keepdim=True, dtype=b.dtype)
        elif b.shape[k] == 1 != a.shape[i]:
            a = a.sum(i, keepdim=True, dtype=a.dtype)
    return _product(a, of_a, b, of_b)


@composed(*find("cross", torch, Tensor))
def cross(input: Any, other: Any, dim: int | None = None) -> Any:
    """Return cross products of vectors along ``dim``, by default the first dimension of size 3. Mirrors
    `torch.cross`."""
    if dim is None:
        dim = next((d for d, size in enumerate(input.shape) if size == 3), None)
    if dim is None:
        raise UnboundCallError  # torch words the error
    return torch.linalg.cross(input, other, dim=dim)


@composed(*find("kron"))
def kron(input: Any, other: Any) -> Any:
    """Return the Kronecker product. Mirrors `torch.kron`."""
    ndim = max(input.dim(), other.dim())
    a = input.reshape(*itertools.chain.from_iterable((n, 1) for n in (*(1,) * (ndim - input.dim()), *input.shape)))
    b = other.reshape(*itertools.chain.from_iterable((1, n) for n in (*(1,) * (ndim - other.dim()), *other.shape)))
    y = a * b
    return y.reshape([y.shape[2 * d] * y.shape[2 * d + 1] for d in range(ndim)])


@composed(*find("vdot"))
def vdot(input: Any, other: Any) -> Any:
    """Return the dot product of two vectors, with the first vector conjugated. Mirrors `torch.vdot`."""
    return torch.dot(input.conj(), other)


@composed(torch.linalg.vecdot)
def vecdot(x: Any, y: Any, *, dim: int = -1) -> Any:
    """Return dot products of vectors along ``dim``, with the first operand conjugated. Mirrors
    `torch.linalg.vecdot`."""
    if x.dtype != y.dtype:
        raise UnboundCallError
    return (x.conj() * y).sum(dim, dtype=x.dtype)


@composed(*find("chain_matmul"))
def chain_matmul(*matrices: Any) -> Any:
    """Return the product of several matrices. Mirrors `torch.chain_matmul`."""
    return multi_dot(matrices)


@composed(torch.linalg.multi_dot)
def multi_dot(tensors: Any) -> Any:
    """Return the product of several matrices, in the cheapest order. The first and the last operand may be vectors.
    Mirrors `torch.linalg.multi_dot`."""
    if len(tensors) < 2 or any(x.dim() != 2 for x in tensors[1:-1]):
        raise UnboundCallError
    chain = [tensors[0].unsqueeze(0) if tensors[0].dim() == 1 else tensors[0], *tensors[1:]]
    chain[-1] = chain[-1].unsqueeze(1) if chain[-1].dim() == 1 else chain[-1]
    if any(x.dim() != 2 for x in chain):
        raise UnboundCallError
    sizes = (chain[0].shape[0], *(x.shape[1] for x in chain))

    @functools.cache
    def cheapest(first: int, last: int) -> tuple[int, int]:
        """Return the cost of the cheapest order of these matrix products, and the last matrix of the left factor."""
        if first == last:
            return 0, first
        return min(
            (cheapest(first, k)[0] + cheapest(k + 1, last)[0] + sizes[first] * sizes[k + 1] * sizes[last + 1], k)
            for k in range(first, last)
        )

    def product(first: int, last: int) -> Any:
        if first == last:
            return chain[first]
        cut = cheapest(first, last)[1]
        return product(first, cut) @ product(cut + 1, last)

    y = product(0, len(chain) - 1)
    y = y.squeeze(1) if tensors[-1].dim() == 1 else y
    return y.squeeze(0) if tensors[0].dim() == 1 else y


# ---------------------------------------------------------------------------------------------------- linear algebra


@composed(torch.linalg.norm)
def norm(A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Return the norm of vectors or matrices. Mirrors `torch.linalg.norm`."""
    dims = dims_of(dim)
    if ord is None:
        return torch.linalg.vector_norm(A, 2, dims, keepdim, dtype=dtype)
    count = len(dims) if dims else A.dim()
    if count not in (1, 2) or (count == 2 and isinstance(dim, int)):
        raise UnboundCallError
    if count == 1:
        return torch.linalg.vector_norm(A, ord, dims, keepdim, dtype=dtype)
    return torch.linalg.matrix_norm(A, ord, dims or (-2, -1), keepdim, dtype=dtype)


@handles(*find("norm", torch, Tensor))
def any_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute ``torch.norm(x, p="nuc")`` as a norm of matrices, and other norms by the op table's row."""
    if (args[1] if len(args) > 1 else kwargs.get("p")) != "nuc" or kwargs.get("out") is not None:
        return dispatch(OP_TABLE[func], func, args, kwargs)
    x, _, dim, keepdim, dtype = (*args, *(None,) * 5)[:5]
    given = {"dim": dim, "keepdim": bool(keepdim), "dtype": dtype, **{k: v for k, v in kwargs.items() if k != "p"}}
    return torch.linalg.matrix_norm(given.pop("input", x), "nuc", given.pop("dim") or (-2, -1), **given)


@composed(torch.linalg.tensorinv)
def tensorinv(A: Any, ind: int = 2) -> Any:
    """Return the inverse of a tensor that is flattened to a matrix. Mirrors `torch.linalg.tensorinv`."""
    if not 0 < ind < A.dim() or math.prod(A.shape[:ind]) != math.prod(A.shape[ind:]):
        raise UnboundCallError
    inverse = torch.linalg.inv(A.reshape(math.prod(A.shape[:ind]), -1))
    return inverse.reshape(*A.shape[ind:], *A.shape[:ind])


@composed(torch.linalg.tensorsolve)
def tensorsolve(A: Any, B: Any, dims: Any = None) -> Any:
    """Solve a linear system with tensors flattened to matrices. Mirrors `torch.linalg.tensorsolve`."""
    chosen = dims_of(dims)
    A = A if chosen is None else A.movedim(chosen, tuple(range(-len(chosen), 0)))
    shape = tuple(A.shape[B.dim() :])
    if math.prod(shape) != B.numel():
        raise UnboundCallError
    return torch.linalg.solve(A.reshape(-1, B.numel()), B.reshape(-1)).reshape(*shape)


# ---------------------------------------------------------------------------------------------------- differences


@composed(*find("diff"))
def diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Return differences of neighbours, after ``prepend`` and ``append`` were joined. Mirrors `torch.diff`."""
    if not input.dim() or n < 0:
        raise UnboundCallError
    parts = [x for x in (prepend, input, append) if x is not None]
    x = input if len(parts) == 1 else torch.cat(parts, dim)
    return dispatch(_DIFFERENCE, torch.diff, (x, n, dim), {})


def _bind_difference(func: Any, args: tuple, kwargs: dict) -> Bound:
    x, n, dim = args
    shape, at = tuple(global_shape(x)), dim % len(global_shape(x))
    return (x,), ((at,), (*shape[:at], max(shape[at] - n, 0), *shape[at + 1 :]), n)


_DIFFERENCE = NativeOp("along_linear", _bind_difference, lambda func, xs, how: torch.diff(xs[0], how[2], how[0][0]))


def _trapezoids(y: Any, x: Any, dx: Any, dim: int) -> Any:
    """Return twice the areas between neighbouring points."""
    if x is None:
        return y.unfold(dim, 2, 1).sum(-1) * dx
    if x.dim() == 1:
        widths = torch.diff(x).reshape(-1, *(1,) * (y.dim() - 1 - dim % y.dim()))
    else:
        widths = torch.diff(x.reshape(*(1,) * (y.dim() - x.dim()), *x.shape), dim=dim)
    return y.unfold(dim, 2, 1).sum(-1) * widths


@composed(*find("trapezoid trapz"))
def trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
    """Return the area under points. Mirrors `torch.trapezoid`."""
    if not y.dim() or y.shape[dim] < 2 or (x is not None and x.shape[-1 if x.dim() == 1 else dim] != y.shape[dim]):
        raise UnboundCallError
    return _trapezoids(y, x, dx, dim).sum(dim) / 2


@composed(*find("cumulative_trapezoid"))
def cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
    """Return the area under the points up to each point. Mirrors `torch.cumulative_trapezoid`."""
    if not y.dim() or y.shape[dim] < 2 or (x is not None and x.shape[-1 if x.dim() == 1 else dim] != y.shape[dim]):
        raise UnboundCallError
    return _trapezoids(y, x, dx, dim).cumsum(dim) / 2


@composed(*find("dist"))
def dist(input: Any, other: Any, p: Any = 2) -> Any:
    """Return the norm of a difference. Mirrors `torch.dist`."""
    return torch.norm(input - other, p)


# ---------------------------------------------------------------------------------------------------- statistics


@composed(*find("aminmax"))
def aminmax(input: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    """Return minimum and maximum. Mirrors `torch.aminmax`."""
    dims = () if dim is None else (dim,)
    return torch.return_types.aminmax((torch.amin(input, dims, keepdim), torch.amax(input, dims, keepdim)))


@composed(*find("cov"))
def cov(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Return covariances of the rows, with optional weights of the columns. Mirrors `torch.cov`."""
    x = input if input.dim() == 2 else input.reshape(1, -1)
    if input.dim() > 2 or not x.shape[1]:
        raise UnboundCallError
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    counts = [w.to(x.dtype.to_real()) for w in (fweights, aweights) if w is not None]
    if not counts:
        x = x - x.mean(1, keepdim=True)
        return (x @ x.mH / max(x.shape[1] - correction, 0)).squeeze()
    weights = math.prod(counts[1:], start=counts[0])
    total = weights.sum()
    x = x - ((x * weights).sum(1) / total).unsqueeze(1)
    degrees = total - correction
    if aweights is not None and correction:
        degrees = total - correction * (weights * counts[-1]).sum() / total
    return ((x * weights) @ x.mH / degrees.clamp(min=0)).squeeze()


@composed(*find("corrcoef"))
def corrcoef(input: Any) -> Any:
    """Return correlations of the rows. Mirrors `torch.corrcoef`."""
    c = cov(input)
    if not c.dim():
        return c / c
    variances = c.diagonal()
    deviations = (variances.real if c.is_complex() else variances).sqrt()
    c = c / deviations.unsqueeze(1) / deviations.unsqueeze(0)
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


# ---------------------------------------------------------------------------------------------------- functional


@composed(F.softmin)
def softmin(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """Return the softmax of ``-input``. Mirrors `torch.nn.functional.softmin`."""
    return F.softmax(-input, dim, _stacklevel, dtype)
