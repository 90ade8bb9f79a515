"""Placements: the distribution of a tensor over one mesh dimension. Mirrors
``torch.distributed.tensor.placement_types``.

Placements are interned, ``Shard(0) is Shard(0)``, so that layouts and caches compare them by identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from hyper_parallel.core.lookalikes import described_placement

#: The reductions of a `Partial`.
REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Placement:
    """The placement of a tensor on one mesh dimension. Base class of `Shard`, `PackedShard`, `Replicate` and `Partial`.

    Placements are immutable, and equal placements are one object. A DTensor has one placement for each mesh dimension.
    Placements of the framework's DTensors, such as torch's, are accepted everywhere and compare equal to placements of
    this library. As keys of a dict, the two differ.

    Example:
        >>> from hyper_parallel import Placement, Shard
        >>> isinstance(Shard(0), Placement), Shard(0) is Shard(0)
        (True, True)
    """

    __slots__ = ()
    _interned: ClassVar[dict[tuple, Placement]] = {}

    @classmethod
    def _intern(cls, **arguments: Any) -> Any:
        key = (cls, *arguments.values())
        found = Placement._interned.get(key)
        if found is None:
            found = object.__new__(cls)
            for name, value in arguments.items():
                object.__setattr__(found, name, value)
            found = Placement._interned.setdefault(key, found)
        return found

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of the class, by name."""
        names = (name for cls in reversed(type(self).__mro__) for name in getattr(cls, "__slots__", ()))
        return {name: getattr(self, name) for name in names}

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether this is `Shard`, of tensor dimension ``dim`` if that is given."""
        return False

    def is_replicate(self) -> bool:
        """Return whether this is `Replicate`."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return whether this is `Partial`, with ``reduce_op`` if that is given."""
        return False

    def __reduce__(self) -> tuple:
        return type(self), tuple(self._arguments().values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._arguments().items())})"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Placement):
            return False
        described = described_placement(other)
        return described is not None and described == (type(self).__name__, *self._arguments().values())

    #: The hash of `object` is implemented in C, and placements are in the key of every cache.
    __hash__ = object.__hash__

    def __copy__(self) -> Placement:
        return self

    def __deepcopy__(self, memo: dict) -> Placement:
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self!r} is immutable: make a new placement")


class Replicate(Placement):
    """Every rank along the mesh dimension holds the full tensor, with equal values.

    Example:
        >>> from hyper_parallel import Replicate
        >>> Replicate() is Replicate()
        True
    """

    __slots__ = ()

    def __new__(cls) -> Replicate:
        return cls._intern()

    def is_replicate(self) -> bool:
        return True


class Shard(Placement):
    """Tensor dimension ``dim`` is split over the ranks along the mesh dimension, as `torch.chunk` does.

    The size of a shard is the size of the dimension divided by the number of ranks, rounded up. The last shards may be
    smaller or empty. A dimension of 5 over 4 ranks gives shards of 2, 2, 1 and 0 elements.

    Several mesh dimensions may shard one tensor dimension. They split it from left to right, each splitting the result
    of the previous one. `StridedShard` changes this order.

    Args:
        dim: tensor dimension; negative counts from the end and is resolved where the number of dimensions is known.

    Raises:
        TypeError: when ``dim`` is not an int.

    Example:
        >>> from hyper_parallel import Shard
        >>> Shard(-1)
        Shard(dim=-1)
    """

    __slots__ = ("dim",)
    dim: int

    def __new__(cls, dim: int) -> Shard:
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"Shard(dim) takes the tensor dimension as an int, got {dim!r}")
        return cls._intern(dim=dim)

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Return size and offset of a rank's shard of a dimension that one mesh dimension splits.

        Args:
            curr_local_size: size of the tensor dimension before this mesh dimension splits it.
            num_chunks: size of the mesh dimension.
            rank: index of the rank in the mesh dimension.

        Returns:
            Size and offset in elements; an empty shard starts at the end.

        Example:
            >>> [Shard.local_shard_size_and_offset(5, 4, rank) for rank in range(4)]
            [(2, 0), (2, 2), (1, 4), (0, 5)]

        Source: ``torch.distributed.tensor.Shard.local_shard_size_and_offset``.
        """
        whole = -(-curr_local_size // num_chunks)
        start = min(whole * rank, curr_local_size)
        return min(whole, curr_local_size - start), start

    def with_dim(self, dim: int) -> Shard:
        """Return the same placement for tensor dimension ``dim``."""
        return type(self)(**{**self._arguments(), "dim": dim})


class StridedShard(Shard):
    """Tensor dimension ``dim`` is split over the ranks along the mesh dimension, after mesh dimensions to its right.

    It results from sharding by tensor parallelism first and by data parallelism second, on a mesh ``("dp", "tp")``.
    Each rank of tp has a consecutive shard of the weight, which the ranks of dp split further. So the elements of one
    dp rank are not consecutive in the tensor, but strided.

    ``split_factor`` defines the order of the splits. The mesh dimensions to the right whose sizes multiply to
    ``split_factor`` split ``dim`` before this one. The remaining mesh dimensions split after it.

    Args:
        dim: tensor dimension, as in `Shard`.
        split_factor: product of the sizes of the mesh dimensions to the right that split ``dim`` before this one. With
            a factor of 1, a DTensor stores ``Shard(dim)``.

    Raises:
        TypeError: when ``dim`` or ``split_factor`` is not an int.
        ValueError: when ``split_factor`` is not positive. The sizes of mesh dimensions are checked when the mesh is
            known.

    Example:
        >>> from hyper_parallel import StridedShard
        >>> StridedShard(0, split_factor=2)
        StridedShard(dim=0, split_factor=2)

    Source: ``torch.distributed.tensor.placement_types._StridedShard``. Here the order of the splits also decides where
    sizes do not divide evenly.
    """

    __slots__ = ("split_factor",)
    split_factor: int

    def __new__(cls, dim: int, split_factor: int) -> StridedShard:
        for value in (dim, split_factor):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"StridedShard(dim, split_factor) takes ints, got {value!r}")
        if split_factor < 1:
            raise ValueError(
                f"StridedShard(dim, split_factor) takes a product of sizes of mesh dimensions, got {split_factor}"
            )
        return cls._intern(dim=dim, split_factor=split_factor)


#: The name of `StridedShard` in torch.
_StridedShard = StridedShard


class PackedShard(Shard):
    """Tensor dimension ``dim`` holds several consecutive parts, and each part is split over the mesh dimension.

    It is for weights that pack several matrices, such as query, key and value. Rank 0 of two holds the first half of
    each part. With ``Shard(dim)``, it would hold the first half of the dimension.

    Operations that treat the elements along the dimension independently keep the placement. Operations that separate
    the parts (``split``, ``chunk``, a view) give each part as ``Shard(dim)``, without communication.

    Other mesh dimensions may shard the dimension further. They split a rank's shard of all parts as one range
    (`StridedShard` for mesh dimensions to the left).

    Args:
        dim: tensor dimension, as in `Shard`.
        sizes: size of each part; or their number, when they are equal.

    Raises:
        TypeError: when ``dim`` or a size is not an int.
        ValueError: for no part, or a negative size. The sum of the sizes is checked when the size of the dimension is
            known.

    Example:
        >>> from hyper_parallel import PackedShard
        >>> PackedShard(0, (8, 2, 2))
        PackedShard(dim=0, sizes=(8, 2, 2))

    Source: the packed and merged column-parallel linear layers of inference engines such as vLLM.
    """

    __slots__ = ("sizes",)
    sizes: int | tuple[int, ...]

    def __new__(cls, dim: int, sizes: int | Sequence[int]) -> PackedShard:
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"PackedShard(dim, sizes) takes the tensor dimension as an int, got {dim!r}")
        parts = tuple(sizes) if isinstance(sizes, Iterable) else sizes
        listed = parts if isinstance(parts, tuple) else (parts,)
        if any(not isinstance(n, int) or isinstance(n, bool) for n in listed):
            raise TypeError(f"PackedShard(dim, sizes) takes ints as sizes, got {sizes!r}")
        if not listed or min(listed) < 0 or parts == 0:
            raise ValueError(
                f"PackedShard(dim, sizes) takes the size of each part or the number of equal parts, got {sizes!r}"
            )
        return cls._intern(dim=dim, sizes=parts)

    def resolve(self, size: int) -> PackedShard:
        """Return the placement with the size of each part, for a dimension of ``size`` elements.

        Raises:
            ValueError: when the parts do not add up to the dimension.
        """
        if isinstance(self.sizes, int):
            if size % self.sizes:
                raise ValueError(
                    f"{size} elements cannot be divided into {self.sizes} parts of equal size: pass the size of each "
                    "part"
                )
            return PackedShard(self.dim, (size // self.sizes,) * self.sizes)
        if sum(self.sizes) != size:
            raise ValueError(
                f"{size} elements cannot be divided into parts of sizes {self.sizes}: the sizes add up to "
                f"{sum(self.sizes)}"
            )
        return self


class Partial(Placement):
    """Every rank along the mesh dimension holds a full-shape tensor, and the value is the reduction of these tensors.

    With ``"sum"``, the value is the sum of the ranks' tensors. Operations that contract a sharded dimension give
    partial results; `DTensor.redistribute` reduces them.

    Args:
        reduce_op: the reduction: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"product"``.

    Raises:
        ValueError: for another ``reduce_op``.

    Example:
        >>> from hyper_parallel import Partial
        >>> Partial()
        Partial(sum)
    """

    __slots__ = ("reduce_op",)
    reduce_op: str
    #: All supported reductions, and the reductions that commute with sums.
    ALL_REDUCE_OPS: ClassVar[tuple[str, ...]] = ("sum", "avg", "min", "max", "product")
    LINEAR_REDUCE_OPS: ClassVar[tuple[str, ...]] = ("sum", "avg")

    def __new__(cls, reduce_op: str = "sum") -> Partial:
        if reduce_op not in REDUCE_OPS:
            raise ValueError(f"Partial(reduce_op) takes one of {', '.join(map(repr, REDUCE_OPS))}, got {reduce_op!r}")
        return cls._intern(reduce_op=reduce_op)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"


_CLASSES: dict[str, type[Placement]] = {cls.__name__: cls for cls in (Replicate, Shard, StridedShard, Partial)}


def described(name: str, *arguments: Any) -> Placement:
    """Return the placement with a class name and arguments. Inverse of `described_placement`."""
    return _CLASSES[name](*arguments)


def own_placement(value: Any) -> Any:
    """Return this library's placement for a placement of the framework; any other value is returned unchanged.

    Raises:
        ValueError: for a reduction that this library does not have.
    """
    if isinstance(value, Placement):
        return value
    found = described_placement(value)
    return value if found is None else described(*found)


def own_placements(values: Any) -> Any:
    """Apply `own_placement` to each item of a sequence; any other value is returned unchanged. Call this function
    before a cache is read or filled."""
    return tuple(map(own_placement, values)) if isinstance(values, (tuple, list)) else values
