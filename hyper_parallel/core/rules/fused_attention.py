"""Fused attention of accelerators, where an argument defines the order of dimensions.

Heads may be packed in the last dimension. The statistics of the softmax are results too.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.rules.labels import Labels, Shape
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding
from hyper_parallel.core.rules.random import share_state
from hyper_parallel.core.rules.registry import rule

#: One letter for each dimension: batch B, heads N, length S, features D, N * D features H, tokens of all sequences T.
_LAYOUTS = ("BNSD", "BSND", "BSH", "SBH", "TND")


@rule(
    "fused_attention",
    "q k v bias=None mask=None score(heads)=None more_q=None more_k=None"
    " | layout heads keep per_batch statistic tokens_first",
)
def fused_attention(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Attention and the statistics of its softmax, independent for each batch element and head.

    Results are the output and two statistics. A statistic has shape (B, N, S, size), or (N, T, size) or (T, N, size)
    for tokens.

    Args:
        shapes: shapes of query, key, value, bias of the scores, mask, an additional score for each head (N,), and
            additional features of query and key in the same layout. All but the first three may be None. A bias is (B
            or 1, N or 1, ...), or one number for each head: (N,) or (B, N). A mask is (B or 1, N or 1, ...), or has two
            dimensions.
        static_args: the layout of query, key and value (`_LAYOUTS`), the number of query heads, and the probability to
            keep a weight. Whether another argument has one entry per batch element, in which case the batch is
            unsharded. The last size of the statistics, and whether statistics of tokens have the tokens first.
    """
    layout, heads, keep, per_batch, statistic, tokens_first = static_args[:6]
    found = _Attention.of(layout, heads, shapes)
    if found is None:
        return None
    labels = found.operands(shapes)
    if labels is None:
        return None
    results: tuple[Labels, ...] = (found.query, *(found.statistics(tokens_first),) * 2)
    sizes = found.sizes(tokens_first, statistic)
    keeps_all = keep >= 1.0
    # The native operation draws the noise. Only on unsharded operands does it equal that of a single device.
    fixed = {"b"} if per_batch and keeps_all else set() if keeps_all else {"b", "n"}
    operands = tuple(None if x is None else tuple(None if label in fixed else label for label in x) for x in labels)
    results = tuple(tuple(None if label in fixed else label for label in x) for x in results)
    return OpSharding(
        operands=operands,
        results=results,
        result_shapes=sizes,
        localize=_local_heads,
        call=None if keeps_all else _draw,
        nonempty=tuple(label for label in ("b", "n") if label not in fixed),
        units=(("n", heads), *((("n", found.shared),) if found.shared > 1 else ())),
    )


def _dim_of(layout: str, letters: str) -> int:
    """Return the position of one of two letters in ``layout``, which has exactly one of them."""
    return max(map(layout.find, letters))


class _Attention:
    """Shapes and labels of one call. Label ``b`` is the batch, ``n`` the heads."""

    def __init__(self, layout: str, heads: int, q: Shape, k: Shape, v: Shape) -> None:
        self.batch = layout.index("B") if "B" in layout else None
        self.head, self.tokens = _dim_of(layout, "NH"), _dim_of(layout, "ST")
        self.heads = heads
        #: Number of features of one query head.
        self.packed = layout.endswith("H")
        self.features = q[-1] // heads if self.packed else q[-1]
        #: Number of key and value heads.
        self.shared = k[-1] // max(self.features, 1) if self.packed else k[self.head]
        self.q, self.k, self.v = q, k, v
        self.query = self._labels(len(q), heads)

    @classmethod
    def of(cls, layout: str, heads: int, shapes: tuple) -> _Attention | None:
        """Return the description of a call with operands of these shapes, or None if the shapes do not fit."""
        q, k, v = shapes[:3]
        if layout not in _LAYOUTS or heads < 1 or not all(x and len(x) == len(layout) for x in (q, k, v)):
            return None
        self = cls(layout, heads, q, k, v)
        if self.packed:
            fits = (
                q[-1] % heads == 0 and self.features and k[-1] % self.features == 0 and v[-1] % max(self.shared, 1) == 0
            )
        else:
            fits = q[self.head] == heads and v[self.head] == self.shared and q[-1] == k[-1]
        same_batch = self.batch is None or q[self.batch] == k[self.batch] == v[self.batch]
        fits = fits and same_batch and k[self.tokens] == v[self.tokens]
        return self if fits and self.shared and heads % self.shared == 0 else None

    def _labels(self, ndim: int, heads: int) -> Labels:
        """Return labels of a tensor with ``heads`` heads. A single key head that serves many query heads stays
        unsharded."""
        own = "n" if heads > 1 or self.heads == 1 else None
        return tuple("b" if d == self.batch else own if d == self.head else None for d in range(ndim))

    def operands(self, shapes: tuple) -> tuple[Labels | None, ...] | None:
        """Return the labels of all operands, or None if the shape of an operand is not supported."""
        bias, mask, score, more_q, more_k = (*shapes[3:], *(None,) * 5)[:5]
        keys = self._labels(len(self.k), self.shared)
        labels = (
            self.query,
            keys,
            keys,
            None if bias is None else self._of_scores(bias, alone=True),
            None if mask is None else self._of_scores(mask, alone=False),
            None if score is None else ("n",) if score == (self.heads,) else (),
            None if more_q is None else self.query if more_q[:-1] == self.q[:-1] else (),
            None if more_k is None else keys if more_k[:-1] == self.k[:-1] else (),
        )
        return None if () in labels else labels[: len(shapes)]

    def _of_scores(self, shape: Shape, alone: bool) -> Labels:
        """Return labels of a tensor that broadcasts to (B, N, S, S). With ``alone``, (B, N) and (N,) are also
        supported."""
        batch = None if self.batch is None else self.q[self.batch]
        if len(shape) == 2 and not alone:
            return (None, None)
        if len(shape) == 1 and alone and shape[0] == self.heads:
            return ("n",)
        if len(shape) not in ((2, 4) if alone else (4,)) or shape[1] not in (1, self.heads):
            return ()
        if shape[0] not in (1, batch) and batch is not None:
            return ()
        own = (
            "b" if batch is not None and shape[0] == batch else None,
            "n" if shape[1] == self.heads else None,
        )
        return (*own, *(None,) * (len(shape) - 2))

    def statistics(self, tokens_first: bool) -> Labels:
        """Return the labels of a statistic of the softmax."""
        if self.batch is None:
            return (None, "n", None) if tokens_first else ("n", None, None)
        return ("b", "n", None, None)

    def sizes(self, tokens_first: bool, statistic: int) -> tuple[Shape, ...]:
        """Return the shapes of the results."""
        features = self.v[-1] // self.shared if self.packed else self.v[-1]
        out = (*self.q[:-1], self.heads * features if self.packed else features)
        length = self.q[self.tokens]
        if self.batch is None:
            own: Shape = (length, self.heads, statistic) if tokens_first else (self.heads, length, statistic)
        else:
            own = (self.q[self.batch], self.heads, length, statistic)
        return (out, own, own)


def _local_heads(static_args: tuple, operand_layouts: tuple, result_layouts: tuple) -> tuple:
    """Return the static arguments with the number of query heads on this rank."""
    layout, heads, *rest = static_args
    dim = _dim_of(layout, "NH")
    whole, own = result_layouts[0].shape[dim], result_layouts[0].local_shape[dim]
    return (layout, heads * own // whole, *rest)


def _draw(call: LocalCall) -> Any:
    """Run the native operation after all ranks got the first rank's generator state, so that their noise is the
    same."""
    share_state(call.operand_layouts[0].mesh)
    return call.run()
