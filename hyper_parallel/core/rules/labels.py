"""Helpers of the rules: normalising and naming dimensions, broadcasting, and the result of a rule for one operand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from hyper_parallel.core.rules.op_sharding import OpSharding

Shape: TypeAlias = "tuple[int, ...]"
Labels: TypeAlias = "tuple[Any, ...]"


def axis(dim: int, ndim: int) -> int:
    """Return ``dim`` as a non-negative dimension of a tensor with ``ndim`` dimensions; a 0-d tensor counts as 1-d.

    Raises:
        IndexError: when ``dim`` is out of range.
    """
    count = max(ndim, 1)
    if not -count <= dim < count:
        raise IndexError(f"dimension {dim} is out of range for a tensor with {ndim} dimension(s)")
    return dim % count


def axes(dims: int | Iterable[int] | None, ndim: int) -> frozenset[int]:
    """Return ``dims`` as non-negative dimensions. None and an empty tuple mean all of them, as in reductions."""
    if isinstance(dims, int):
        dims = (dims,)
    resolved = frozenset(axis(d, ndim) for d in dims) if dims is not None else frozenset()
    return frozenset(d for d in resolved or range(ndim) if d < ndim)


def named(shape: Sequence[int], prefix: str = "d") -> Labels:
    """Return a unique label for each dimension."""
    return tuple(f"{prefix}{i}" for i in range(len(shape)))


def whole(labels: Labels, dims: Iterable[int]) -> Labels:
    """Return ``labels`` with None, which means unsharded, at ``dims``."""
    dims = frozenset(dims)
    return tuple(None if i in dims else label for i, label in enumerate(labels))


def without(values: Sequence[Any], dims: Iterable[int], keepdim: bool = False, kept: Any = None) -> tuple[Any, ...]:
    """Return ``values`` (labels or sizes) without ``dims``, or with ``kept`` in their place if ``keepdim`` is set."""
    dims = frozenset(dims)
    if keepdim:
        return tuple(kept if i in dims else value for i, value in enumerate(values))
    return tuple(value for i, value in enumerate(values) if i not in dims)


def replaced(values: Sequence[Any], dim: int, *new: Any) -> tuple[Any, ...]:
    """Return ``values`` (labels or sizes) with ``new`` in place of the entry of dimension ``dim``."""
    return (*values[:dim], *new, *values[dim + 1 :])


def unary(before: Labels, after: Labels, shape: Sequence[int], results: int = 1, **more: Any) -> OpSharding:
    """Return the sharding of an operation on one tensor.

    Args:
        before, after: labels of the tensor and of each result.
        shape: global shape of each result.
        results: number of results.
        more: further fields of `OpSharding`.
    """
    return OpSharding((before,), (after,) * results, (tuple(shape),) * results, **more)


def broadcast(
    shapes: Sequence[Sequence[int] | None], prefix: str = "d"
) -> tuple[Shape, Labels, tuple[Any, ...]] | None:
    """Return the result of broadcasting shapes as NumPy does, with labels.

    Args:
        shapes: shape of each operand, None for an operand that is not a tensor.
        prefix: the first characters of the labels.

    Returns:
        The common shape, its labels, and the labels of each operand. An expanded dimension of size 1 has the label
        None. The result is None if the shapes do not fit.
    """
    ndim = max((len(shape) for shape in shapes if shape is not None), default=0)
    common = [1] * ndim
    for shape in shapes:
        for i, size in enumerate(shape or (), ndim - len(shape or ())):
            if size != 1 and common[i] not in (1, size):
                return None
            if size != 1:
                common[i] = size
    labels = named(common, prefix)
    operands = tuple(
        None
        if shape is None
        else tuple(labels[i] if size == common[i] else None for i, size in enumerate(shape, ndim - len(shape)))
        for shape in shapes
    )
    return tuple(common), labels, operands


def all_elements(static_args: tuple, shape: Shape, result_shapes: list[Shape]) -> tuple[tuple[Any, ...]]:
    """Return the `CanonicalOp.view_index` of a view that has all elements of its operand in order."""
    return ((...,),)
