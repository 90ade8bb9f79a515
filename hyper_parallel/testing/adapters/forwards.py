"""Forwards of models that all adapters share, written with an adapter's operations."""

from __future__ import annotations

from typing import Any

import numpy as np


def grouped_attention(adapter: Any, module: Any, x: Any) -> Any:
    """Return attention with fewer key and value heads than query heads. Heads are normalized if the module has
    norms."""
    q, k, v = module.wq(x), module.wk(x), module.wv(x)
    return module.wo(_attend(adapter, module, x, q, k, v))


def fused_attention(adapter: Any, module: Any, x: Any) -> Any:
    """Return grouped attention with one weight for query, key and value.

    The output is split in proportion to the numbers of heads, so that the code also runs on a shard.
    """
    qkv = module.wqkv(x)
    every = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
    sizes = [qkv.shape[-1] * heads // sum(every) for heads in every]
    return module.wo(_attend(adapter, module, x, *adapter.split(qkv, sizes, -1)))


def viewed_attention(adapter: Any, module: Any, x: Any) -> Any:
    """Return attention with one weight for query, key and value, which a view with a dimension of size 3 separates."""
    batch, length = x.shape[0], x.shape[1]
    qkv = adapter.reshape(module.wqkv(x), (batch, length, 3, -1, module.head_dim))
    q, k, v = (adapter.transpose(qkv[:, :, i], 1, 2) for i in range(3))
    return module.wo(_joined(adapter, adapter.attention(q, k, v)))


def fused_gated(adapter: Any, module: Any, x: Any) -> Any:
    """Return a gated feed-forward with one weight for gate and up."""
    gate, up = adapter.chunk(module.w13(x), 2, -1)
    return module.w2(adapter.silu(gate) * up)


def experts(adapter: Any, module: Any, x: Any) -> Any:
    """Return the gated feed-forward of several experts; ``x`` and the result are (experts, tokens, features)."""
    gate, up = adapter.chunk(adapter.matmul(x, module.gate_up), 2, -1)
    return adapter.matmul(adapter.silu(gate) * up, module.down)


def sorted_experts(adapter: Any, module: Any, x: Any, counts: Any) -> Any:
    """Apply each expert to its tokens. ``x`` (N, features) is sorted by expert; ``counts`` (experts,) are numbers of
    tokens."""
    places = np.repeat(np.arange(module.gate_up.shape[0]), adapter.numpy(counts))
    return _each_its_own(adapter, module, x, places)


def routed_experts(adapter: Any, module: Any, x: Any, indices: Any, weights: Any) -> Any:
    """Return weighted sums of experts' outputs for tokens (T, features), with ``indices`` and ``weights`` (T, k)."""
    count, k = indices.shape
    rows = x[adapter.tensor(np.repeat(np.arange(count), k))]
    y = _each_its_own(adapter, module, rows, adapter.numpy(indices).ravel())
    return adapter.sum(adapter.reshape(y, (count, k, y.shape[-1])) * adapter.reshape(weights, (count, k, 1)), 1)


def _each_its_own(adapter: Any, module: Any, x: Any, places: np.ndarray) -> Any:
    if module.num_experts != module.gate_up.shape[0]:
        raise ValueError(f"{module.num_experts} experts, and weights of shape {module.gate_up.shape}")
    index = adapter.tensor(places.astype(np.int64))
    rows = adapter.reshape(x, (x.shape[0], 1, x.shape[1]))
    gate, up = adapter.chunk(adapter.matmul(rows, module.gate_up[index]), 2, -1)
    y = adapter.matmul(adapter.silu(gate) * up, module.down[index])
    return adapter.reshape(y, x.shape)


def mixture(adapter: Any, module: Any, ids: Any) -> Any:
    """Return embeddings of ids (T,) plus the outputs of ``module.k`` experts for each token.

    ``module.choose`` returns indices of experts (T, k) for the logits; any choice is allowed. The experts are
    called as `routed_experts` if ``module.by_index`` is true, else as `sorted_experts`."""
    x = module.embedding(ids)
    logits = module.router(x)
    indices = adapter.tensor(module.choose(adapter.numpy(adapter.detach(logits))))
    weights = adapter.softmax(adapter.gather(logits, 1, indices), -1)
    return x + routed(adapter, module, x, indices, weights)


def routed(adapter: Any, module: Any, x: Any, indices: Any, weights: Any) -> Any:
    """Return the result of ``module.experts`` for tokens (T, features), called by index or with sorted tokens."""
    if module.by_index:
        return module.experts(x, indices, weights)
    (count, k), chosen = indices.shape, adapter.numpy(indices).ravel()
    order = np.argsort(chosen, kind="stable")
    numbers = np.bincount(chosen, minlength=module.router.weight.shape[0])
    y = module.experts(x[adapter.tensor(order // k)], adapter.tensor(numbers))
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    y = adapter.reshape(y[adapter.tensor(back)], (count, k, y.shape[-1]))
    return adapter.sum(y * adapter.reshape(weights, (count, k, 1)), 1)


def sparse_block(adapter: Any, module: Any, x: Any) -> Any:
    """Return a block: attention, then a shared expert and ``module.k`` of the ``experts`` for each token."""
    x = x + module.attention(module.norm1(x))
    y = module.norm2(x)
    tokens = adapter.reshape(y, (-1, x.shape[-1]))
    logits, indices = adapter.topk(module.router(tokens), module.k)
    out = routed(adapter, module, tokens, indices, adapter.softmax(logits, -1))
    return x + module.shared(y) + adapter.reshape(out, x.shape)


def causal_attention(adapter: Any, module: Any, x: Any) -> Any:
    """Return causal attention, computed by the framework's function that context parallelism intercepts. The result is
    also correct for empty tensors."""
    batch, length = x.shape[0], x.shape[1]
    q, k, v = (
        adapter.transpose(adapter.reshape(y, (batch, length, y.shape[-1] // module.head_dim, module.head_dim)), 1, 2)
        for y in (module.wq(x), module.wk(x), module.wv(x))
    )
    y = adapter.transpose(adapter.scaled_attention(q, k, v, is_causal=True), 1, 2)
    return module.wo(adapter.reshape(y, (batch, length, y.shape[2] * module.head_dim)))


def causal_model(adapter: Any, module: Any, ids: Any, positions: Any) -> Any:
    """Return logits (samples, length, vocabulary) of ids (samples, length) at positions (1, length)."""
    x = module.tokens(ids) + module.places(positions)
    return module.head(x + module.attention(x))


def _attend(adapter: Any, module: Any, x: Any, q: Any, k: Any, v: Any) -> Any:
    batch, length = x.shape[0], x.shape[1]
    q, k, v = (adapter.reshape(y, (batch, length, -1, module.head_dim)) for y in (q, k, v))
    if module.normed:
        q, k = module.q_norm(q), module.k_norm(k)
    return _joined(adapter, adapter.attention(*(adapter.transpose(y, 1, 2) for y in (q, k, v))))


def _joined(adapter: Any, y: Any) -> Any:
    """Change the shape (batch, heads, length, size) to (batch, length, heads * size)."""
    y = adapter.transpose(y, 1, 2)
    return adapter.reshape(y, (y.shape[0], y.shape[1], -1))
