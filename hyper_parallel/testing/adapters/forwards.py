"""Forwards that the adapters share: what a model computes, written with an adapter's operations."""

from __future__ import annotations

from typing import Any


def grouped_attention(adapter: Any, module: Any, x: Any) -> Any:
    """Attention with fewer key and value heads than query heads; norms inside the heads where the module has them."""
    q, k, v = module.wq(x), module.wk(x), module.wv(x)
    return module.wo(_attend(adapter, module, x, q, k, v))


def fused_attention(adapter: Any, module: Any, x: Any) -> Any:
    """The same with one weight for all three projections, split by proportion: also right on this rank's part."""
    qkv = module.wqkv(x)
    every = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
    sizes = [qkv.shape[-1] * heads // sum(every) for heads in every]
    return module.wo(_attend(adapter, module, x, *adapter.split(qkv, sizes, -1)))


def viewed_attention(adapter: Any, module: Any, x: Any) -> Any:
    """One weight, taken apart by a view of three parts."""
    batch, length = x.shape[0], x.shape[1]
    qkv = adapter.reshape(module.wqkv(x), (batch, length, 3, -1, module.head_dim))
    q, k, v = (adapter.transpose(qkv[:, :, i], 1, 2) for i in range(3))
    return module.wo(_joined(adapter, adapter.attention(q, k, v)))


def fused_gated(adapter: Any, module: Any, x: Any) -> Any:
    """Gated feed-forward with one weight for gate and up."""
    gate, up = adapter.chunk(module.w13(x), 2, -1)
    return module.w2(adapter.silu(gate) * up)


def experts(adapter: Any, module: Any, x: Any) -> Any:
    """Gated feed-forward of several experts, (experts, tokens, features) -> the same."""
    gate, up = adapter.chunk(adapter.matmul(x, module.gate_up), 2, -1)
    return adapter.matmul(adapter.silu(gate) * up, module.down)


def _attend(adapter: Any, module: Any, x: Any, q: Any, k: Any, v: Any) -> Any:
    batch, length = x.shape[0], x.shape[1]
    q, k, v = (adapter.reshape(y, (batch, length, -1, module.head_dim)) for y in (q, k, v))
    if module.normed:
        q, k = module.q_norm(q), module.k_norm(k)
    return _joined(adapter, adapter.attention(*(adapter.transpose(y, 1, 2) for y in (q, k, v))))


def _joined(adapter: Any, y: Any) -> Any:
    """(batch, heads, length, size) -> (batch, length, heads * size)."""
    y = adapter.transpose(y, 1, 2)
    return adapter.reshape(y, (y.shape[0], y.shape[1], -1))
