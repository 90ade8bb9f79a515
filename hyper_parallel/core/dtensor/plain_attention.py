"""Attention on plain tensors that are local shards of a sequence, in place of the framework's attention function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from hyper_parallel.core.caches import Cache, Table
from hyper_parallel.core.communication.parts import check_digests, digests_of, numbers_of_ranks
from hyper_parallel.core.communication.recorder import LISTENERS
from hyper_parallel.core.communication.transitions import ConvertCotangent
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.layouts.layout import Layout, get_layout, replicated_layout
from hyper_parallel.core.layouts.nesting import nest
from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.plain_code.contexts import marked_like, unmarked
from hyper_parallel.core.rules.attention import cuts_sequence
from hyper_parallel.core.rules.cut_attention import LATEST_WAY, run_again
from hyper_parallel.core.rules.joined_attention import joined_attention
from hyper_parallel.core.rules.key_movement import KeyGather
from hyper_parallel.core.rules.sequence_cut import (
    Ranges,
    SequenceCut,
    attention_method,
    balanced_ranges,
    current_method,
    in_order,
    moved,
    natural_ranges,
    orders,
    sequence_order,
    sizes_of,
)

#: Function that returns facts that must be equal on all ranks. It is called only if ranks compare them.
Facts = Callable[[], dict[str, str]]
#: mesh -> compared calls, as (length of the sequence, index of the call inside the context).
_COMPARED: Table = Table(lambda mesh: Cache(1 << 12), 1 << 16, "compared calls of attention on plain tensors")


class _Parts(ABC):
    """Replacement of the framework's attention function on local shards (see `AttentionRole.attention_calls`).

    Args:
        mesh: the mesh over which the sequence is sharded.
        where: name of the module or context, for messages.
        method: argument of `attention_method`, or None.
    """

    #: The positions of each rank if they are known before any call, else None.
    known: tuple[Ranges, ...] | None = None

    def __init__(self, mesh: DeviceMesh, where: str, method: str | None) -> None:
        self.mesh, self.where, self.method, self.platform = mesh, where, method, mesh.platform
        #: Function that makes a mask of the full length, for calls without a mask. It replaces the causal mask.
        self.make_mask: Callable[[int], Any] | None = None
        #: Whether attention was called.
        self.called = False
        #: Number of positions on each rank, as soon as it is known.
        self.sizes: tuple[int, ...] = ()

    def mixes(self, name: str, lengths: Sequence[int]) -> None:
        """Raise ValueError for another function that mixes positions, because it would see only the local shard."""
        if self.mesh.size() > 1 and not set(lengths).isdisjoint(self.sizes):  # sizes of all ranks: all agree
            raise ValueError(
                f"{name} mixes positions, but a dimension of its input, {list(lengths)}, is this rank's shard of the "
                f"sequence: the ranks of {self.mesh} hold {list(self.sizes)} positions. For attention, call "
                "scaled_dot_product_attention. For other operations, gather the sequence with "
                "context_parallel_unshard, or leave the context first. DTensors placed Shard along the sequence work "
                "without these steps"
            )

    def __call__(self, call: Any, q: Any, k: Any, v: Any, mask: Any, dropout: float) -> Any:
        self.called = True
        distributed = [isinstance(x, DTensor) for x in (q, k, v)]
        if all(distributed) and all(x.device_mesh.contains(self.mesh) for x in (q, k, v)):
            with nullcontext() if self.known is None else self._order(self.known):
                return call(q, k, v, mask if mask is None else _rows_as_held(mask, q._layout))
        shapes = [tuple(x.shape) for x in (q, k, v)]
        ranges = self._ranges(shapes, lambda: self._facts(shapes, q, mask, dropout))
        if any(distributed):
            self._check_layouts(q, k, v)
        self._check_dropout(dropout)
        if not cuts_sequence(*shapes):
            raise ValueError(
                f"{self.where}: queries, keys and values of shapes {shapes} do not fit: batch sizes must be equal, "
                "and the number of query heads a multiple of the key and value heads. Expand keys and values first"
            )
        length = sum(sizes_of(ranges))
        if mask is None and self.make_mask is not None:
            mask = self.make_mask(length)
        mask = None if mask is None else self._mask(mask, q, length, ranges)
        with self._order(ranges):
            y = call(*(self._whole(x, length) for x in (q, k, v)), mask)
        return self._part(y, q)

    def _check_dropout(self, dropout: float) -> None:
        if dropout:
            raise ValueError(
                f"{self.where} has dropout {dropout}: the dropout mask of a single device cannot be drawn in parts. "
                "Set the dropout of attention to 0"
            )

    def _check_layouts(self, *tensors: Any) -> None:
        """Raise ValueError for DTensors that are not placed on heads or samples of the local shard."""
        if not all(isinstance(x, DTensor) and x.device_mesh.is_beside(self.mesh) for x in tensors):
            raise ValueError(
                f"{self.where}: pass queries, keys and values that are all plain tensors, or all DTensors on one mesh "
                f"dimension other than {self.mesh}, which shards the sequence"
            )
        for x in tensors:
            if any(p.is_shard(len(x.shape) - 2) for p in x.placements):
                raise ValueError(
                    f"{self.where}: the sequence is sharded over {self.mesh}, and the placements {list(x.placements)} "
                    f"on {x.device_mesh} shard it again: shard the heads, Shard(1), or use Replicate()"
                )

    def _facts(self, shapes: Sequence[tuple], q: Any, mask: Any, dropout: float) -> dict[str, str]:
        """Return facts that must be equal on all ranks."""
        without = [(*shape[:-2], "length", shape[-1]) if len(shape) > 1 else shape for shape in shapes]
        return {
            "samples, heads and features": str(without),
            "the dtype": str(q.dtype),
            "the mask": "none" if mask is None else f"{tuple(mask.shape)} of {mask.dtype}",
            "the dropout": str(float(dropout)),
        }

    @abstractmethod
    def _ranges(self, shapes: Sequence[tuple], facts: Facts) -> tuple[Ranges, ...]:
        """Return the positions of each rank. Raise if the lengths are wrong for shards of one sequence."""

    @contextmanager
    def _order(self, ranges: tuple[Ranges, ...]) -> Iterator[None]:
        """Context manager around the attention rule. It is entered in each call, because recomputation in backward may
        use another thread."""
        with (
            sequence_order(self.mesh, ranges),
            nullcontext() if self.method is None else attention_method(self.method),
        ):
            yield

    def _exchange(self, shapes: Sequence[tuple], facts: dict[str, str]) -> list[tuple[int, ...]]:
        """Return the lengths of queries, keys and values on all ranks.

        Raises:
            RankMismatchError: on all ranks, when facts differ.
        """
        rows = numbers_of_ranks([*_lengths(shapes), *digests_of(facts)], self.mesh, self.where)
        remedy = "the ranks compute one attention together: use equal batch sizes, heads and features on all ranks"
        check_digests(rows[:, 3:], facts, self.mesh, self.where, remedy)
        return [tuple(row[:3]) for row in rows.tolist()]

    def _no_parts(self, given: Sequence[tuple[int, ...]], wanted: str) -> ValueError:
        """Return the error for lengths that are wrong for shards of one sequence."""
        return ValueError(
            f"{self.where}: the ranks passed (queries, keys, values) of {given} positions along dimension -2 (a number "
            f"of -1 stands for a tensor of fewer than 3 dimensions), but {wanted}"
        )

    def _whole(self, x: Any, length: int) -> Any:
        """Return the DTensor of the full sequence whose local shard is ``x``."""
        shape = tuple(x.shape)
        layout = get_layout(self.mesh, (Shard(len(shape) - 2),), (*shape[:-2], length, shape[-1]))
        if not isinstance(x, DTensor):
            with unmarked():  # the caller says that it is a part
                return DTensor._of_part(x, layout)
        return DTensor._of_part(x.to_local(), nest(layout, x.device_mesh, x.placements, layout.shape))

    def _part(self, y: Any, q: Any) -> Any:
        """Return this rank's shard of the output, distributed like the queries."""
        if not isinstance(q, DTensor):
            with unmarked():
                return marked_like(y.to_local(), q)
        others: DeviceMesh = q.device_mesh
        placements = tuple(y.placements[y.device_mesh.index_of(others, d)] for d in range(others.ndim))
        shape = (*y.shape[:-2], q._layout.shape[-2], y.shape[-1])
        return DTensor._of_part(y.to_local(), get_layout(others, placements, shape))

    def _mask(self, mask: Any, q: Any, length: int, ranges: tuple[Ranges, ...]) -> Any:
        """Return the mask as a DTensor, with its rows in the order in which the ranks hold the queries.

        As for parameters, a rank gets only its contribution to the mask's gradient. The sum over the ranks is the
        gradient of a single device.
        """
        platform, shape = self.platform, tuple(mask.shape)
        if isinstance(mask, DTensor) or len(shape) < 2 or any(n not in (1, length) for n in shape[-2:]):
            raise ValueError(
                f"{self.where}: got a mask of shape {shape} for a sequence of {length} positions: pass the plain mask "
                "of the full sequence, the same on every rank"
            )
        rows = len(shape) - 2
        if shape[rows] == 1:
            layout = replicated_layout(self.mesh, shape)
            mask = ConvertCotangent(platform, self._own_share)(mask)
        else:
            layout = get_layout(self.mesh, (Shard(rows),), shape)
            mask = moved(mask, rows, ((0, length),), ranges[self.mesh.get_local_rank(0)], platform)
        if isinstance(q, DTensor):
            layout = nest(layout, q.device_mesh, [Replicate()] * q.device_mesh.ndim, shape)
        return DTensor._of_part(mask, layout)

    def _own_share(self, g: Any) -> Any:
        """Return this rank's share of a gradient that has been summed over the ranks."""
        return g / self.mesh.size()


class PartsInContext(_Parts):
    """Attention calls inside `context_parallel`, where the sequence is known."""

    known: tuple[Ranges, ...]

    def __init__(self, mesh: DeviceMesh, ranges: tuple[Ranges, ...], method: str | None) -> None:
        super().__init__(mesh, "attention inside of context_parallel", method)
        self.known = ranges
        self._calls = 0
        self.sizes = sizes_of(ranges)

    def _ranges(self, shapes: Sequence[tuple], facts: Facts) -> tuple[Ranges, ...]:
        """Return the known positions of each rank, after a check of the lengths.

        The calls inside a context are numbered. Ranks compare lengths in the first call with this number and sequence
        length. Later calls check locally.
        """
        platform, compared = self.platform, _COMPARED[self.mesh]
        length = sum(self.sizes)
        call, wanted = (length, self._calls), self.sizes
        self._calls += 1
        given = [_lengths(shapes)]
        alone = (call in compared and not CHECKS) or platform.sends_nothing or platform.is_compiling()
        if alone:
            wanted = (wanted[self.mesh.get_local_rank(0)],)
        else:
            given = self._exchange(shapes, facts())
        if given != [(n, n, n) for n in wanted]:
            raise self._no_parts(
                given,
                f"shards of the sequence of {length} positions have {list(wanted)} positions: pass all tensors with "
                "this sequence as buffers to context_parallel, or call cross attention outside of the context",
            )
        if not alone:
            compared[call] = True
        return self.known


class Earlier:
    """State from earlier calls of attention in a module with the style `ContextParallel`.

    Attributes:
        compared: the calls that ranks have compared, by number inside of the module.
        ways: how calls of plain tensors ran, and the sizes of parts. A call like one of these needs no DTensors.
    """

    def __init__(self) -> None:
        self.compared: set[int] = set()
        self.ways: Cache = Cache(1 << 6)


class PartsOfModule(_Parts):
    """Attention calls of a module with the style `ContextParallel`, where only local shards are known.

    The first call compares the lengths of the shards between ranks. If these are equal, later calls assume that the
    lengths stay equal. Otherwise each later call compares (see `uneven_shards`).
    """

    def __init__(self, mesh: DeviceMesh, where: str, balance: bool, method: str | None, earlier: Earlier) -> None:
        super().__init__(mesh, where, method)
        self._balance, self._compared, self._ways, self._calls = balance, earlier.compared, earlier.ways, 0

    def __call__(self, call: Any, q: Any, k: Any, v: Any, mask: Any, dropout: float) -> Any:
        key = None
        if mask is None and self.make_mask is None and not (LISTENERS or CHECKS or orders()):
            key = self._key(call, q, k, v)
        if key is None:
            return super().__call__(call, q, k, v, mask, dropout)
        found = self._ways.get(key)
        if found is not None and self._calls in self._compared and not self.mesh._has_uneven_shards:
            way, self.sizes = found
            self.called = True
            self._calls += 1
            return run_again(way, self.platform, call, q, k, v)
        LATEST_WAY.set(None)
        y = super().__call__(call, q, k, v, mask, dropout)
        latest = LATEST_WAY.get()
        if latest is not None and latest[1:] == ([tuple(x.shape) for x in (q, k, v)], q.dtype):
            self._ways[key] = latest[0], self.sizes
        return y

    def gathered(self, q: Any, k: Any, v: Any, dropout: float) -> tuple[Any, Any, np.ndarray]:
        """Return the full keys and values, in the order of the sequence, and the positions of this rank's queries.

        It serves modules that compute attention themselves. Gradients of keys and values are summed over the ranks.
        """
        shapes = [tuple(x.shape) for x in (q, k, v)]
        ranges = self._ranges(shapes, lambda: self._facts(shapes, q, None, dropout))
        self._check_dropout(dropout)
        length, dim = sum(sizes_of(ranges)), len(shapes[1]) - 2
        layout = get_layout(self.mesh, (Shard(dim),), (*shapes[1][:dim], length, shapes[1][-1]))
        k, v = joined_attention(self.platform).gathered(KeyGather.of(layout, dim), k, v)
        order = tuple(piece for own in ranges for piece in own)
        k, v = (moved(x, dim, order, in_order(order), self.platform) for x in (k, v))
        own = ranges[self.mesh.get_local_rank(0)]
        return k, v, np.concatenate([np.arange(start, start + n) for start, n in own])

    def _key(self, call: Any, q: Any, k: Any, v: Any) -> tuple | None:
        """Return the cache key of a call on plain tensors: all facts, except values, that determine how it runs.

        Return None for other calls.
        """
        options, platform = getattr(call, "options", None), self.platform
        if options is None or isinstance(q, DTensor) or platform.sends_nothing or platform.is_compiling():
            return None
        kinds = type(q), type(k), type(v)
        return options, self.method or current_method(), q.dtype, kinds, q.shape, k.shape, v.shape

    def _ranges(self, shapes: Sequence[tuple], facts: Facts) -> tuple[Ranges, ...]:
        mesh, call = self.mesh, self._calls
        self._calls += 1
        given = [_lengths(shapes)] * mesh.size()
        if (call not in self._compared or mesh._has_uneven_shards or CHECKS) and not self.platform.sends_nothing:
            given = self._exchange(shapes, facts())
        sizes = tuple(n for n, _, _ in given)
        if given != [(n, n, n) for n in sizes] or -1 in sizes or sizes != chunk_sizes(sum(sizes), mesh.size()):
            raise self._no_parts(
                given,
                f"shards of one sequence have {chunk_sizes(max(0, sum(sizes)), mesh.size())} positions: shard the "
                "sequence with shard_sequence, or move cross attention to a module without the style",
            )
        mesh._has_uneven_shards |= len(set(sizes)) > 1
        self._compared.add(call)
        self.sizes = sizes
        return ranges_on(mesh, sum(sizes), self._balance)


def ranges_on(mesh: DeviceMesh, length: int, balance: bool) -> tuple[Ranges, ...]:
    """Return the positions of each rank of a 1-D mesh."""
    return (balanced_ranges if balance else natural_ranges)(length, mesh.size())


def _rows_as_held(mask: Any, queries: Layout) -> Any:
    """Return a mask of distributed queries, with its rows in the order in which the ranks hold the queries.

    A mask whose rows are sharded over these ranks has this order already. In any other mask, the rows are in the order
    of the sequence.
    """
    cut, rows = SequenceCut.of(queries, queries.ndim - 2), len(mask.shape) - 2
    if cut.natural or rows < 0 or mask.shape[rows] != cut.length:
        return mask
    before, after, platform = ((0, cut.length),), cut.in_rank_order, queries.mesh.platform
    if not isinstance(mask, DTensor):
        return moved(mask, rows, before, after, platform)
    held = SequenceCut.of(mask._layout, rows)
    if not held.natural:
        return mask
    if held.mesh_dims:
        mask = mask.redistribute(placements=[Replicate() if p.is_shard(rows) else p for p in mask.placements])
    return DTensor._of_part(moved(mask.to_local(), rows, before, after, platform), mask._layout)


def _lengths(shapes: Sequence[tuple]) -> tuple[int, ...]:
    return tuple(shape[-2] if len(shape) > 2 else -1 for shape in shapes)
