"""Positions of a sharded sequence that each rank holds, and the method of attention over it.

The sequence dimension has the placement `Shard`, and positions are those of the shards. With `sequence_order`, a
program declares that it has reordered the sequence before sharding, for load balance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.layouts.layout import Layout

#: (start, length) ranges of positions, in the order in which a rank holds them.
Ranges = tuple[tuple[int, int], ...]

#: The methods of attention over a sharded sequence.
METHODS = ("gather", "exchange", "ring")

_METHOD: ContextVar[str | None] = ContextVar("hyper_parallel_attention_method", default=None)
#: The method outside `attention_method`. It is in a list because threads share it.
DEFAULT_METHOD: list[str | None] = [None]
_ORDERS: ContextVar[tuple[tuple[Any, tuple[Ranges, ...]], ...]] = ContextVar(
    "hyper_parallel_sequence_orders", default=()
)


def natural_ranges(length: int, ranks: int) -> tuple[Ranges, ...]:
    """Return consecutive positions for each rank.

    Example:
        >>> natural_ranges(5, 2)
        (((0, 3),), ((3, 2),))
    """
    sizes = chunk_sizes(length, ranks)
    return tuple(((sum(sizes[:i]), n),) for i, n in enumerate(sizes))


def balanced_ranges(length: int, ranks: int) -> tuple[Ranges, ...]:
    """Return a range from the start and a range from the end of the sequence for each rank.

    This balances the work under a causal mask. Each rank holds as many positions as without balancing.

    Example:
        >>> balanced_ranges(8, 2)
        (((0, 2), (6, 2)), ((2, 2), (4, 2)))
    """
    sizes = chunk_sizes(length, ranks)
    heads = [n - n // 2 for n in sizes]
    found, end = [], length
    for i, n in enumerate(sizes):
        end -= n // 2
        found.append(((sum(heads[:i]), heads[i]), (end, n // 2)))
    return tuple(found)


def sizes_of(ranges: Sequence[Ranges]) -> tuple[int, ...]:
    """Return the number of positions on each rank."""
    return tuple(sum(n for _, n in own) for own in ranges)


@contextmanager
def attention_method(method: str | None) -> Iterator[None]:
    """Context manager that selects the method of attention over a sharded sequence, one of `METHODS`. With None, each
    call chooses."""
    token = _METHOD.set(method)
    try:
        yield
    finally:
        _METHOD.reset(token)


def chosen_method() -> str | None:
    """Return the method that `attention_method` selected, or None."""
    return _METHOD.get()


def current_method() -> str | None:
    """Return the method that the program requests, or None."""
    return _METHOD.get() or DEFAULT_METHOD[0]


@contextmanager
def sequence_order(mesh: Any, ranges: tuple[Ranges, ...]) -> Iterator[None]:
    """Context manager that declares the positions of shards along the sequence on the 1-D ``mesh``. It applies to
    shards of matching sizes."""
    token = _ORDERS.set((*_ORDERS.get(), (mesh, ranges)))
    try:
        yield
    finally:
        _ORDERS.reset(token)


def orders() -> tuple[tuple[Any, tuple[Ranges, ...]], ...]:
    """Return the orders of all enclosing `sequence_order` contexts, the outermost first."""
    return _ORDERS.get()


def order_on(mesh: Any) -> tuple[Ranges, ...] | None:
    """Return the positions of the ranks that `sequence_order` declares for the 1-D ``mesh``, or None."""
    return next((order for of_mesh, order in reversed(_ORDERS.get()) if of_mesh is mesh), None)


@dataclass(frozen=True)
class SequenceCut:
    """A sequence of ``length`` positions, sharded along some mesh dimensions.

    Attributes:
        layout: layout of a tensor with that sequence.
        dim: the dimension of the sequence.
        mesh_dims: mesh dimensions that shard the sequence.
        ranges: the positions of each rank, if one mesh dimension shards the sequence; else only those of this rank.
        own: the positions of this rank.
        natural: whether the shards in rank order are the sequence.
    """

    layout: Layout
    dim: int
    mesh_dims: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    own: Ranges
    natural: bool

    @classmethod
    def of(cls, layout: Layout, dim: int) -> SequenceCut:
        """Return the sharded sequence in dimension ``dim`` of a tensor of this layout."""
        mesh = layout.mesh
        mesh_dims = tuple(d for d in layout.shard_mesh_dims(dim) if mesh.shape[d] > 1)
        length = layout.shape[dim]
        if len(mesh_dims) != 1:
            own = layout.local_ranges()[dim]
            return cls(layout, dim, mesh_dims, (own,), own, True)
        (mesh_dim,) = mesh_dims
        ranges = natural_ranges(length, mesh.shape[mesh_dim])
        natural = True
        for of_mesh, order in reversed(_ORDERS.get()):
            if sizes_of(order) == sizes_of(ranges) and _is_along(mesh, mesh_dim, of_mesh):
                ranges, natural = order, order == ranges
                break
        return cls(layout, dim, mesh_dims, ranges, ranges[mesh.get_local_rank(mesh_dim)], natural)

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.layout.shape[self.dim]

    @property
    def in_rank_order(self) -> Ranges:
        """The positions of all ranks, concatenated in rank order."""
        if self.natural:
            return ((0, self.length),)
        return tuple(piece for own in self.ranges for piece in own)


def _is_along(mesh: Any, mesh_dim: int, one: Any) -> bool:
    """Return whether the 1-D mesh ``one`` has the same ranks as ``mesh`` along ``mesh_dim``, for this rank."""
    return tuple(mesh.ranks_along(mesh_dim)) == tuple(one.ranks_along(0))


def moved(x: Any, dim: int, before: Ranges, after: Ranges, platform: Any) -> Any:
    """Return ``x``, whose positions along ``dim`` are ``before``, reordered to ``after``. It is differentiable.

    Each range of ``after`` must be inside a range of ``before``.
    """
    if before == after:
        return x
    pieces = []
    for start, length in after:
        at = 0
        for begin, n in before:
            if length and begin <= start and start + length <= begin + n:
                pieces.append(platform.narrow(x, dim, at + start - begin, length))
                break
            at += n
    if not pieces:
        return platform.narrow(x, dim, 0, 0)
    return platform.cat(pieces, dim) if len(pieces) > 1 else pieces[0]


def in_order(ranges: Ranges) -> Ranges:
    """Return the nonempty ranges, sorted by position."""
    return tuple(sorted(piece for piece in ranges if piece[1]))


@dataclass(frozen=True)
class Pair:
    """A slice of queries and a slice of keys that these queries see. With ``causal``, each query sees only keys up to
    its position."""

    query: int
    queries: int
    key: int
    keys: int
    causal: bool


def pairs(own: Ranges, held: Ranges, causal: bool) -> list[Pair]:
    """Return as few pairs as possible that cover attention of queries at positions ``own`` to keys at positions
    ``held``.

    With ``causal``, each range of ``own`` must equal a range of ``held``, or overlap no range of ``held``.

    Example:
        >>> pairs(((2, 2),), ((0, 2), (2, 2)), True)
        [Pair(query=0, queries=2, key=0, keys=2, causal=False), Pair(query=0, queries=2, key=2, keys=2, causal=True)]
    """
    count = sum(n for _, n in own)
    if not causal:
        own, held = (((0, sum(n for _, n in x)),) for x in (own, held))
    elif count and own == held == tuple(sorted(own)):  # sorted, so that local indices compare like positions
        return [Pair(0, count, 0, count, True)]
    found: list[Pair] = []
    query = 0
    for start, queries in own:
        key = 0
        for begin, keys in held:
            if queries and keys and (begin < start or not causal):
                _add(found, Pair(query, queries, key, keys, False))
            elif queries and keys and begin == start:
                found.append(Pair(query, queries, key, keys, True))
            key += keys
        query += queries
    return _merged(found)


def _add(found: list[Pair], pair: Pair) -> None:
    """Add a pair, or merge it with the last pair if that has the same queries and the preceding keys."""
    last = found[-1] if found else None
    if last is not None and not last.causal and last.query == pair.query and last.key + last.keys == pair.key:
        found[-1] = Pair(pair.query, pair.queries, last.key, last.keys + pair.keys, False)
    else:
        found.append(pair)


def _merged(found: list[Pair]) -> list[Pair]:
    """Merge pairs that have the same keys and adjacent queries, and return all pairs."""
    merged: list[Pair] = []
    for pair in found:
        last = merged[-1] if merged else None
        if (
            last is not None
            and not (last.causal or pair.causal)
            and (last.key, last.keys) == (pair.key, pair.keys)
            and last.query + last.queries == pair.query
        ):
            merged[-1] = Pair(last.query, last.queries + pair.queries, pair.key, pair.keys, False)
        else:
            merged.append(pair)
    return merged
