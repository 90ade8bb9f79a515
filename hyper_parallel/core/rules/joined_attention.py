"""Attention of local queries to keys that arrive in pieces: gathered at once, or passed around a ring.

Partial results are combined by the logarithms of their sums of exponentials. Backward needs no scores, because the
weights follow from the logarithms. In the ring, pieces are passed around again, followed by their gradients.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from hyper_parallel.core.caches import Table
from hyper_parallel.core.rules.key_movement import KeyGather, Ring, RingBuffers
from hyper_parallel.core.rules.sequence_cut import Pair, SequenceCut, pairs
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.autograd import named

#: Maximal number of groups of heads that are computed in turn, and minimal bytes of keys and values that each sends.
_MOST_GROUPS, _LEAST_BYTES = 8, 1 << 17

#: (index of the first head, number of heads).
Heads = tuple[int, int]


class _Sizes(NamedTuple):
    """The division of a call into groups of heads, which depends on the shapes of its tensors.

    Attributes:
        shapes: shapes of queries, keys and values, reshaped to four dimensions.
        groups: (query heads, key heads) that are computed in turn. So a rank holds only a part of another rank's piece.
        empty: whether there is no work, because there are no samples, heads or features.
    """

    shapes: tuple[tuple[int, ...], ...]
    groups: list[tuple[Heads, Heads]]
    empty: bool


class _Part(NamedTuple):
    """A `Pair` of slices, with the blocks of queries in which it is computed.

    Attributes:
        pair: the slices of queries and keys.
        all_queries, all_keys: whether the slices are all of this rank's queries, and all keys of the piece.
        blocks: where each block of its queries begins, its place in the pair, and its length, None for a whole pair.
    """

    pair: Pair
    all_queries: bool
    all_keys: bool
    blocks: tuple[tuple[int, int, int | None], ...]


class JoinedCall:
    """The parameters of one call, without tensors.

    Args:
        cut: sharded sequence of queries, keys and values.
        gather: all-gather of keys and values; None for the ring.
        causal: whether a query sees only positions up to its own.
        scale: factor of the scores.
    """

    def __init__(self, cut: SequenceCut, gather: KeyGather | None, causal: bool, scale: float) -> None:
        self.cut, self.gather, self.scale = cut, gather, scale
        held = cut.ranges
        if gather is not None:  # gathered keys are one piece
            held = (tuple(x for own in held for x in own) if len(cut.mesh_dims) == 1 else _around(cut),)
        found = [pairs(cut.own, one, causal) for one in held]
        queries = sum(n for _, n in cut.own)
        starts = sorted({pair.query for several in found for pair in several}) or [0]
        #: Where the queries begin and end whose results are joined together.
        self.blocks = [*pairwise([*starts, queries])]
        #: The parts of the computation of each piece.
        self.parts = [
            [self._part(pair, queries, sum(n for _, n in one)) for pair in several]
            for several, one in zip(found, held, strict=True)
        ]
        self._sizes: dict[tuple, _Sizes] = {}
        self._buffers: dict[tuple, RingBuffers] = {}

    def _part(self, pair: Pair, queries: int, keys: int) -> _Part:
        blocks: list[tuple[int, int, int | None]] = [
            (start, start - pair.query, end - start)
            for start, end in self.blocks
            if pair.query <= start and end <= pair.query + pair.queries
        ]
        if len(blocks) == 1:
            blocks = [(blocks[0][0], 0, None)]
        return _Part(pair, pair.queries == queries, pair.keys == keys, tuple(blocks))

    def ring(self, platform: Platform, k: Any, v: Any) -> Ring:
        """Return a ring of these keys and values."""
        key = k.shape, v.shape
        buffers = self._buffers.get(key)
        if buffers is None:
            buffers = self._buffers[key] = RingBuffers.of(self.cut, k.shape, v.shape)
        return Ring(platform, self.cut, k, v, buffers)

    def sizes(self, *tensors: Any) -> _Sizes:
        """Return the division into groups of heads for queries, keys and values of these shapes.

        Ranks that communicate get the same groups. The tensors of these ranks differ only in the number of positions,
        and the largest number decides.
        """
        key = (*(x.shape for x in tensors), tensors[1].itemsize)
        found = self._sizes.get(key)
        if found is None:
            q, k, v = ((math.prod(x.shape[:-3]), *x.shape[-3:]) for x in tensors)
            ranks = math.prod(self.cut.layout.mesh.shape[d] for d in self.cut.mesh_dims)
            sent = q[0] * k[1] * -(-self.cut.length // ranks) * (k[3] + v[3]) * tensors[1].itemsize
            count = next((n for n in range(_MOST_GROUPS, 1, -1) if k[1] % n == 0 and sent >= n * _LEAST_BYTES), 1)
            each = q[1] // count, k[1] // count
            groups = [((i * each[0], each[0]), (i * each[1], each[1])) for i in range(count)]
            found = self._sizes[key] = _Sizes((q, k, v), groups, 0 in (q[0], q[1], q[3], v[3]))
        return found


class JoinedAttention:
    """The attention function on one platform. Instances come from `joined_attention`."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        forward, backward = named("JoinedAttention", self._forward), self._backward
        self._apply = platform.joint_function(forward, backward)
        self._keys = platform.joint_function(named("GatherKeys", self._keys_forward), self._keys_backward)

    def __call__(self, call: JoinedCall, q: Any, k: Any, v: Any) -> Any:
        """Return the attention of local tensors of shape (..., heads, length, features). It is differentiable once."""
        (y,) = self._apply(call, q, k, v)
        return y

    def gathered(self, gather: KeyGather, k: Any, v: Any) -> tuple[Any, Any]:
        """Return full keys and values, for queries that are sharded over ranks. It is differentiable."""
        k, v = self._keys(gather, k, v)
        return k, v

    def _keys_forward(self, ctx: Any, gather: KeyGather, k: Any, v: Any) -> tuple[Any, Any]:
        detach = self.platform.detach
        ctx.gather = gather
        k, v = gather.forward(detach(k), detach(v))
        return self.platform.contiguous(k), self.platform.contiguous(v)

    def _keys_backward(self, ctx: Any, *cotangents: Any) -> tuple[Any, Any]:
        k, v = cotangents
        if k is None or v is None:  # one of them was not used
            k, v = (self.platform.zeros(self.platform.shape_of(y), y) if x is None else x for x, y in ((k, v), (v, k)))
        return ctx.gather.backward([k, v])

    # ---------------------------------------------------------------------------------------------- forward
    def _forward(self, ctx: Any, call: JoinedCall, q: Any, k: Any, v: Any) -> tuple[Any]:
        platform = self.platform
        q, k, v = map(platform.detach, (q, k, v))  # plain tensors, so that shapes are local
        ctx.call, ctx.shape, ctx.sizes = call, q.shape, call.sizes(q, k, v)
        q, groups = _flat(q), ctx.sizes.groups
        whole: list[Any] = []
        found = []
        for heads, shared in groups:
            k_heads, v_heads = self._heads(k, shared), self._heads(v, shared)
            if call.gather is not None:
                k_heads, v_heads = (_flat(x) for x in call.gather.forward(k_heads, v_heads))
                whole += k_heads, v_heads
            else:
                k_heads, v_heads = _flat(k_heads), _flat(v_heads)
            found.append(self._attend(call, ctx.sizes, self._heads(q, heads), k_heads, v_heads))
        y, lse = found[0]
        if len(found) > 1:
            y, lse = (self._cat(list(x), -3) for x in zip(*found, strict=True))
        if call.gather is None:
            whole = [_flat(k), _flat(v)]
        ctx.save_for_backward(q, y, lse, *whole)
        return (_shaped(y, (*ctx.shape[:-1], y.shape[-1])),)

    def _heads(self, x: Any, at: Heads) -> Any:
        """Return some heads of a local tensor."""
        return x if x.shape[-3] == at[1] else self.platform.narrow(x, x.ndim - 3, *at)

    def _attend(self, call: JoinedCall, sizes: _Sizes, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output of some heads, and the logarithms of their sums of exponentials."""
        platform = self.platform
        states: dict[int, tuple[Any, Any]] = {}
        for pieces, k_piece, v_piece in self._pieces(call, k, v):
            for part in () if sizes.empty else pieces:
                causal = part.pair.causal
                state = platform.attention_part(*self._operands(part, q, k_piece, v_piece), causal, call.scale)
                for start, at, length in part.blocks:
                    now = state if length is None else tuple(platform.narrow(x, 2, at, length) for x in state)
                    before = states.pop(start, None)
                    states[start] = now if before is None else platform.joined_attention(*before, *now)
        if not states:
            shape = q.shape[:-1]
            return platform.zeros((*shape, v.shape[-1]), q), platform.zeros((*shape, 1), q)
        if len(states) == 1:
            ((out, lse),) = states.values()
        else:
            parts = [states[start] for start, _ in call.blocks]
            out, lse = self._cat([x for x, _ in parts], -2), platform.cat([x for _, x in parts], 2)
        return out if out.dtype == q.dtype else platform.to_dtype(out, q.dtype), lse

    def _cat(self, xs: list[Any], dim: int) -> Any:
        """Return ``xs`` concatenated along heads (-3) or positions (-2).

        In memory, positions come before heads, as projections read and write tensors, so that no copies are needed.
        """
        if len(xs) == 1:
            return xs[0]
        platform = self.platform
        swapped = [platform.transposed(x, -3, -2) for x in xs]
        return platform.transposed(platform.cat(swapped, xs[0].ndim - 5 - dim), -3, -2)

    def _pieces(self, call: JoinedCall, k: Any, v: Any) -> Iterator[tuple[list[_Part], Any, Any]]:
        """Yield the pieces of keys and values, each with the parts of the computation that use this piece."""
        if call.gather is not None:
            yield call.parts[0], k, v
            return
        for source, k_piece, v_piece in call.ring(self.platform, k, v).pieces():
            yield call.parts[source], k_piece, v_piece

    def _operands(self, part: _Part, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Return the slices of queries, keys and values in a part.

        Tensors have shape (batch, heads, positions, features).
        """
        pair, narrow = part.pair, self.platform.narrow
        if not part.all_queries:
            q = narrow(q, 2, pair.query, pair.queries)
        if not part.all_keys:
            k, v = narrow(k, 2, pair.key, pair.keys), narrow(v, 2, pair.key, pair.keys)
        return q, k, v

    # ---------------------------------------------------------------------------------------------- backward
    def _backward(self, ctx: Any, g: Any) -> tuple[Any, Any, Any]:
        platform, call = self.platform, ctx.call
        if platform.backward_is_recorded():
            raise ValueError(
                "attention over a sharded sequence has no second-order gradients, because it does not keep its "
                "weights. Pass the mask as a tensor (attn_mask=) and choose the method 'gather', or gather the "
                "sequence first"
            )
        q, y, lse, *keys = ctx.saved_tensors
        groups = ctx.sizes.groups
        g = platform.zeros(y.shape, y) if g is None else _shaped(g, y.shape)
        found: list[list[Any]] = [[], [], []]
        if call.gather is None:
            rings = [call.ring(platform, *(self._heads(x, shared) for x in keys)) for _, shared in groups]
        for i, (heads, _) in enumerate(groups):
            ours = [self._heads(x, heads) for x in (g, q, y, lse)]
            d_q: dict[int, Any] = {}
            part = partial(self._piece_gradients, call, ctx.sizes, ours, d_q)
            if call.gather is not None:
                both = part(0, *keys[2 * i : 2 * i + 2])
                shapes = [(*ctx.shape[:-3], *x.shape[1:]) for x in both]
                both[:] = map(_shaped, both, shapes)
                of_keys: Sequence[Any] = call.gather.backward(both)
            else:
                of_keys = rings[i].gradients(part, rings[i + 1].start if i + 1 < len(rings) else None)
            found[0].append(self._of_queries(call, d_q, ours[1], lse))
            found[1].append(of_keys[0])
            found[2].append(of_keys[1])
            del of_keys  # only the lists refer to the gradients, and free them
        shapes = [(*ctx.shape[:-3], *shape[1:]) for shape in ctx.sizes.shapes]
        return tuple(_shaped(self._of_heads(x, q.dtype), shape) for x, shape in zip(found, shapes, strict=True))

    def _of_heads(self, parts: list[Any], dtype: Any) -> Any:
        """Return the gradients of all heads, concatenated from those of the groups. The list is emptied to free
        memory."""
        parts[:] = [x if x.dtype == dtype else self.platform.to_dtype(x, dtype) for x in parts]
        x = self._cat(parts, -3)
        parts.clear()
        return x

    def _of_queries(self, call: JoinedCall, d_q: dict[int, Any], q: Any, lse: Any) -> Any:
        """Return the gradients of all query blocks, and free the dictionary."""
        if not d_q:
            return self.platform.zeros(q.shape, lse)
        return self._cat([d_q.pop(start) for start, _ in call.blocks], -2)

    def _piece_gradients(
        self, call: JoinedCall, sizes: _Sizes, ours: list[Any], d_q: dict[int, Any], source: int, k: Any, v: Any
    ) -> list[Any]:
        """Return the gradients of a piece of keys and values. Gradients of queries are added to ``d_q``.

        Args:
            call: parameters of the call.
            sizes: groups of heads of the call.
            ours: cotangent, queries, output and logarithms of some heads.
            d_q: start of a query block -> its gradient.
            source: index of the piece.
            k: keys of these heads.
            v: values of these heads.
        """
        g, q, y, lse = ours
        platform = self.platform
        of_keys: list[tuple[int, int, Any]] = []
        of_values: list[tuple[int, int, Any]] = []
        for part in () if sizes.empty else call.parts[source]:
            pair = part.pair
            queries, keys, values = self._operands(part, q, k, v)
            slices = [g, y, lse]
            if not part.all_queries:
                slices = [platform.narrow(x, 2, pair.query, pair.queries) for x in slices]
            of_q, of_k, of_v = platform.attention_part_gradients(
                slices[0], queries, keys, values, slices[1], slices[2], pair.causal, call.scale
            )
            for start, at, length in part.blocks:
                x = of_q if length is None else platform.narrow(of_q, 2, at, length)
                if start in d_q:
                    d_q[start] += x
                else:
                    d_q[start] = x
            if part.all_keys and len(call.parts[source]) == 1:
                return [of_k, of_v]
            of_keys.append((pair.key, pair.keys, of_k))
            of_values.append((pair.key, pair.keys, of_v))
            del of_q, of_k, of_v
        return [self._whole(of_keys, k), self._whole(of_values, v)]

    def _whole(self, found: list[tuple[int, int, Any]], piece: Any) -> Any:
        """Return the gradient of a full piece from gradients of slices, with zeros for keys that no query sees.

        Args:
            found: (start, length, gradient) of each slice. The list is emptied to free its memory.
            piece: keys or values of the piece.
        """
        platform = self.platform
        *before, length, features = piece.shape
        wide = platform.zeros((0,), piece)
        wide = platform.to_dtype(wide, platform.dtypes["float32"]) if wide.itemsize < 4 else wide
        slices = found[:]
        found.clear()
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


def _shaped(x: Any, shape: Sequence[int]) -> Any:
    """Return the tensor in another shape, or unchanged if the number of dimensions is the same."""
    return x if x.ndim == len(shape) else x.reshape(tuple(shape))


def _flat(x: Any) -> Any:
    """Return the tensor reshaped to four dimensions."""
    return x if x.ndim == 4 else x.reshape((math.prod(x.shape[:-3]), *x.shape[-3:]))


def _around(cut: SequenceCut) -> tuple[tuple[int, int], ...]:
    """Return all positions in order, as the ranges before, in and after this rank's shard."""
    ((start, length),) = cut.own
    return ((0, start), (start, length), (start + length, cut.length - start - length))


_JOINED: Table = Table(JoinedAttention)


def joined_attention(platform: Platform) -> JoinedAttention:
    """Return the cached attention function of a platform."""
    return _JOINED[platform]
