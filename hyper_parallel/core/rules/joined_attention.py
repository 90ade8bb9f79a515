"""Attention of this rank's queries to keys that come in pieces: gathered ones, or a ring of them.

Pieces of the result are joined by the logarithms of their sums of exponentials. Backward needs no scores: the weights
follow from the logarithms. In the ring it lets the pieces go round once more, and behind them their gradients.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.communication.redistribute import plan_redistribution
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.rules.sequence_cut import Pair, SequenceCut, pairs
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.autograd import named


@dataclass(frozen=True)
class KeyGather:
    """Whole keys and values of shards, and back. Both travel in one message where they have the same heads."""

    platform: Platform
    steps: tuple[Any, ...]

    @classmethod
    def of(cls, layout: Layout, dim: int) -> KeyGather:
        """For keys of this layout."""
        placements = [Replicate() if p.is_shard(dim) else p for p in layout.placements]
        return cls(layout.mesh.platform, tuple(plan_redistribution(layout, layout.with_placements(placements))))

    def forward(self, k: Any, v: Any) -> tuple[Any, Any]:
        """Gather whole keys and values from shards, outside autograd."""
        return self._both(k, v, lambda x: self._take(x, [step.collective for step in self.steps]))

    def backward(self, k: Any, v: Any) -> tuple[Any, Any]:
        """This rank's part of the sums over the ranks. Differentiable."""
        return self._both(k, v, lambda x: self._take(x, [step.for_parts.back for step in reversed(self.steps)]))

    def _take(self, x: Any, steps: list[Any]) -> Any:
        for step in steps:
            x = step(x)
        return x

    def _both(self, k: Any, v: Any, take: Any) -> tuple[Any, Any]:
        platform = self.platform
        (*of_k, features), (*of_v, more) = platform.shape_of(k), platform.shape_of(v)
        if not self.steps:
            return k, v
        if of_k != of_v:
            return take(k), take(v)
        both = take(platform.cat([k, v], -1))
        last = len(of_k)
        return platform.narrow(both, last, 0, features), platform.narrow(both, last, features, more)


@dataclass(frozen=True)
class JoinedCall:
    """One call: all but the tensors.

    Attributes:
        cut: of the queries, and of keys and values.
        gather: gets the keys and values, or None: they go round a ring.
        causal: whether a query sees the positions up to its own alone.
        scale: factor of the scores.
    """

    cut: SequenceCut
    gather: KeyGather | None
    causal: bool
    scale: float


class JoinedAttention:
    """The function, on one platform. Get it with `joined_attention`."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        forward, backward = named("JoinedAttention", self._forward), self._backward
        self._apply = platform.joint_function(forward, backward)
        self._keys = platform.joint_function(named("GatherKeys", self._keys_forward), self._keys_backward)

    def __call__(self, call: JoinedCall, q: Any, k: Any, v: Any) -> Any:
        """Attention of local tensors of (..., heads, length, features). Differentiable once."""
        (y,) = self._apply(call, q, k, v)
        return y

    def gathered(self, gather: KeyGather, k: Any, v: Any) -> tuple[Any, Any]:
        """The whole keys and values, for queries of which each rank has a part. Differentiable."""
        k, v = self._keys(gather, k, v)
        return k, v

    def _keys_forward(self, ctx: Any, gather: KeyGather, k: Any, v: Any) -> tuple[Any, Any]:
        detach = self.platform.detach
        ctx.gather = gather
        k, v = gather.forward(detach(k), detach(v))
        return self.platform.contiguous(k), self.platform.contiguous(v)

    def _keys_backward(self, ctx: Any, *cotangents: Any) -> tuple[Any, Any]:
        k, v = cotangents
        if k is None or v is None:  # nothing was computed from one of them
            k, v = (self.platform.zeros(self.platform.shape_of(y), y) if x is None else x for x, y in ((k, v), (v, k)))
        return ctx.gather.backward(k, v)

    # ---------------------------------------------------------------------------------------------- forward
    def _forward(self, ctx: Any, call: JoinedCall, q: Any, k: Any, v: Any) -> tuple[Any]:
        platform = self.platform
        q, k, v = map(platform.detach, (q, k, v))
        shape = (*platform.shape_of(q)[:-1], platform.shape_of(v)[-1])
        ctx.call = call
        if call.gather is not None:
            k, v = call.gather.forward(k, v)
        states: dict[int, tuple[Any, Any]] = {}
        for held, k_piece, v_piece in self._pieces(call, k, v):
            for pair in self._pairs(call, held, q, v):
                part = platform.attention_part(*self._operands(pair, q, k_piece, v_piece), pair.causal, call.scale)
                before = states.get(pair.query)
                states[pair.query] = part if before is None else self._joined(before, part)
        parts = [states[at] for at in sorted(states)]
        out = self._cat([x for x, _ in parts], q)
        lse = self._cat([x for _, x in parts], q)
        y = platform.zeros(shape, q) if out is None else platform.to_dtype(out, q.dtype).reshape(shape)
        ctx.save_for_backward(q, k, v, y, platform.zeros((0,), q) if lse is None else lse)
        return (y,)

    def _pieces(self, call: JoinedCall, k: Any, v: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Positions, keys and values of the pieces."""
        if call.gather is not None:
            cut = call.cut
            held = tuple(x for own in cut.ranges for x in own) if len(cut.mesh_dims) == 1 else _around(cut)
            yield held, k, v
            return
        ring = _Ring(self.platform, call.cut, k, v)
        for source, k, v in ring.pieces():
            yield call.cut.ranges[source], k, v

    def _pairs(self, call: JoinedCall, held: Any, q: Any, v: Any) -> list[Pair]:
        """The pairs to compute: none without samples, heads or features."""
        (*batch, _, features), more = self.platform.shape_of(q), self.platform.shape_of(v)[-1]
        return [] if 0 in (*batch, features, more) else pairs(call.cut.own, held, call.causal)

    def _operands(self, pair: Pair, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        keys = pair.key, pair.keys
        return self._slice(q, pair.query, pair.queries), self._slice(k, *keys), self._slice(v, *keys)

    def _slice(self, x: Any, start: int, length: int) -> Any:
        """Some positions of a local tensor, as (batch, heads, length, features)."""
        platform = self.platform
        shape = platform.shape_of(x)
        if shape[-2] != length:
            x = platform.contiguous(platform.narrow(x, len(shape) - 2, start, length))
        heads, features = shape[-3], shape[-1]
        return x if len(shape) == 4 else x.reshape((math.prod(shape[:-3]), heads, length, features))

    def _joined(self, one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        """Attention to the keys of both."""
        platform = self.platform
        both = platform.cat([one[1], other[1]], -1)
        largest = platform.amax(both, -1)
        total = platform.log(platform.sum_along(platform.shifted_exp(both, largest), -1)) + largest
        first, second = (x * platform.shifted_exp(lse, total) for x, lse in (one, other))
        return first + second, total

    def _cat(self, xs: list[Any], like: Any) -> Any:
        return None if not xs else xs[0] if len(xs) == 1 else self.platform.cat(xs, 2)

    # ---------------------------------------------------------------------------------------------- backward
    def _backward(self, ctx: Any, g: Any) -> tuple[Any, Any, Any]:
        platform, call = self.platform, ctx.call
        if platform.backward_is_recorded():
            raise ValueError(
                "attention over a sequence that is cut has no gradients of gradients, because it keeps no weights: "
                "give the mask as a tensor (attn_mask=) and choose the method 'gather', or gather the sequence first"
            )
        q, k, v, y, lse = ctx.saved_tensors
        if g is None:
            g = platform.zeros(platform.shape_of(y), y)
        d_q: dict[int, Any] = {}

        def part(held: Any, k_piece: Any, v_piece: Any) -> tuple[Any, Any]:
            held = call.cut.ranges[held] if isinstance(held, int) else held
            found: dict[int, list[tuple[Any, Any, Any]]] = {}
            for pair in self._pairs(call, held, q, v):
                at = pair.query, pair.queries
                queries, keys, values = self._operands(pair, q, k_piece, v_piece)
                of_q, of_k, of_v = platform.attention_part_gradients(
                    self._slice(g, *at),
                    queries,
                    keys,
                    values,
                    self._slice(y, *at),
                    self._slice(lse, *at),
                    pair.causal,
                    call.scale,
                )
                d_q[pair.query] = d_q[pair.query] + of_q if pair.query in d_q else of_q
                found.setdefault(pair.key, []).append((pair.keys, of_k, of_v))
            return self._whole(found, k_piece, 1, q), self._whole(found, v_piece, 2, q)

        if call.gather is None:
            of_k, of_v = _Ring(platform, call.cut, k, v).gradients(part)
        else:
            ((held, k_piece, v_piece),) = self._pieces(call, k, v)
            of_k, of_v = call.gather.backward(*part(held, k_piece, v_piece))
        of_q = self._cat([d_q[at] for at in sorted(d_q)], q)
        of_q = platform.zeros(platform.shape_of(q), q) if of_q is None else of_q.reshape(platform.shape_of(q))
        return tuple(platform.to_dtype(x, q.dtype) for x in (of_q, of_k, of_v))

    def _whole(self, found: dict[int, list], piece: Any, which: int, like: Any) -> Any:
        """Gradients of slices of a piece, as one of all of it: zeros where no query sees it."""
        platform = self.platform
        *before, length, features = platform.shape_of(piece)
        wide = platform.zeros((0,), piece)
        wide = platform.to_dtype(wide, platform.dtypes["float32"]) if wide.itemsize < 4 else wide
        slices = [
            (start, entry[0], entry[which].reshape((*before, entry[0], features)))
            for start, several in found.items()
            for entry in several
        ]
        edges = sorted({0, length, *(start for start, _, _ in slices), *(start + n for start, n, _ in slices)})
        parts = []
        for start, end in pairwise(edges):
            seen = [
                platform.narrow(x, len(before), start - at, end - start)
                for at, n, x in slices
                if at <= start and end <= at + n
            ]
            parts.append(sum(seen[1:], seen[0]) if seen else platform.zeros((*before, end - start, features), wide))
        if not parts:
            return platform.zeros((*before, length, features), wide)
        return parts[0] if len(parts) == 1 else platform.cat(parts, len(before))


def _around(cut: SequenceCut) -> tuple[tuple[int, int], ...]:
    """All positions in order, with those of this rank as a piece."""
    ((start, length),) = cut.own
    return ((0, start), (start, length), (start + length, cut.length - start - length))


class _Ring:
    """Keys and values of all ranks of a mesh dimension, one rank's at a time, from rank to rank."""

    def __init__(self, platform: Platform, cut: SequenceCut, k: Any, v: Any) -> None:
        self.platform, self.k, self.v = platform, k, v
        (self.mesh_dim,) = cut.mesh_dims
        self.mesh = cut.layout.mesh
        self.size, self.rank = self.mesh.shape[self.mesh_dim], self.mesh.get_local_rank(self.mesh_dim)
        self.lengths = [sum(n for _, n in own) for own in cut.ranges]
        shapes = platform.shape_of(k), platform.shape_of(v)
        self._around = [(tuple(s[:-2]), s[-1]) for s in shapes]

    def pieces(self) -> Iterator[tuple[int, Any, Any]]:
        """The rank that a piece is of, and its keys and values; the next one is under way meanwhile."""
        k, v, buffer = self.k, self.v, None
        for step in range(self.size):
            last = step == self.size - 1
            if not last:
                buffer = self._packed(k, v) if buffer is None else buffer
                coming = self._send(buffer)
            source = (self.rank - step) % self.size
            yield source, k, v
            if not last:
                buffer = coming()
                k, v = self._unpacked(buffer, (source - 1) % self.size)

    def gradients(self, part: Any) -> tuple[Any, Any]:
        """Gradients of this rank's own keys and values: sums over the ranks of what ``part(source, k, v)`` gives. Those
        of a piece follow it, and come home from the rank that has it last."""
        home: Any = None
        coming: Any = None
        for source, k, v in self.pieces():
            found = part(source, k, v)
            if source == self.rank:
                home = found
                continue
            if coming is not None:
                found = self._added(found, coming(), source)
            coming = self._send(self._packed(*found))
        return self._added(home, coming(), self.rank)

    def _added(self, found: tuple[Any, Any], buffer: Any, source: int) -> tuple[Any, Any]:
        k, v = self._unpacked(buffer, source)
        return found[0] + k, found[1] + v

    def _send(self, buffer: Any) -> Any:
        """Start to send, and give what waits for what comes."""
        received = self.platform.zeros(tuple(self.platform.shape_of(buffer)), buffer)
        work = asynchronous.start("shift", received, buffer, self.mesh, self.mesh_dim)

        def wait(sent: Any = buffer) -> Any:  # which has to live until then
            work.wait()
            return received

        return wait

    def _packed(self, k: Any, v: Any) -> Any:
        platform = self.platform
        flat = platform.join([k, v])
        (count,) = platform.shape_of(flat)
        missing = self._count(max(self.lengths)) - count
        return platform.cat([flat, platform.zeros((missing,), flat)], 0) if missing else flat

    def _unpacked(self, buffer: Any, source: int) -> tuple[Any, Any]:
        length = self.lengths[source]
        count = self._count(length)
        flat = self.platform.narrow(buffer, 0, 0, count)
        k, v = self.platform.part(flat, [(*before, length, features) for before, features in self._around])
        return k, v

    def _count(self, length: int) -> int:
        return sum(math.prod(before) * length * features for before, features in self._around)


_JOINED: Table = Table(JoinedAttention)


def joined_attention(platform: Platform) -> JoinedAttention:
    """The function on this platform, made once."""
    return _JOINED[platform]
