"""Reference kernels of npu_fusion_attention, its second and its third version, forward and backward.

All layouts come down to one: segments of (batch, heads, length, head_dim). A batch of equal lengths is one segment, and
the layout TND has one for each sequence. Written from the description of the operator in torch_npu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["KERNELS"]

LAYOUTS = ("BNSD", "BSND", "BSH", "SBH", "TND")
NO_LIMIT = 2147483647


@dataclass
class Call:
    """The arguments of one call that both directions need, by one set of names."""

    layout: str
    heads: int
    pse: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    more_query: torch.Tensor | None = None
    more_key: torch.Tensor | None = None
    scale: float = 1.0
    keep: float = 1.0
    before: int = NO_LIMIT
    after: int = NO_LIMIT
    prefix: Sequence[int] | None = None
    lengths: tuple[Any, Any] = (None, None)
    sparse: int = 0
    pse_type: int = 1
    softmax_layout: str = ""
    seed: int = 0
    offset: int = 0

    @classmethod
    def of(cls, heads: int, layout: str, options: dict[str, Any]) -> Call:
        """Make a call from the options of any version of the operator; their spelling differs."""
        if options.get("padding_mask") is not None or options.get("dropout_mask") is not None:
            raise ValueError(
                "npu_fusion_attention is simulated without padding_mask, and draws its dropout_mask itself"
            )
        if options.get("pse_type", 1) not in (0, 1):
            raise ValueError(f"npu_fusion_attention is simulated with pse_type 0 and 1, not {options['pse_type']}")
        lengths = tuple(_numbers(options.get(name)) for name in ("actual_seq_qlen", "actual_seq_kvlen"))
        call = cls(
            layout.upper(),
            heads,
            options.get("pse"),
            options.get("atten_mask"),
            options.get("sink"),
            options.get("query_rope"),
            options.get("key_rope"),
            options.get("scale", options.get("scale_value", 1.0)),
            options.get("keep_prob", 1.0),
            options.get("pre_tockens", options.get("pre_tokens", NO_LIMIT)),
            options.get("next_tockens", options.get("next_tokens", NO_LIMIT)),
            options.get("prefix"),
            (lengths[0], lengths[1]),
            options.get("sparse_mode", 0),
            options.get("pse_type", 1),
            options.get("softmax_layout", ""),
            int(options.get("seed") or 0),
            int(options.get("offset") or 0),
        )
        call.check()
        return call

    def check(self) -> None:
        """Refuse the arguments that the operator refuses."""
        varlen = self.layout == "TND"
        if self.layout not in LAYOUTS:
            raise ValueError(f"input_layout {self.layout!r} is none of {', '.join(LAYOUTS)}")
        if varlen != (None not in self.lengths):
            raise ValueError("actual_seq_qlen and actual_seq_kvlen belong to the layout TND, and to it only")
        if self.sparse not in ((0, 1, 2, 3, 4, 6, 7, 8) if varlen else range(7)):
            raise ValueError(f"sparse_mode {self.sparse} does not exist with the layout {self.layout}")
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep_prob must be in (0, 1], got {self.keep}")
        if varlen and self.pse is not None:
            raise ValueError("npu_fusion_attention is simulated without pse in the layout TND")

    # ------------------------------------------------------------------------------------------------------- layouts
    def segments(self, x: torch.Tensor, side: int, heads: int) -> list[torch.Tensor]:
        """``x`` in parts of (batch, heads, length, head_dim); ``side`` is 0 for the query, 1 for key and value."""
        if self.layout == "BNSD":
            return [x]
        if self.layout == "BSND":
            return [x.transpose(1, 2)]
        if self.layout == "TND":
            ends = [end for end in self.lengths[side] if end]  # zeros at the end: sequences that do not take part
            starts = [0, *ends[:-1]]
            return [x[start:end].transpose(0, 1)[None] for start, end in zip(starts, ends, strict=True)]
        x = x.transpose(0, 1) if self.layout == "SBH" else x
        return [x.unflatten(-1, (heads, -1)).transpose(1, 2)]

    def joined(self, parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The inverse of `segments`; tokens of no sequence are zero."""
        x = parts[0]
        if self.layout == "TND":
            x = torch.cat([part[0].transpose(0, 1) for part in parts])
            missing = like.shape[0] - x.shape[0]
            return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]).contiguous()
        if self.layout != "BNSD":
            x = x.transpose(1, 2)
        if self.layout in ("BSH", "SBH"):
            x = x.flatten(2)
        return (x.transpose(0, 1) if self.layout == "SBH" else x).contiguous()

    def shared_heads(self, query: torch.Tensor, key: torch.Tensor) -> int:
        """The number of heads of key and value."""
        if self.layout in ("BSH", "SBH"):
            return key.shape[-1] // (query.shape[-1] // self.heads)
        return key.shape[2 if self.layout == "BSND" else 1]

    # -------------------------------------------------------------------------------------------------------- scores
    def blocked(self, number: int, count: int, scores: torch.Tensor) -> torch.Tensor | None:
        """A mask of the scores of segment ``number`` of ``count`` that do not count: true there."""
        if self.mask is None:
            return None  # and sparse_mode is not looked at
        rows, columns = scores.shape[-2:]
        i, j = torch.arange(rows)[:, None], torch.arange(columns)
        right = j - i - (columns - rows)  # distance from the diagonal that ends at the lower right
        band = (right > self.after) | (right < -self.before)
        if self.sparse in (0, 1, 5):
            return self.mask.bool()[..., :rows, :columns]
        if self.sparse == 4:
            return band
        if self.sparse == 6:
            assert self.prefix is not None
            free = torch.tensor(self.prefix).reshape(-1, 1, 1, 1)
            free = free[number : number + 1] if self.layout == "TND" else free
            return (right > 0) & (j >= free)
        if (self.sparse, number) in ((7, count - 1), (8, 0)):
            return band
        return j > i if self.sparse in (2, 8) else right > 0

    def scores(self, query: torch.Tensor, key: torch.Tensor, number: int, count: int) -> torch.Tensor:
        """Scores of one segment in float32, with -inf where they are blocked."""
        scores = query.float() @ key.float().transpose(-2, -1)
        if self.pse is None:
            scores = scores * self.scale
        elif self.pse_type == 1:
            scores = (scores + self.pse.float()) * self.scale
        else:
            scores = scores * self.scale + self.pse.float()
        blocked = self.blocked(number, count, scores)
        return scores if blocked is None else scores.masked_fill(blocked, -math.inf)

    def noise(self, shapes: list[torch.Size]) -> list[torch.Tensor | float]:
        """The dropout factors of each segment's weights: 0 where they are dropped, 1 / keep where they are kept."""
        if self.keep == 1:
            return [1.0] * len(shapes)
        generator = torch.Generator().manual_seed((self.seed * 1000003 + self.offset) & (2**63 - 1))
        return [(torch.rand(shape, generator=generator) < self.keep) / self.keep for shape in shapes]


def _numbers(x: Any) -> list[int] | None:
    return x.tolist() if isinstance(x, torch.Tensor) else None if x is None else list(x)


def _operands(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[list[torch.Tensor]]:
    """Segments of query, key and value, with as many heads each."""
    if call.more_query is not None and call.more_key is not None:
        query, key = torch.cat([query, call.more_query], -1), torch.cat([key, call.more_key], -1)
    shared = call.shared_heads(query, key)
    q = call.segments(query, 0, call.heads)
    k, v = ([x.repeat_interleave(call.heads // shared, 1) for x in call.segments(y, 1, shared)] for y in (key, value))
    return [q, k, v]


def _softmax(call: Call, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weights, maximum, sum), the last two with size 1 in the last dimension."""
    # A sequence may have no tokens.
    largest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    if call.sink is not None:
        largest = torch.maximum(largest, call.sink.float()[:, None, None])
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    if call.sink is not None:
        total = total + (call.sink.float()[:, None, None] - largest).exp()
    return weights / total, largest, total


def _forward(
    draw: Callable[[], tuple[int, int]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """The output, the statistics and the number of weights."""
    if call.keep < 1 and not (call.seed or call.offset):
        call.seed, call.offset = draw()
    q, k, v = _operands(call, query, key, value)
    found = [_softmax(call, call.scores(x, y, i, len(q))) for i, (x, y) in enumerate(zip(q, k, strict=True))]
    noise = call.noise([weights.shape for weights, _, _ in found])
    outs = [
        ((weights * kept).to(value.dtype) @ y).to(query.dtype)
        for (weights, _, _), kept, y in zip(found, noise, v, strict=True)
    ]
    statistics = [_statistic(call, [x[i] for x in found], query) for i in (1, 2)]
    count = sum(weights.numel() for weights, _, _ in found) if call.keep < 1 else 0
    return call.joined(outs, query), statistics[0], statistics[1], count


def _statistic(call: Call, parts: list[torch.Tensor], query: torch.Tensor) -> torch.Tensor:
    """(batch, heads, length, 8); of tokens (tokens, heads, 8), in memory heads first unless asked otherwise."""
    if call.layout != "TND":
        return parts[0].expand(*parts[0].shape[:-1], 8).contiguous()
    x = torch.cat([part[0] for part in parts], 1)  # (heads, tokens, 1)
    x = torch.cat([x, x.new_zeros(x.shape[0], query.shape[0] - x.shape[1], 1)], 1)
    x = (x.transpose(0, 1) if call.softmax_layout == "TND" else x).expand(-1, -1, 8).contiguous()
    return x.view(query.shape[0], call.heads, 8)


def _backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, call: Call
) -> dict[str, torch.Tensor]:
    """Gradients by name."""
    q, k, v = _operands(call, query, key, value)
    d = call.segments(dy, 0, call.heads)
    weights = [_softmax(call, call.scores(x, y, i, len(q)))[0] for i, (x, y) in enumerate(zip(q, k, strict=True))]
    noise = call.noise([x.shape for x in weights])
    grouped = call.heads // call.shared_heads(query, key)
    parts: list[list[torch.Tensor]] = [[], [], []]
    by_sink = torch.zeros(call.heads)
    for x, y, z, dz, w, kept in zip(q, k, v, d, weights, noise, strict=True):
        by_weights = dz.float() @ z.float().mT * kept
        mean = (by_weights * w).sum(-1, keepdim=True)
        by_scores = w * (by_weights - mean)
        by_sink -= ((1 - w.sum(-1, keepdim=True)) * mean).sum((0, 2, 3))  # 1 - sum: the weight of the sink
        scaled = by_scores * call.scale
        for part, gradient, sharing in (
            (parts[0], scaled @ y.float(), 1),
            (parts[1], scaled.mT @ x.float(), grouped),
            (parts[2], (w * kept).mT @ dz.float(), grouped),
        ):
            part.append(gradient.unflatten(1, (-1, sharing)).sum(2))
    by_query, by_key, by_value = (
        call.joined(part, like).to(query.dtype) for part, like in zip(parts, (query, key, value), strict=True)
    )
    found = {"value": by_value}
    for name, whole, own in (("query", by_query, query), ("key", by_key, key)):
        found[name], found[f"{name}_rope"] = whole.split([own.shape[-1], whole.shape[-1] - own.shape[-1]], -1)
    if call.sink is not None:
        found["sink"] = by_sink.to(call.sink.dtype)
    if call.pse is not None:
        found["pse"] = (scaled if call.pse_type == 1 else by_scores).sum_to_size(call.pse.shape).to(call.pse.dtype)
    return {name: x.contiguous() for name, x in found.items()}


# ------------------------------------------------------------------------------------------------------- the operators
#: Names of the optional arguments of the first and the third version, which may be given by position.
_POSITIONAL = (
    *("pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens", "inner_precise"),
    *("prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync", "softmax_layout"),
    *("sink", "dropout_mask", "seed", "offset"),
)


def fusion_attention(
    draw: Callable[[], tuple[int, int]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *args: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """(output, maximum and sum of the softmax, an empty tensor, seed, offset and number of the dropped weights)."""
    call = Call.of(head_num, input_layout, {**dict(zip(_POSITIONAL, args, strict=False)), **options})
    out, largest, total, count = _forward(draw, query, key, value, call)
    return out, largest, total, torch.empty(0, dtype=query.dtype), call.seed, call.offset, count


def fusion_attention_v3(*args: Any, **options: Any) -> tuple[Any, ...]:
    """Call `fusion_attention`, return seed and offset as tensors of the host, and leave out the number."""
    *tensors, seed, offset, _ = fusion_attention(*args, **options)
    return (*tensors, torch.tensor([seed]), torch.tensor([offset]))


def _gradients(*names: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    def backward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dy: torch.Tensor,
        head_num: int,
        input_layout: str,
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients in the order of the operator's results; empty ones for missing arguments."""
        found = _backward(query, key, value, dy, Call.of(head_num, input_layout, options))
        return tuple(found.get(name, torch.empty(0, dtype=query.dtype)) for name in names)

    return backward


#: operator of torch_npu -> its kernel on CPU tensors
KERNELS: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention_grad": _gradients("query", "key", "value", "pse", "sink"),
    "npu_fusion_attention_grad_v2": _gradients("query", "key", "value", "pse", "query_rope", "key_rope", "sink"),
    "npu_fusion_attention_grad_v3": _gradients("query", "key", "value", "pse", "sink"),
}
#: Those that draw random numbers: their first argument gives a seed and an offset of the device's generator.
RANDOM_KERNELS: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention": fusion_attention,
    "npu_fusion_attention_v2": fusion_attention,
    "npu_fusion_attention_v3": fusion_attention_v3,
}
