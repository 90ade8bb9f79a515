"""Attention to a shard of the keys, and the log-sum-exp values that combine it with attention to the other keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

__all__ = ["AttentionRole"]

Tensor = Any


class AttentionRole:
    """Local attention for sequences that are sharded over ranks. A backend may override it with its own kernels.

    All tensors are plain, non-empty, outside autograd, and of shape (batch, heads, length, features). ``k`` and ``v``
    may have fewer heads than ``q``: each of their heads then serves an equal number of consecutive heads of ``q``. With
    ``causal`` there are as many keys as queries, and a query attends to keys up to its own position.

    Source: Dao et al. 2022, "FlashAttention", for the gradients by the log-sum-exp.
    """

    def attention_calls(
        self, run: Callable[..., Tensor], mixes: Callable[[str, Sequence[int]], None]
    ) -> AbstractContextManager[None]:
        """Return a context in which ``run(call, q, k, v, mask, dropout)`` replaces the framework's attention function.
        ``call(q, k, v, mask)`` runs the original function on distributed tensors, with the other arguments of the call.
        If the original call was causal, a mask that ``run`` passes to ``call`` replaces the causal mask.
        ``call.options``, if it exists, is a hashable value with all other arguments that affect the result.

        ``mixes(name, lengths)`` is called before other functions that mix elements along dimensions of plain tensors.
        The backend calls it for the functions that it intercepts. ``lengths`` are the sizes of these dimensions."""
        raise TypeError(f"{type(self).__name__} has no attention function for sharded sequences")

    def transposed(self, x: Tensor, dim: int = -2, other: int = -1) -> Tensor:
        """Return ``x`` with two dimensions swapped. Differentiable."""
        return x.swapaxes(dim, other)

    def attention_part(self: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return the attention of ``q`` to these keys alone, and the log-sum-exp of the scores.

        Args:
            q: queries.
            k: keys.
            v: values.
            causal: see the class.
            scale: factor of the scores.

        Returns:
            The output, and the log-sum-exp with one feature; both in float32 or wider.
        """
        shape = self.shape_of(q)
        scores, v = _scores(self, q, k, causal, scale), _wide(self, v)
        largest = self.amax(scores, -1)
        scores = self.shifted_exp(scores, largest)
        total = self.sum_along(scores, -1)
        out, lse = (scores @ v) / total, largest + self.log(total)
        return out.reshape((*shape[:3], self.shape_of(v)[-1])), lse.reshape((*shape[:3], 1))

    def joined_attention(self: Any, out: Tensor, lse: Tensor, other: Tensor, of_other: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the attention to two sets of keys, from outputs and log-sum-exps of `attention_part`. All four
        tensors may be overwritten."""
        both = self.cat([lse, of_other], -1)
        largest = self.amax(both, -1)
        total = self.log(self.sum_along(self.shifted_exp(both, largest), -1)) + largest
        return out * self.shifted_exp(lse, total) + other * self.shifted_exp(of_other, total), total

    def attention_part_gradients(
        self: Any,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cotangents of ``q``, ``k`` and ``v`` of `attention_part`. The cotangent of ``q`` contains only the
        contribution of the keys ``k``.

        Args:
            g: cotangent of ``out``.
            q: queries.
            k: some of the keys.
            v: values of these keys.
            out: attention to all keys.
            lse: log-sum-exp over all keys.
            causal: see the class.
            scale: factor of the scores.

        Returns:
            New tensors: cotangents of the shapes of ``q``, ``k`` and ``v``, in float32 or wider.
        """
        shape = self.shape_of(q)
        g, out = _grouped(self, _wide(self, g), k), _grouped(self, _wide(self, out), k)
        weights = self.shifted_exp(_scores(self, q, k, causal, scale), _grouped(self, lse, k))
        q, k, v = _grouped(self, _wide(self, q), k), _wide(self, k), _wide(self, v)
        d_scores = weights * (g @ self.transposed(v) - self.sum_along(g * out, -1)) * scale
        return (
            (d_scores @ k).reshape(shape),
            self.transposed(d_scores) @ q,
            self.transposed(weights) @ g,
        )


def _wide(platform: Any, x: Tensor) -> Tensor:
    return platform.to_dtype(x, platform.dtypes["float32"]) if x.itemsize < 4 else x


def _grouped(platform: Any, x: Tensor, k: Tensor) -> Tensor:
    """Return ``x`` with the heads that share one head of ``k`` concatenated along the length."""
    batch, heads, length, features = platform.shape_of(x)
    shared = platform.shape_of(k)[1]
    return x if heads == shared else x.reshape((batch, shared, heads // shared * length, features))


def _scores(platform: Any, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    length = platform.shape_of(q)[2]
    scores = (_grouped(platform, _wide(platform, q), k) * scale) @ platform.transposed(_wide(platform, k))
    if not causal:
        return scores
    places, rows = np.arange(length), platform.shape_of(scores)[2]
    keys = platform.places(places, q).reshape((1, length))
    queries = platform.places(np.tile(places, rows // length), q).reshape((rows, 1))
    return platform.masked_fill(scores, keys > queries, -math.inf)
