"""Functions that rearrange elements, as compositions of views, concatenation and diagonals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.basics.tensor import is_dtensor
from hyper_parallel.platform.torch.handlers.composing import composed, number, replicated_like, with_item
from hyper_parallel.platform.torch.op_table.binding import UnboundCallError, dims_of, find, sizes_of

__all__: list[str] = []


# ---------------------------------------------------------------------------------------------------- copies of views


def _copying(view: Callable) -> Callable:
    def copy(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = view(x, *args, **kwargs)
        copies = [
            y.clone(memory_format=torch.contiguous_format) for y in (found if isinstance(found, tuple) else [found])
        ]
        return tuple(copies) if isinstance(found, tuple) else copies[0]

    return copy


_VIEWS = "diagonal expand narrow permute select split split_with_sizes squeeze t transpose unbind unfold unsqueeze"
for _name in _VIEWS.split():
    composed(*find(f"{_name}_copy", torch, Tensor))(_copying(getattr(Tensor, _name)))
composed(torch.alias_copy)(torch.clone)
composed(torch.view_as_real_copy)(_copying(torch.view_as_real))
composed(torch.view_as_complex_copy)(_copying(torch.view_as_complex))


@composed(*find("unsafe_chunk", torch, Tensor))
def unsafe_chunk(input: Any, chunks: int, dim: int = 0) -> Any:
    """Split into chunks. Torch allows writes to these chunks without a check for overlap. Mirrors
    `torch.unsafe_chunk`."""
    return input.chunk(chunks, dim)


@composed(*find("unsafe_split unsafe_split_with_sizes", torch, Tensor))
def unsafe_split(input: Any, split_size: Any, dim: int = 0) -> Any:
    """Split as `unsafe_chunk` does. Mirrors `torch.unsafe_split`."""
    return input.split(split_size, dim)


# ---------------------------------------------------------------------------------------------------- more dimensions


def _at_least(count: int) -> Callable:
    def one(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() >= count:
            return x
        if count == 3 and x.dim():
            return x.unsqueeze(-1) if x.dim() == 2 else x.unsqueeze(0).unsqueeze(-1)
        return x.reshape(*(1,) * (count - x.dim()), *x.shape)

    def all_of(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], Tensor):
            return one(tensors[0])
        return tuple(map(one, tensors[0] if len(tensors) == 1 else tensors))

    return all_of


at_least_1d, at_least_2d, at_least_3d = map(_at_least, (1, 2, 3))
for _name, _made in (("atleast_1d", at_least_1d), ("atleast_2d", at_least_2d), ("atleast_3d", at_least_3d)):
    composed(*find(_name))(_made)


def _tensors(given: tuple) -> Sequence[Any]:
    """Return tensors that were passed one by one or in a list."""
    return given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


@composed(*find("broadcast_tensors"))
def broadcast_tensors(*tensors: Any) -> Any:
    """Expand tensors to their common shape. Mirrors `torch.broadcast_tensors`."""
    tensors = tuple(_tensors(tensors))
    shape = torch.broadcast_shapes(*(tuple(x.shape) for x in tensors))
    return tuple(x.expand(shape) for x in tensors)


@composed(*find("meshgrid"))
def meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    """Expand each 1-D tensor to a grid with a dimension for each tensor. Mirrors `torch.meshgrid`."""
    tensors = tuple(_tensors(tensors))
    if indexing not in (None, "ij", "xy") or any(x.dim() > 1 for x in tensors):
        raise UnboundCallError  # torch raises the error
    shape = tuple(x.numel() for x in tensors)
    grids = [x.reshape(*(n if i == k else 1 for k, n in enumerate(shape))).expand(shape) for i, x in enumerate(tensors)]
    return tuple(g.transpose(0, 1) for g in grids) if indexing == "xy" and len(grids) > 1 else tuple(grids)


@composed(*find("cartesian_prod"))
def cartesian_prod(*tensors: Any) -> Any:
    """Return all combinations of one element of each tensor, as rows. Mirrors `torch.cartesian_prod`."""
    tensors = tuple(_tensors(tensors))
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([g.reshape(-1) for g in meshgrid(*tensors)], 1)


@composed(*find("combinations"))
def combinations(input: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """Return all combinations of ``r`` elements, as rows. Mirrors `torch.combinations`."""
    if r < 1 or input.dim() != 1:
        raise UnboundCallError
    index = torch.combinations(torch.arange(input.numel()), r, with_replacement)
    return input[replicated_like(index.reshape(-1, r), input)]


@composed(*find("block_diag"))
def block_diag(*tensors: Any) -> Any:
    """Return a block-diagonal matrix. Mirrors `torch.block_diag`."""
    blocks = [at_least_2d(x) for x in _tensors(tensors)]
    if any(not is_dtensor(x) or x.dim() > 2 for x in blocks):
        raise UnboundCallError
    ends = [*itertools.accumulate(x.shape[1] for x in blocks)]
    return torch.cat([F.pad(x, (end - x.shape[1], ends[-1] - end)) for x, end in zip(blocks, ends, strict=True)])


# --------------------------------------------------------------------------------------------------- joining, splitting


@composed(*find("hstack"))
def hstack(tensors: Any) -> Any:
    """Join tensors horizontally. Mirrors `torch.hstack`."""
    tensors = [at_least_1d(x) for x in tensors]
    return torch.cat(tensors, 0 if tensors[0].dim() == 1 else 1)


@composed(*find("vstack row_stack"))
def vstack(tensors: Any) -> Any:
    """Join tensors as rows. Mirrors `torch.vstack`."""
    return torch.cat([at_least_2d(x) for x in tensors])


@composed(*find("dstack"))
def dstack(tensors: Any) -> Any:
    """Join tensors along a third dimension. Mirrors `torch.dstack`."""
    return torch.cat([at_least_3d(x) for x in tensors], 2)


@composed(*find("column_stack"))
def column_stack(tensors: Any) -> Any:
    """Join vectors and matrices as columns. Mirrors `torch.column_stack`."""
    return torch.cat([x if x.dim() > 1 else x.reshape(-1, 1) for x in tensors], 1)


@composed(*find("tensor_split"))
def tensor_split(input: Any, indices_or_sections: Any = None, dim: int = 0, **how: Any) -> Any:
    """Split at the given indices, or into nearly equal pieces. Mirrors `torch.tensor_split`."""
    wanted: Any = next((v for v in (indices_or_sections, *how.values()) if v is not None), None)
    if isinstance(wanted, Tensor):
        wanted = (wanted.full_tensor() if is_dtensor(wanted) else wanted).tolist()
    if not input.dim():
        raise UnboundCallError  # torch raises the error
    count = input.shape[dim]
    if isinstance(wanted, int):
        if wanted < 1:
            raise UnboundCallError
        return input.split([count // wanted + (i < count % wanted) for i in range(wanted)], dim)
    edges = [range(count)[: int(i)].stop for i in wanted]
    if edges != sorted(edges):
        raise UnboundCallError  # overlapping pieces
    return input.split([b - a for a, b in itertools.pairwise((0, *edges, count))], dim)


def _splits(dim: Callable[[Any], int]) -> Callable:
    def split(input: Any, indices_or_sections: Any = None, **how: Any) -> Any:
        wanted = next(v for v in (indices_or_sections, *how.values()) if v is not None)
        at = dim(input)
        if input.dim() <= at or (isinstance(wanted, int) and (wanted < 1 or input.shape[at] % wanted)):
            raise UnboundCallError  # torch raises the error
        return tensor_split(input, wanted, at)

    return split


composed(*find("hsplit"))(_splits(lambda x: 0 if x.dim() == 1 else 1))
composed(*find("vsplit"))(_splits(lambda x: 0 if x.dim() > 1 else 2))
composed(*find("dsplit"))(_splits(lambda x: 2))


# ---------------------------------------------------------------------------------------------------- diagonals, flips


@composed(*find("diag"))
def diag(input: Any, diagonal: int = 0) -> Any:
    """Return a matrix with this diagonal, or the diagonal of a matrix. Mirrors `torch.diag`."""
    if input.dim() not in (1, 2):
        raise UnboundCallError
    return input.diag_embed(diagonal) if input.dim() == 1 else input.diagonal(diagonal).clone()


@composed(*find("diagflat"))
def diagflat(input: Any, offset: int = 0) -> Any:
    """Return a matrix with all elements as its diagonal. Mirrors `torch.diagflat`."""
    return input.reshape(-1).diag_embed(offset)


@composed(*find("trace"))
def trace(input: Any) -> Any:
    """Return the sum of a diagonal. Mirrors `torch.trace`."""
    if input.dim() != 2:
        raise UnboundCallError
    return input.diagonal().sum()


@composed(*find("fliplr"))
def fliplr(input: Any) -> Any:
    """Reverse the second dimension. Mirrors `torch.fliplr`."""
    if input.dim() < 2:
        raise UnboundCallError
    return input.flip(1)


@composed(*find("flipud"))
def flipud(input: Any) -> Any:
    """Reverse the first dimension. Mirrors `torch.flipud`."""
    if not input.dim():
        raise UnboundCallError
    return input.flip(0)


@composed(*find("rot90"))
def rot90(input: Any, k: int = 1, dims: Any = (0, 1)) -> Any:
    """Rotate by quarter turns in the plane of two dimensions. Mirrors `torch.rot90`."""
    a, b = dims
    if input.dim() < 2 or (a - b) % input.dim() == 0 or not all(-input.dim() <= d < input.dim() for d in dims):
        raise UnboundCallError
    k %= 4
    if k == 2:
        return input.flip(a, b)
    return input.clone() if k == 0 else input.flip(b if k == 1 else a).transpose(a, b)


def _shift(part: Callable[[int], int]) -> Callable:
    def shift(input: Any, dim: Any = None) -> Any:
        dims = dims_of(dim) or tuple(range(input.dim()))
        return input.roll([part(input.shape[d]) for d in dims], dims)

    return shift


composed(torch.fft.fftshift)(_shift(lambda size: size // 2))
composed(torch.fft.ifftshift)(_shift(lambda size: (size + 1) // 2))


# ---------------------------------------------------------------------------------------------------- parts replaced


@composed(*find("select_scatter"))
def select_scatter(input: Any, src: Any, dim: int, index: int) -> Any:
    """Return a copy with one slice replaced. Mirrors `torch.select_scatter`."""
    if tuple(src.shape) != tuple(n for d, n in enumerate(input.shape) if d != dim % input.dim()):
        raise UnboundCallError
    return with_item(input, (*(slice(None),) * (dim % input.dim()), number(index)), src)


@composed(*find("slice_scatter"))
def slice_scatter(input: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Return a copy with a range of a dimension replaced. Mirrors `torch.slice_scatter`."""
    dim %= input.dim()
    picked = range(input.shape[dim])[slice(start, end, step)]
    if tuple(src.shape) != (*input.shape[:dim], len(picked), *input.shape[dim + 1 :]):
        raise UnboundCallError
    if not len(picked):
        return input.clone()
    return with_item(input, (*(slice(None),) * dim, slice(picked.start, picked.stop, step)), src)


@composed(*find("diagonal_scatter"))
def diagonal_scatter(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return a copy with a diagonal replaced. Mirrors `torch.diagonal_scatter`."""
    rows, columns = input.shape[dim1], input.shape[dim2]
    if tuple(src.shape) != tuple(input.diagonal(offset, dim1, dim2).shape):
        raise UnboundCallError
    square = src.diag_embed(offset)
    whole = F.pad(square, (0, columns - square.shape[-1], 0, rows - square.shape[-2])).movedim((-2, -1), (dim1, dim2))
    mask = torch.ones(src.shape[-1], dtype=torch.bool).diag_embed(offset)
    mask = F.pad(mask, (0, columns - mask.shape[-1], 0, rows - mask.shape[-2]))
    mask = mask.reshape(*(1,) * (input.dim() - 2), rows, columns).movedim((-2, -1), (dim1, dim2))
    return torch.where(replicated_like(mask, input), whole.to(input.dtype), input)


@composed(Tensor.sum_to_size)
def sum_to_size(self: Any, *size: Any) -> Any:
    """Sum over the dimensions in which ``size`` would be broadcast to the shape of the tensor. Mirrors
    `torch.Tensor.sum_to_size`."""
    wanted = sizes_of(size)
    if not wanted:
        return self.sum()
    new = self.dim() - len(wanted)
    if new < 0 or any(n not in (1, m) for n, m in zip(wanted, self.shape[new:], strict=True)):
        raise UnboundCallError
    stretched = [d for d, n in enumerate(wanted, new) if n == 1 and self.shape[d] != 1]
    y = self.sum(stretched, keepdim=True) if stretched else self
    return y.sum(tuple(range(new))) if new else y


@composed(*find("unravel_index"))
def unravel_index(indices: Any, shape: Any) -> Any:
    """Convert flat indices to one index for each dimension. Mirrors `torch.unravel_index`."""
    sizes = (shape,) if isinstance(shape, int) else tuple(map(int, shape))
    if indices.dtype.is_floating_point or indices.dtype in (torch.bool,) or any(n < 0 for n in sizes):
        raise UnboundCallError
    steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return tuple((indices // step) % size for step, size in zip(steps, sizes, strict=True))


@composed(torch.constant_pad_nd)
def constant_pad(input: Any, pad: Any, value: Any = 0) -> Any:
    """Pad a tensor with a constant. Mirrors `torch.constant_pad_nd`."""
    return F.pad(input, pad, "constant", value)
