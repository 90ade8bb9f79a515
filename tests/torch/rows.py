"""Calls of functions of matrices, index tensors, diagonals and windows, for `test_op_table`, where the operands are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MORE"]


def _square(z: Any) -> Any:
    """A batch of positive matrices."""
    return z @ z.mT + 5 * torch.ones_like(z[..., :4]).tril().triu()


MORE: dict[str, list[Callable[..., Any]]] = {
    "along_linear": [
        lambda x, **_: x.cumsum(1),
        lambda x, **_: x.flip(0),
        lambda x, **_: torch.flip(x, [0, 1]),
        lambda x, **_: x.flip(dims=(1,)),
        lambda x, **_: x.roll(1, 0),
        lambda x, **_: torch.roll(x, shifts=(1, 2), dims=(0, 1)),
        lambda x, **_: x.roll(3),
        lambda x, **_: x.tril(),
        lambda x, **_: torch.triu(x, diagonal=1),
        lambda x, **_: torch.fft.fft(x),
        lambda x, **_: torch.fft.rfft(input=x, n=5, dim=0, norm="ortho"),
        lambda x, **_: torch.fft.ifft2(x, (3, 4)),
        lambda x, **_: torch.fft.fftn(x, s=(3,)),
        lambda x, **_: torch.fft.irfftn(x),
        lambda x, **_: torch.diff(x),
        lambda x, v, **_: x.diff(2, 0, prepend=v.unsqueeze(0), append=v.unsqueeze(0)),
    ],
    "quantile": [
        lambda x, **_: x.quantile(0.3),
        lambda x, **_: torch.nanquantile(x, 0.4, dim=0, keepdim=True),
        lambda x, **_: torch.quantile(x, x[0, :3].sigmoid(), 1),
    ],
    "batched": [
        lambda z, **_: torch.linalg.inv(_square(z)),
        lambda z, **_: torch.inverse(_square(z)),
        lambda z, **_: torch.linalg.cholesky(_square(z)).inverse(),
        lambda z, **_: torch.linalg.slogdet(A=_square(z)),
        lambda z, **_: torch.linalg.solve(_square(z), z),
        lambda z, **_: torch.linalg.solve(_square(z), B=z[..., 0]),
        lambda z, **_: torch.linalg.solve_triangular(_square(z), z, upper=True),
        lambda z, **_: torch.cholesky_solve(z, torch.linalg.cholesky(_square(z))),
        lambda z, **_: torch.linalg.svdvals(z),
        lambda z, **_: torch.linalg.lu_solve(*torch.linalg.lu_factor(_square(z)), z),
        lambda z, **_: torch.lu_unpack(*torch.linalg.lu_factor(_square(z))),
        lambda z, **_: torch.linalg.pinv(z, rtol=z[:, 0, 0].sigmoid() / 10),
        lambda z, **_: torch.linalg.matrix_power(z[..., :4], 2),
        lambda z, **_: torch.geqrf(z),
        lambda x, **_: torch.frexp(x),
        lambda x, **_: torch.linspace(x[0, 0], 5, steps=4),
    ],
    "pairs": [lambda z, **_: torch.cdist(z, z.flip(1)), lambda z, x, **_: torch.cdist(x, z, p=1.0)],
    "diagonal": [
        lambda z, **_: z.diagonal(),
        lambda z, **_: torch.diagonal(z, 1, dim1=-1, dim2=0),
        lambda z, **_: torch.linalg.diagonal(z, offset=-1),
    ],
    "diag_embed": [lambda x, **_: x.diag_embed(), lambda x, **_: torch.diag_embed(x, -1, 0, 2)],
    "windows": [lambda x, **_: x.unfold(1, 3, 2)],
    "real_pairs": [lambda x, **_: torch.view_as_real(x + 1j)],
    "complex_pairs": [lambda x, **_: torch.view_as_complex(x.reshape(4, 3, 2))],
    "scatter": [
        lambda x, i, y, **_: x.scatter(0, i, y),
        lambda x, i, **_: torch.scatter(x, 1, index=i[:, :2], value=3.0),
        lambda x, i, y, **_: x.scatter(0, i, y, reduce="add"),
        lambda x, i, y, **_: torch.scatter_add(x, dim=1, index=i, src=y),
        lambda x, i, y, **_: x.scatter_reduce(0, i, y, "amax", include_self=False),
        lambda x, i, y, **_: x.scatter_reduce(0, i, y, reduce="sum"),
    ],
    "index_write": [
        lambda x, i, y, **_: x.index_add(1, i[0], y, alpha=2),
        lambda x, i, y, **_: torch.index_add(input=x, dim=1, source=y, index=i[0]),
        lambda x, i, y, **_: x.index_copy(0, i[0, :4], y),
        lambda x, i, **_: x.index_fill(0, i[0, :2], 3.0),
        lambda x, i, y, **_: x.index_reduce(1, i[0], y, "amin"),
    ],
    "setitem": [
        lambda x, i, v, **_: x.index_put((i[:, 0],), v),
        lambda x, v, **_: torch.select_scatter(x, v, 0, -1),
        lambda x, y, **_: torch.slice_scatter(x, y[:, :2], 1, 2, 4),
    ],
    "index_add": [
        lambda x, i, v, **_: x.index_put((i[:, 0],), v, accumulate=True),
        lambda x, i, y, **_: torch.index_put(x, (i[:, :6] % 4, i % 6), y, True),
    ],
    "take": [lambda x, i, **_: x.take(i), lambda x, i, **_: torch.take(x, index=i[0])],
    "put": [
        lambda x, i, y, **_: x.put(i, y, accumulate=True),
        lambda x, i, y, **_: torch.put(x, i[0, :4], source=y[0, :4]),
    ],
    "by_table": [
        lambda x, v, **_: torch.bucketize(x, v.sort().values, right=True),
        lambda i, **_: torch.isin(i, i[0, :2]),
        lambda i, **_: torch.isin(i, 2),
    ],
    "searchsorted": [
        lambda x, v, **_: torch.searchsorted(v.sort().values, x),
        lambda x, y, **_: torch.searchsorted(y.sort().values, x, right=True),
        lambda x, y, **_: torch.searchsorted(y, x, sorter=y.argsort()),
    ],
    "masked_select": [lambda x, m, **_: torch.masked_select(x, m), lambda x, m, **_: x.masked_select(mask=m[0])],
    "masked_scatter": [
        lambda x, m, y, **_: x.masked_scatter(m, y),
        lambda x, m, y, **_: torch.masked_scatter(x, mask=m[0], source=y),
        lambda x, m, y, **_: x.masked_scatter_(m, y),
    ],
    "nonzero": [
        lambda m, **_: m.nonzero(),
        lambda i, **_: torch.argwhere(i),
        lambda i, **_: torch.nonzero(i, as_tuple=True),
        lambda i, **_: i.sum().nonzero(as_tuple=True),
        lambda i, **_: torch.nonzero_static(i, size=3),
        lambda i, **_: torch.nonzero_static(i, size=30, fill_value=7),
        lambda i, m, v, **_: i.index_put((m[:, 0],), v.long()),
    ],
    "unique": [
        lambda i, **_: i.unique(),
        lambda i, **_: torch.unique(i, False, return_inverse=True, return_counts=True),
        lambda i, **_: torch.unique(i, dim=1, return_counts=True),
    ],
    "unique_in_order": [
        lambda i, **_: torch.unique_consecutive(i, return_inverse=True),
        lambda i, **_: i.unique_consecutive(return_counts=True, dim=0),
    ],
    "count": [
        lambda i, **_: i.flatten().bincount(),
        lambda i, x, **_: torch.bincount(i[0], weights=x[0], minlength=7),
        lambda x, **_: torch.histc(x, 5),
        lambda x, **_: x.histc(bins=4, min=-1, max=1),
    ],
}
