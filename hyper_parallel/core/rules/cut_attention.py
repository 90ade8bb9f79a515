"""Attention whose queries are sharded along the sequence: the choice of a method, and its execution.

====================  ==================================  =========================================================
method                sent                                temporarily in a rank's memory
====================  ==================================  =========================================================
``"gather"``          keys and values, to all             all keys and values
``"exchange"``        queries, keys, values, output       the full sequence of some of the heads
``"ring"``            keys and values, rank to rank       local keys and values, and those of one other rank
====================  ==================================  =========================================================

Source: ``"exchange"`` is DeepSpeed-Ulysses (Jacobs et al. 2023); see `joined_attention` for the ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import numpy as np

from hyper_parallel.core.caches import Cache, Table
from hyper_parallel.core.communication.shard_steps import AllToAll
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.rules.joined_attention import JoinedCall, joined_attention
from hyper_parallel.core.rules.key_movement import KeyGather
from hyper_parallel.core.rules.op_sharding import LocalCall
from hyper_parallel.core.rules.sequence_cut import (
    SequenceCut,
    current_method,
    in_order,
    moved,
    orders,
    sizes_of,
)
from hyper_parallel.platform.contract.autograd import named


def is_cut(layouts: tuple) -> bool:
    """Return whether the queries of these operands are sharded along the sequence."""
    return SequenceCut.of(layouts[0], layouts[0].ndim - 2).mesh_dims != ()


def attend(call: LocalCall) -> Any:
    """Return attention of local tensors whose queries are sharded along the sequence. It is the `OpSharding.call` of
    the rule.

    Raises:
        ValueError: on all ranks, before any communication, when the requested method is impossible.
    """
    platform = call.platform
    q, k, v, mask = (*call.operands, None)[:4]
    key = (call.operand_layouts, call.static_args, current_method(), orders(), q.dtype)
    way = _WAYS.get(key)
    if way is None:
        way = _WAYS[key] = _find_way(platform, q, call.operand_layouts, call.static_args)
    if mask is None and (way.exchange or way.joined):
        LATEST_WAY.set((way, [*map(platform.shape_of, (q, k, v))], q.dtype))
    if way.exchange is not None:
        return way.exchange((q, k, v, mask), lambda operands: call.native(operands, call.static_args))
    joined = joined_attention(platform)
    if way.joined is not None:
        return joined(way.joined, q, k, v)
    cut = way.cut
    if way.gather is not None:
        k, v = joined.gathered(way.gather, k, v)
        k, v = (
            moved(x, len(platform.shape_of(x)) - 2, cut.in_rank_order, in_order(cut.in_rank_order), platform)
            for x in (k, v)
        )
    if call.static_args[0]:
        mask = _own_rows(platform, q, mask, cut.own, call.operand_layouts[1].shape[-2])
    return _with_a_query(platform, call.native, (q, k, v, mask), (False, *call.static_args[1:]))


class _Way(NamedTuple):
    """The algorithm of attention for a call with given layouts. Either ``exchange``, ``joined`` or the native operation
    computes the result.

    Attributes:
        cut: sharded sequence of the queries.
        exchange: exchange of positions for heads, or None.
        joined: argument of `JoinedAttention`, or None.
        gather: all-gather of keys and values for the native operation; None if this rank has the full ones.
    """

    cut: SequenceCut
    exchange: Exchange | None = None
    joined: JoinedCall | None = None
    gather: KeyGather | None = None


#: How the latest call without a mask ran, of the ways that `run_again` knows; shapes and dtype of its local tensors.
LATEST_WAY: ContextVar[tuple[_Way, list, Any] | None] = ContextVar("hyper_parallel_way_of_attention", default=None)

_WAYS: Cache = Cache(1 << 10, "ways of attention over cut sequences")


def run_again(way: _Way, platform: Any, native: Callable[..., Any], q: Any, k: Any, v: Any) -> Any:
    """Return attention without a mask, by the algorithm of an earlier call with tensors of the same shapes.

    Args:
        way: of `LATEST_WAY`.
        platform: platform of the tensors.
        native: the function of plain tensors and a mask, with its other arguments.
        q: queries.
        k: keys.
        v: values.
    """
    if way.joined is not None:
        return joined_attention(platform)(way.joined, q, k, v)
    return cast("Exchange", way.exchange)((q, k, v, None), lambda operands: native(*operands))


def _find_way(platform: Any, q: Any, layouts: tuple, static_args: tuple) -> _Way:
    q_layout, k_layout, v_layout, mask_layout = (*layouts, None)[:4]
    cut = SequenceCut.of(q_layout, q_layout.ndim - 2)
    together = k_layout.shape[-2] == cut.length
    sharded = together and bool(SequenceCut.of(k_layout, k_layout.ndim - 2).mesh_dims)
    way = choose(platform, q, cut, (q_layout, k_layout, v_layout, mask_layout)) if sharded else "gather"
    if way == "exchange":
        return _Way(cut, exchange=Exchange(platform, cut))
    gather = KeyGather.of(k_layout, k_layout.ndim - 2) if sharded else KeyGather(platform, ())
    causal = bool(static_args[0])
    if mask_layout is None and together and (causal or way == "ring"):
        scale = static_args[2] if len(static_args) > 2 else None
        scale = 1 / math.sqrt(q_layout.shape[-1] or 1) if scale is None else scale
        return _Way(cut, joined=JoinedCall(cut, None if way == "ring" else gather, causal, scale))
    return _Way(cut, gather=gather if sharded else None)


def choose(platform: Any, q: Any, cut: SequenceCut, layouts: tuple) -> str:
    """Return the method that the program requests, or else the method that sends the least.

    The ring and the all-gather send the same amount. The ring is used if gathered keys and values would need more
    memory than the local queries and outputs.
    """
    q_layout, k_layout, v_layout, mask_layout = layouts
    asked = current_method()
    if len(cut.mesh_dims) != 1:
        return "gather"
    ranks = q_layout.mesh.shape[cut.mesh_dims[0]]
    heads = [layout.part_sizes(layout.ndim - 3) for layout in (q_layout, k_layout)]
    exchanges = all(n and n % ranks == 0 for sizes in heads for n in sizes)
    if mask_layout is not None:
        exchanges = exchanges and all(n == 1 for n in mask_layout.shape[-3:-1])
    if asked is not None:
        if asked == "exchange" and not exchanges:
            raise ValueError(
                f"attention over a sharded sequence cannot exchange {max(heads[0])} query heads and {max(heads[1])} "
                f"key heads over {ranks} ranks. Both numbers must be multiples of the number of ranks, and the mask "
                "equal for all queries and heads. Choose the method 'gather' or 'ring', or None"
            )
        if asked == "ring" and mask_layout is not None:
            raise ValueError(
                "attention with the method 'ring' supports the causal mask (is_causal=True) alone: choose the method "
                "'gather', or None"
            )
        return asked
    queries, keys, values = (math.prod(layout.local_shape[:-2]) * layout.shape[-1] for layout in layouts[:3])
    outputs = math.prod(q_layout.local_shape[:-2]) * v_layout.shape[-1]
    if exchanges and queries + keys + values + outputs < ranks * (keys + values):
        return "exchange"
    rings = mask_layout is None and platform.supports("shift", "", q)
    return "ring" if rings and ranks * (keys + values) > queries + outputs else "gather"


# ------------------------------------------------------------------------------------------------ exchange to heads
class Exchange:
    """Attention by all-to-all: each rank computes the full sequence for its share of the heads.

    Tensors are sent with positions before heads, as projections write and read them.
    """

    def __init__(self, platform: Any, cut: SequenceCut) -> None:
        self._platform, self._mesh, (self._mesh_dim,) = platform, cut.layout.mesh, cut.mesh_dims
        self._sizes = sizes_of(cut.ranges)
        in_ranks = cut.in_rank_order
        self._orders = in_ranks, in_order(in_ranks), tuple(x for x in in_ranks if x[1])
        self._steps: dict[tuple[int, int], AllToAll] = {}

    def __call__(self, operands: tuple, native: Callable[[tuple], Any]) -> Any:
        """Return attention of this rank's positions, with all heads.

        ``native(operands)`` runs on the full sequence of some heads in between.
        """
        *qkv, mask = operands
        to_heads, to_positions = _EXCHANGES[self._platform]
        y = native((*to_heads(self, *qkv), mask))
        return to_positions((self, self._platform.shape_of(qkv[0])[-3]), y)[0]

    def to_heads(self, x: Any, heads: int, collective: bool) -> Any:
        """Return the full sequence of this rank's share of the heads, from this rank's positions of all ``heads``."""
        in_ranks, natural, _ = self._orders
        platform, dim = self._platform, len(self._platform.shape_of(x)) - 3
        step = self._step(dim, heads)
        x = (step.collective if collective else step)(platform.transposed(x, -3, -2))
        return platform.transposed(moved(x, dim, in_ranks, natural, platform), -3, -2)

    def to_positions(self, x: Any, heads: int, collective: bool) -> Any:
        """Return this rank's positions of all ``heads``, from the full sequence of this rank's share of the heads."""
        _, natural, back = self._orders
        platform, dim = self._platform, len(self._platform.shape_of(x)) - 3
        step: Any = self._step(dim, heads).back
        x = moved(platform.transposed(x, -3, -2), dim, natural, back, platform)
        return platform.transposed((step.collective if collective else step)(x), -3, -2)

    def _step(self, dim: int, heads: int) -> AllToAll:
        step = self._steps.get((dim, heads))
        if step is None:
            each = chunk_sizes(heads, self._mesh.shape[self._mesh_dim])
            step = AllToAll(self._mesh, self._mesh_dim, Shard(dim), Shard(dim + 1), self._sizes, each)
            self._steps[dim, heads] = step
        return step


def _make_exchanges(platform: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions: one exchanges shards of positions for shards of heads, and the other does the reverse.

    Each function is the backward of the other. A recorded backward consists of differentiable steps.
    """
    detach = platform.detach

    def to_heads(ctx: Any, exchange: Exchange, *xs: Any) -> list[Any]:
        ctx.exchange, ctx.heads = exchange, [platform.shape_of(x)[-3] for x in xs]
        return [exchange.to_heads(detach(x), heads, True) for x, heads in zip(xs, ctx.heads, strict=True)]

    def gradients_of_heads(ctx: Any, *gs: Any) -> list[Any]:
        once = not platform.backward_is_recorded()
        given = zip(gs, ctx.heads, strict=True)
        return [None if g is None else ctx.exchange.to_positions(g, heads, once) for g, heads in given]

    def to_positions(ctx: Any, static: tuple[Exchange, int], y: Any) -> list[Any]:
        ctx.exchange, ctx.heads = static
        return [ctx.exchange.to_positions(detach(y), ctx.heads, True)]

    def gradients_of_positions(ctx: Any, g: Any) -> list[Any]:
        return [ctx.exchange.to_heads(g, ctx.heads, not platform.backward_is_recorded())]

    return (
        platform.joint_function(named("ExchangeToHeads", to_heads), gradients_of_heads),
        platform.joint_function(named("ExchangeToPositions", to_positions), gradients_of_positions),
    )


_EXCHANGES: Table = Table(_make_exchanges)


# ------------------------------------------------------------------------------------------------ gathered keys
def _own_rows(platform: Any, q: Any, mask: Any, own: tuple, keys: int) -> Any:
    """Return the causal mask of the queries at positions ``own``, combined with ``mask``, the same rows of another
    mask.

    The result has the kind of ``mask``: booleans, or numbers to add to the scores. Without ``mask``, it contains
    numbers to add.
    """
    rows = np.concatenate([np.arange(0), *(np.arange(start, start + n) for start, n in own)])
    queries = platform.places(rows, q).reshape((len(rows), 1))
    positions = platform.places(np.arange(keys), q).reshape((1, keys))
    seen = positions <= queries
    if mask is not None and mask.dtype == seen.dtype:
        return mask & seen
    causal = platform.zeros((len(rows), keys), q if mask is None else mask)
    causal = platform.masked_fill(causal, positions > queries, -math.inf)
    return causal if mask is None else mask + causal


def _with_a_query(platform: Any, native: Any, operands: tuple, static_args: tuple) -> Any:
    """Return the native result, computed with a filler query if this rank has none.

    Kernels for empty tensors have another backward graph, in which collectives come in another order than on other
    ranks.
    """
    q, k, v, mask = operands
    dim = len(platform.shape_of(q)) - 2
    if platform.shape_of(q)[dim]:
        return native(operands, static_args)
    shape = [*platform.shape_of(q)]
    shape[dim] = 1
    q = platform.cat([q, platform.ones(shape, q)], dim)
    if mask is not None and 0 in platform.shape_of(mask)[-2:-1]:
        shape = [*platform.shape_of(mask)]
        shape[-2] = 1
        mask = platform.cat([mask, platform.ones(shape, mask)], len(shape) - 2)
    y = native((q, k, v, mask), static_args)
    return platform.narrow(y, len(platform.shape_of(y)) - 2, 0, 0)
