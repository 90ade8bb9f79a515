"""An attention block over a sequence that is cut: of torch's functions alone, and written by hand for several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "Heads", "hand_written_ring", "hand_written_ulysses"]

_ATEN: Any = torch.ops.aten
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Heads:
    """Heads of queries, those of keys and values, and features of each."""

    queries: int
    keys: int
    features: int


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's function."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    """Projections to heads, causal attention, and a projection back."""

    def __init__(self, heads: Heads, attention: Attention = causal_attention) -> None:
        super().__init__()
        width, shared = heads.queries * heads.features, heads.keys * heads.features
        self.features, self.attention = heads.features, attention
        self.q, self.k, self.v, self.o = (nn.Linear(width, n, bias=False) for n in (width, shared, shared, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.features)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        return self.o(self.attention(q, k, v).transpose(1, 2).flatten(2))


# ------------------------------------------------------------------------------------------------ Ulysses
class _Exchange(torch.autograd.Function):
    """From (batch, heads, part of the positions, features) to (batch, some of the heads, positions, features)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads = to_heads
        return _exchanged(x, to_heads)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _exchanged(g, not ctx.to_heads), None


def _exchanged(x: Tensor, to_heads: bool) -> Tensor:
    ranks = dist.get_world_size()
    cut, joined = (1, 2) if to_heads else (2, 1)
    sent = torch.cat(x.chunk(ranks, cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(received.chunk(ranks), joined)


def hand_written_ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to consecutive parts, by four exchanges."""
    q, k, v = (_Exchange.apply(x, True) for x in (q, k, v))
    return _Exchange.apply(causal_attention(q, k, v), False)


# ------------------------------------------------------------------------------------------------ ring
class _Shift:
    """A buffer for the next rank, and one from the rank before."""

    def __init__(self, buffer: Tensor) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.sent, self.received = buffer, torch.empty_like(buffer)
        self.work = [
            dist.isend(buffer, (rank + 1) % ranks),
            dist.irecv(self.received, (rank - 1) % ranks),
        ]

    def wait(self) -> Tensor:
        for work in self.work:
            work.wait()
        return self.received


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse.unsqueeze(-1)


def _join(out: Tensor, lse: Tensor, other: Tensor, of_other: Tensor) -> tuple[Tensor, Tensor]:
    return out - torch.sigmoid(of_other - lse) * (out - other), lse - F.logsigmoid(lse - of_other)


class _Ring(torch.autograd.Function):
    """Causal attention of two pieces a rank, one of the beginning and one of the end, of one length."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, ranks, half = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2
        own = torch.stack([k, v])
        coming = _Shift(own)
        out, lse = _flash(q, k, v, True)
        for step in range(1, ranks):
            piece = coming.wait()
            if step < ranks - 1:
                coming = _Shift(piece)
            if step <= rank:
                part = _flash(q, *piece[:, :, :, :half], False)
                out, lse = _join(out, lse, *part)
            else:
                part = _flash(q[:, :, half:], *piece, False)
                tail, of_tail = _join(out[:, :, half:], lse[:, :, half:], *part)
                out, lse = torch.cat([out[:, :, :half], tail], 2), torch.cat([lse[:, :, :half], of_tail], 2)
        ctx.save_for_backward(q, k, v, out, lse.squeeze(-1))
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        q, k, v, out, lse = ctx.saved_tensors
        half = q.shape[2] // 2
        backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        coming = _Shift(torch.stack([k, v]))
        d_q, *of_own = backward(g, q, k, v, out, lse, 0.0, True)
        own, gradients = torch.stack(of_own), None
        for step in range(1, ranks):
            piece = coming.wait()
            if step < ranks - 1:
                coming = _Shift(piece)
            d_piece = torch.zeros_like(piece)
            if step <= rank:
                near = piece[:, :, :, :half]
                of_q, of_k, of_v = backward(g, q, *near, out, lse, 0.0, False)
                d_q += of_q
                d_piece[:, :, :, :half] = torch.stack([of_k, of_v])
            else:
                late = [x[:, :, half:] for x in (g, q, out, lse)]
                of_q, of_k, of_v = backward(late[0], late[1], *piece, *late[2:], 0.0, False)
                d_q[:, :, half:] += of_q
                d_piece += torch.stack([of_k, of_v])
            if gradients is not None:
                d_piece += gradients.wait()
            gradients = _Shift(d_piece)
        if gradients is not None:
            own += gradients.wait()
        return d_q, own[0], own[1]


def hand_written_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to balanced parts, whose keys and values go round."""
    return _Ring.apply(q, k, v)
