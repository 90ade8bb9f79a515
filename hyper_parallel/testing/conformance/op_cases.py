"""Calls of the operations that every backend must run on distributed operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CASES", "Case", "Ints", "Mask"]


@dataclass(frozen=True)
class Ints:
    """An operand of random integers from 0 to ``high`` - 1."""

    shape: tuple[int, ...]
    high: int


@dataclass(frozen=True)
class Mask:
    """An operand of random booleans."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One call: ``run(adapter, *operands)`` returns a tensor or a sequence of tensors.

    Attributes:
        name: name of the case in messages.
        operands: shape of each operand, or `Ints` or `Mask`.
        run: function that makes the call.
    """

    name: str
    operands: tuple[Any, ...]
    run: Callable[..., Any]

    def arrays(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return random values for the operands."""
        return [_array(operand, rng) for operand in self.operands]


def _array(operand: Any, rng: np.random.Generator) -> np.ndarray:
    if isinstance(operand, Ints):
        return rng.integers(0, operand.high, operand.shape).astype(np.int64)
    if isinstance(operand, Mask):
        return rng.random(operand.shape) < 0.5
    return rng.standard_normal(operand).astype(np.float32)


CASES = [
    # element-wise
    Case("add", ((4, 6), (4, 6)), lambda adapter, x, y: x + y),
    Case("sub broadcast", ((4, 6), (6,)), lambda adapter, x, y: x - y),
    Case("add broadcast middle", ((3, 4, 6), (4, 1)), lambda adapter, x, y: x + y),
    Case("mul", ((4, 6), (4, 6)), lambda adapter, x, y: x * y),
    Case("mul broadcast", ((4, 6), (4, 1)), lambda adapter, x, y: x * y),
    Case("div", ((4, 6), (4, 6)), lambda adapter, x, y: x / (2.0 + y * y)),
    Case("scalars", ((5, 6),), lambda adapter, x: 2.0 - (x * 3.0 + 1.0) / 4.0),
    Case("scalar divided", ((5, 6),), lambda adapter, x: 1.0 / (x * x + 1.0)),
    Case("neg", ((5, 6),), lambda adapter, x: -x),
    Case("square", ((5, 6),), lambda adapter, x: adapter.square(x)),
    Case("relu", ((5, 6),), lambda adapter, x: adapter.relu(x)),
    Case("silu", ((5, 6),), lambda adapter, x: adapter.silu(x)),
    Case("gelu", ((5, 6),), lambda adapter, x: adapter.gelu(x)),
    Case("sigmoid", ((5, 6),), lambda adapter, x: adapter.sigmoid(x)),
    Case("tanh", ((5, 6),), lambda adapter, x: adapter.tanh(x)),
    Case("exp", ((5, 6),), lambda adapter, x: adapter.exp(x)),
    Case("where", (Mask((4, 6)), (4, 6), (6,)), lambda adapter, m, x, y: adapter.where(m, x, y)),
    Case("masked_fill", ((4, 6), Mask((4, 6))), lambda adapter, x, m: adapter.masked_fill(x, m, -1.0)),
    # products
    Case("linear", ((3, 4, 6), (8, 6), (8,)), lambda adapter, x, w, b: adapter.linear(x, w, b)),
    Case("linear without bias", ((4, 6), (8, 6)), lambda adapter, x, w: adapter.linear(x, w)),
    Case("matmul", ((4, 6), (6, 8)), lambda adapter, x, y: adapter.matmul(x, y)),
    Case("matmul batched", ((2, 3, 4, 6), (2, 3, 6, 5)), lambda adapter, x, y: adapter.matmul(x, y)),
    Case("matmul broadcast", ((3, 4, 6), (6, 5)), lambda adapter, x, y: adapter.matmul(x, y)),
    # reductions
    Case("sum", ((4, 6),), lambda adapter, x: adapter.sum(x)),
    Case("sum dim", ((4, 6, 5),), lambda adapter, x: adapter.sum(x, 1)),
    Case("sum keepdim", ((4, 6),), lambda adapter, x: adapter.sum(x, -1, True)),
    Case("mean", ((4, 6),), lambda adapter, x: adapter.mean(x)),
    Case("mean dim", ((4, 6, 5),), lambda adapter, x: adapter.mean(x, -1)),
    Case("mean keepdim", ((5, 7),), lambda adapter, x: adapter.mean(x, 0, True)),
    Case("amax", ((4, 6),), lambda adapter, x: adapter.amax(x, 1)),
    # shapes
    Case("reshape split", ((2, 3, 24),), lambda adapter, x: adapter.reshape(x, (2, 3, 12, 2))),
    Case("reshape merge", ((2, 3, 12, 2),), lambda adapter, x: adapter.reshape(x, (2, 3, -1))),
    Case("reshape batch", ((4, 3, 6),), lambda adapter, x: adapter.reshape(x, (12, 6))),
    Case("transpose", ((4, 6, 5),), lambda adapter, x: adapter.transpose(x, 1, 2)),
    Case("permute", ((4, 6, 5),), lambda adapter, x: adapter.permute(x, (2, 0, 1))),
    Case("unsqueeze", ((4, 6),), lambda adapter, x: adapter.unsqueeze(x, 1)),
    Case("expand", ((4, 1, 6),), lambda adapter, x: adapter.expand(x, (4, 3, 6))),
    Case("cat", ((4, 6), (4, 6)), lambda adapter, x, y: adapter.cat([x, y], 1)),
    Case("stack", ((4, 6), (4, 6)), lambda adapter, x, y: adapter.stack([x, y], 1)),
    Case("split", ((4, 6),), lambda adapter, x: adapter.split(x, 2, 1)),
    Case("chunk", ((4, 6),), lambda adapter, x: adapter.chunk(x, 2, 1)),
    # indexing
    Case("index int", ((4, 6, 5),), lambda adapter, x: x[1]),
    Case("index slice", ((4, 6, 5),), lambda adapter, x: x[:, 1:3]),
    Case("index ellipsis", ((4, 6, 5),), lambda adapter, x: x[..., None, 0]),
    Case("index tensor", ((6, 5), Ints((3,), 6)), lambda adapter, x, i: x[i]),
    # neural network operations
    Case("softmax", ((4, 6, 5),), lambda adapter, x: adapter.softmax(x, -1)),
    Case("softmax dim 1", ((4, 6, 5),), lambda adapter, x: adapter.softmax(x, 1)),
    Case("log_softmax", ((4, 6),), lambda adapter, x: adapter.log_softmax(x, -1)),
    Case("embedding", (Ints((3, 4), 10), (10, 6)), lambda adapter, i, w: adapter.embedding(i, w)),
    Case("layer_norm", ((4, 5, 6), (6,), (6,)), lambda adapter, x, w, b: adapter.layer_norm(x, w, b)),
    Case("rms_norm", ((4, 5, 6), (6,)), lambda adapter, x, w: adapter.rms_norm(x, w)),
    Case("cross_entropy", ((6, 5), Ints((6,), 5)), lambda adapter, x, t: adapter.cross_entropy(x, t)),
    Case("cross_entropy sum", ((6, 5), Ints((6,), 5)), lambda adapter, x, t: adapter.cross_entropy(x, t, "sum")),
    Case(
        "attention",
        ((2, 4, 3, 6), (2, 4, 3, 6), (2, 4, 3, 6)),
        lambda adapter, q, k, v: adapter.attention(q, k, v),
    ),
    Case(
        "attention with grouped queries",
        ((2, 4, 3, 6), (2, 2, 3, 6), (2, 2, 3, 6)),
        lambda adapter, q, k, v: adapter.attention(q, k, v),
    ),
]
