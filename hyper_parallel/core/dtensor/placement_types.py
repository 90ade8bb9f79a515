"""Placements: how a tensor lies on one dimension of a mesh. Mirrors ``torch.distributed.tensor.placement_types``.

Placements are interned: ``Shard(0) is Shard(0)``, so that layouts and caches compare them by identity.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["REDUCE_OPS", "Partial", "Placement", "Replicate", "Shard"]

#: What a `Partial` may be reduced with.
REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Placement:
    """Base class of `Shard`, `Replicate` and `Partial`. Immutable and interned."""

    __slots__ = ()
    _interned: ClassVar[dict[tuple, Placement]] = {}

    @classmethod
    def _intern(cls, *key: Any) -> Any:
        full = (cls, *key)
        found = Placement._interned.get(full)
        if found is None:
            found = Placement._interned.setdefault(full, object.__new__(cls))
        return found

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is `Shard`, of tensor dimension ``dim`` if that is given."""
        return False

    def is_replicate(self) -> bool:
        """Whether this is `Replicate`."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is `Partial`, with ``reduce_op`` if that is given."""
        return False

    def __copy__(self) -> Placement:
        return self

    def __deepcopy__(self, memo: dict) -> Placement:
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self!r} cannot be changed: make a new placement")


class Replicate(Placement):
    """Every rank of the mesh dimension holds the whole tensor.

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

    def __reduce__(self) -> tuple:
        return (Replicate, ())

    def __repr__(self) -> str:
        return "Replicate()"


class Shard(Placement):
    """Tensor dimension ``dim`` is split over the mesh dimension as `torch.chunk` splits it: 5 over 4 ranks gives 2, 2,
    1 and 0.

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
        placement = cls._intern(dim)
        object.__setattr__(placement, "dim", dim)
        return placement

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __reduce__(self) -> tuple:
        return (Shard, (self.dim,))

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"


class Partial(Placement):
    """Every rank of the mesh dimension holds one summand (or factor, or candidate); the tensor is their reduction.

    Args:
        reduce_op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"product"``.

    Raises:
        ValueError: for another ``reduce_op``.

    Example:
        >>> from hyper_parallel import Partial
        >>> Partial()
        Partial(sum)
    """

    __slots__ = ("reduce_op",)
    reduce_op: str

    def __new__(cls, reduce_op: str = "sum") -> Partial:
        if reduce_op not in REDUCE_OPS:
            raise ValueError(f"Partial(reduce_op) takes one of {', '.join(map(repr, REDUCE_OPS))}, got {reduce_op!r}")
        placement = cls._intern(reduce_op)
        object.__setattr__(placement, "reduce_op", reduce_op)
        return placement

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __reduce__(self) -> tuple:
        return (Partial, (self.reduce_op,))

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"
