"""PyTorch's adapter for the conformance suite; see `hyper_parallel.testing.adapters.protocol`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import DTensor, get_platform
from hyper_parallel.testing.adapters import forwards

_ADAPTER = sys.modules[__name__]
Module = nn.Module
#: Number of combinations of placements that are tried for an operation, drawn at random if there are more.
COMBINATIONS = 36
#: Dtype of class indices in losses, and whether losses refuse a label smoothing above 1.
TARGET_DTYPE = np.int64
REFUSES_SMOOTHING = True


def device() -> torch.device:
    return torch.device(get_platform().device_type)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to(device())


def numpy(x: Any) -> np.ndarray:
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.detach().cpu().numpy()


def value_and_grads(function: Callable[..., Any], arrays: Sequence[np.ndarray]) -> tuple[Any, list[np.ndarray | None]]:
    """Call ``function`` on plain leaf tensors; it returns ``(loss, value)``.

    Return the value, and the gradients of the loss with respect to the arguments. The gradient is None for arguments
    that are not floating point.
    """
    leaves = [tensor(a) for a in arrays]
    for leaf in leaves:
        if leaf.is_floating_point():
            leaf.requires_grad_(True)
    loss, value = function(*leaves)
    loss.backward()
    return value, [
        None if not x.is_floating_point() else np.zeros(x.shape, np.float32) if x.grad is None else x.grad.cpu().numpy()
        for x in leaves
    ]


def model_value_and_grads(
    module: nn.Module, function: Callable[[Any], Any], array: np.ndarray
) -> tuple[Any, np.ndarray | None, dict[str, Any]]:
    """Return `value_and_grads` of a function of one input, and the gradient of every parameter of ``module`` by name.
    The gradient is None for a parameter without one."""
    module.zero_grad()
    value, (grad,) = value_and_grads(function, [array])
    return value, grad, {name: p.grad for name, p in module.named_parameters()}


def second_order(
    function: Callable[..., Any], combine: Callable[..., Any], arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the gradient of ``combine(gradients)`` with respect to each argument.

    ``combine`` returns a scalar of the gradients of ``function``.
    """
    leaves = [tensor(a).requires_grad_(True) for a in arrays]
    combine(*torch.autograd.grad(function(*leaves), leaves, create_graph=True)).backward()
    return [x.grad.cpu().numpy() for x in leaves]


def sgd(module: nn.Module, rate: float) -> Callable[[dict[str, Any]], None]:
    """Return a function that takes one step of the framework's SGD with the gradients of `model_value_and_grads`."""
    # On simulated NPUs, operations on lists of tensors do not count their writes in `_version`.
    optimizer = torch.optim.SGD(module.parameters(), rate, foreach=False)
    return lambda grads: optimizer.step()  # the gradients are on the parameters


def optimizer(module: nn.Module, name: str, rate: float) -> tuple[Any, Callable[[dict[str, Any]], None]]:
    """Return an optimizer and a function that takes a step. See `Adapter.optimizer`."""
    make = {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, rate, (0.9, 0.95)),
        "momentum": lambda parameters: torch.optim.SGD(parameters, rate, 0.9),
    }
    made = make[name](p for p in module.parameters() if p.requires_grad)
    return made, lambda grads: made.step()


def clip(module: nn.Module, grads: dict[str, Any], norm: float) -> dict[str, Any]:
    """Return clipped gradients. See `Adapter.clip`."""
    nn.utils.clip_grad_norm_(module.parameters(), norm)
    return grads  # the clipped gradients are on the parameters


def load(module: nn.Module, rng: np.random.Generator, dtype: Any = np.float32) -> nn.Module:
    """Set every parameter to random numbers from ``rng``, in the order of names."""
    drawn = {np.float32: torch.float32, np.float64: torch.float64}[dtype]
    with torch.no_grad():
        for _, p in sorted(module.to(drawn).named_parameters()):
            p.copy_(torch.from_numpy(rng.standard_normal(p.shape).astype(dtype) * 0.3))
    return module.to(device())


def without_values() -> Any:
    """Return a context in which modules get no memory. See `Adapter.without_values`."""
    return torch.device("meta")


def freeze(module: nn.Module, name: str) -> None:
    dict(module.named_parameters())[name].requires_grad_(False)


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


# ------------------------------------------------------------------ modules
def linear_module(n_in: int, n_out: int, bias: bool = True) -> nn.Module:
    return nn.Linear(n_in, n_out, bias=bias)


def embedding_module(count: int, features: int) -> nn.Module:
    return nn.Embedding(count, features)


def norm_module(features: int) -> nn.Module:
    return nn.LayerNorm(features)


class Mlp(nn.Module):
    def __init__(self, features: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(features, hidden, bias=bias)
        self.down = nn.Linear(hidden, features, bias=bias)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, features: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(features, features, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        batch, length = x.shape[0], x.shape[1]
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5, dim=-1)
        return self.wo(torch.matmul(scores, v).transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Norm, attention, norm, gated feed-forward, as in Llama."""

    def __init__(self, features: int, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.attention = Attention(features, head_dim)
        self.feed_forward = Gated(features, hidden)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Gated(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(features, hidden, bias=False), nn.Linear(features, hidden, bias=False)
        self.w2 = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Tied(nn.Module):
    """Language model whose embedding and head are one parameter."""

    def __init__(self, vocabulary: int, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.head = nn.Linear(features, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Any) -> Any:
        return self.head(torch.tanh(self.embedding(ids)))


class RmsNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Any) -> Any:
        return rms_norm(x, self.weight)


class GroupedAttention(nn.Module):
    """Attention with attributes for its numbers of heads."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, normed: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.normed = heads, kv_heads, head_dim, normed
        features = heads * head_dim
        self.wq = linear_module(features, features, False)
        self.wk, self.wv = (linear_module(features, kv_heads * head_dim, False) for _ in range(2))
        self.wo = linear_module(features, features, False)
        if normed:
            self.q_norm, self.k_norm = RmsNorm(head_dim), RmsNorm(head_dim)

    def forward(self, x: Any) -> Any:
        return forwards.grouped_attention(_ADAPTER, self, x)


class FusedAttention(nn.Module):
    """Attention with one weight for query, key and value."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, viewed: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.normed = heads, kv_heads, head_dim, False
        self.viewed = viewed
        features = heads * head_dim
        self.wqkv = linear_module(features, features + 2 * kv_heads * head_dim)
        self.wo = linear_module(features, features)

    def forward(self, x: Any) -> Any:
        return (forwards.viewed_attention if self.viewed else forwards.fused_attention)(_ADAPTER, self, x)


class FusedGated(nn.Module):
    """Gated feed-forward with one weight for gate and up."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w13, self.w2 = linear_module(features, 2 * hidden), linear_module(hidden, features)

    def forward(self, x: Any) -> Any:
        return forwards.fused_gated(_ADAPTER, self, x)


class Experts(nn.Module):
    """Feed-forward layers of several experts, as stacked parameters."""

    def __init__(self, count: int, features: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(count, features, 2 * hidden))
        self.down = nn.Parameter(torch.zeros(count, hidden, features))

    def forward(self, x: Any) -> Any:
        return forwards.experts(_ADAPTER, self, x)


class SortedExperts(Experts):
    """Experts that are called with tokens sorted by expert."""

    def __init__(self, count: int, features: int, hidden: int) -> None:
        super().__init__(count, features, hidden)
        self.num_experts = count

    def forward(self, x: Any, counts: Any) -> Any:
        return forwards.sorted_experts(_ADAPTER, self, x, counts)


class RoutedExperts(SortedExperts):
    """Experts that are called with tokens and the indices of their experts."""

    def forward(self, x: Any, indices: Any, weights: Any) -> Any:
        return forwards.routed_experts(_ADAPTER, self, x, indices, weights)


class Mixture(nn.Module):
    """Embeddings, a router and experts."""

    choose: Any = None

    def __init__(self, vocabulary: int, experts: int, features: int, hidden: int, by_index: bool) -> None:
        super().__init__()
        self.by_index = by_index
        self.embedding = nn.Embedding(vocabulary, features)
        self.router = nn.Linear(features, experts, bias=False)
        self.experts = (RoutedExperts if by_index else SortedExperts)(experts, features, hidden)

    def forward(self, ids: Any) -> Any:
        return forwards.mixture(_ADAPTER, self, ids)


class SparseBlock(nn.Module):
    """Norm, attention, norm, a router to experts and a shared expert."""

    def __init__(self, features: int, hidden: int, head_dim: int, experts: int, k: int, by_index: bool) -> None:
        super().__init__()
        self.k, self.by_index = k, by_index
        self.norm1, self.norm2 = RmsNorm(features), RmsNorm(features)
        self.attention = Attention(features, head_dim)
        self.router = nn.Linear(features, experts, bias=False)
        self.experts = (RoutedExperts if by_index else SortedExperts)(experts, features, hidden)
        self.shared = Gated(features, hidden)

    def forward(self, x: Any) -> Any:
        return forwards.sparse_block(_ADAPTER, self, x)


class SparseModel(nn.Module):
    """A language model of two blocks with experts."""

    def __init__(self, vocabulary: int, features: int, *sizes: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.layers = nn.ModuleList(SparseBlock(features, *sizes) for _ in range(2))
        self.head = nn.Linear(features, vocabulary)

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class CausalAttention(nn.Module):
    """Causal attention by the framework's attention function."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        features = heads * head_dim
        self.wq, self.wo = (linear_module(features, features, False) for _ in range(2))
        self.wk, self.wv = (linear_module(features, kv_heads * head_dim, False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return forwards.causal_attention(_ADAPTER, self, x)


class CausalModel(nn.Module):
    """Causal model: embeddings of tokens and positions, attention and a head."""

    def __init__(self, vocabulary: int, length: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.tokens, self.places = (embedding_module(n, heads * head_dim) for n in (vocabulary, length))
        self.attention = CausalAttention(heads, kv_heads, head_dim)
        self.head = linear_module(heads * head_dim, vocabulary)

    def forward(self, ids: Any, positions: Any) -> Any:
        return forwards.causal_model(_ADAPTER, self, ids, positions)


class Projection(nn.Module):
    """A user-defined linear layer: its weight is (in, out)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(n_in, n_out))
        self.shift = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Any) -> Any:
        return matmul(x, self.kernel) + self.shift


class LinearByAnotherName(nn.Linear):
    """A subclass of the linear layer."""


class Buffered(nn.Module):
    """A linear module and a buffer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.register_buffer("scale", torch.arange(1.0, features + 1))

    def forward(self, x: Any) -> Any:
        return self.linear(x) * self.scale


class Scaled(nn.Linear):
    """A linear layer whose forward takes further arguments."""

    def forward(self, x: Any, scale: float, *, shift: float) -> Any:
        return super().forward(x) * scale + shift


class Probe(nn.Module):
    """Module that saves the arguments of its call, and returns its positional inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return args if len(args) > 1 else args[0]


# ------------------------------------------------------------------ operations
def detach(x: Any) -> Any:
    return x.detach()


def weighted_sum(y: Any, weights: Any) -> Any:
    return (y * weights).sum()


linear = F.linear
matmul = torch.matmul
relu = torch.relu
silu = F.silu
gelu = F.gelu
sigmoid = torch.sigmoid
tanh = torch.tanh
exp = torch.exp
log = torch.log
embedding = F.embedding
where = torch.where


def square(x: Any) -> Any:
    return x**2


sign = torch.sign


def softmax(x: Any, dim: int) -> Any:
    return F.softmax(x, dim=dim)


def log_softmax(x: Any, dim: int) -> Any:
    return F.log_softmax(x, dim=dim)


def sum(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return x.sum() if dim is None else x.sum(dim, keepdim)


def mean(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return x.mean() if dim is None else x.mean(dim, keepdim)


def amax(x: Any, dim: int) -> Any:
    return x.amax(dim)


def max_norm(x: Any, dim: int | None) -> Any:
    return torch.linalg.vector_norm(x, float("inf"), dim)


def amin(x: Any, dim: int) -> Any:
    return x.amin(dim)


max, min = torch.max, torch.min
EXTREMES_WITH_PLACES: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name) for name in ("max", "min", "argmax", "argmin", "median")
}


def reshape(x: Any, shape: tuple[int, ...]) -> Any:
    return x.reshape(shape)


def cumsum(x: Any, dim: int) -> Any:
    return x.cumsum(dim)


def contiguous(x: Any) -> Any:
    return x.contiguous()


def transpose(x: Any, a: int, b: int) -> Any:
    return x.transpose(a, b)


def permute(x: Any, dims: tuple[int, ...]) -> Any:
    return x.permute(dims)


def unsqueeze(x: Any, dim: int) -> Any:
    return x.unsqueeze(dim)


def expand(x: Any, shape: tuple[int, ...]) -> Any:
    return x.expand(shape)


def cat(xs: Sequence[Any], dim: int) -> Any:
    return torch.cat(list(xs), dim)


def stack(xs: Sequence[Any], dim: int) -> Any:
    return torch.stack(list(xs), dim)


def split(x: Any, size: Any, dim: int) -> Any:
    return torch.split(x, size, dim)


def chunk(x: Any, chunks: int, dim: int) -> Any:
    return torch.chunk(x, chunks, dim)


def index_select(x: Any, dim: int, index: Any) -> Any:
    return torch.index_select(x, dim, index)


def gather(x: Any, dim: int, index: Any) -> Any:
    return torch.gather(x, dim, index)


def topk(x: Any, k: int) -> Any:
    return torch.topk(x, k)


def diagonal(x: Any, offset: int, a: int, b: int) -> Any:
    return torch.diagonal(x, offset, a, b)


def as_strided(x: Any, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return torch.as_strided(x, sizes, strides)


def leaf(x: Any) -> Any:
    return x.detach().requires_grad_()


def masked_fill(x: Any, mask: Any, value: float) -> Any:
    return x.masked_fill(mask, value)


def padded_embedding(ids: Any, weight: Any, padding: int) -> Any:
    return F.embedding(ids, weight, padding)


def layer_norm(x: Any, weight: Any, bias: Any, epsilon: float = 1e-5) -> Any:
    return F.layer_norm(x, tuple(weight.shape), weight, bias, eps=epsilon)


def rms_norm(x: Any, weight: Any) -> Any:
    return F.rms_norm(x, tuple(weight.shape), weight, 1e-5)


def cross_entropy(logits: Any, target: Any, reduction: str = "mean") -> Any:
    return F.cross_entropy(logits, target, reduction=reduction)


def loss(
    logits: Any, target: Any, weight: Any = None, reduction: str = "mean", smoothing: float = 0.0, ignore: int = -100
) -> Any:
    """Return cross entropy with all its options."""
    return F.cross_entropy(logits, target, weight, reduction=reduction, label_smoothing=smoothing, ignore_index=ignore)


def loss_module(**options: Any) -> nn.Module:
    """Return cross entropy as a module; ``options`` are keywords of the framework's class."""
    return nn.CrossEntropyLoss(**options)


def nll(log_probabilities: Any, target: Any, weight: Any = None, reduction: str = "mean") -> Any:
    return F.nll_loss(log_probabilities, target, weight, reduction=reduction)


def logsumexp(x: Any, dim: int) -> Any:
    return torch.logsumexp(x, dim)


def dropout(x: Any, p: float) -> Any:
    return F.dropout(x, p, True)


def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a draw of the framework's ``rand`` or ``randn``."""
    return getattr(torch, name)(shape, device=device())


#: An operation on square matrices without a sharding rule, and an elementwise one with its name for registration.
# The library has no rules for overloads.
unruled = torch.ops.aten.inverse.default
custom = CUSTOM = torch.ops.aten.special_entr.default


rand_like = torch.rand_like


def batch_norm(x: Any, mean: Any, variance: Any) -> Any:
    return F.batch_norm(x, mean, variance, training=True)


#: Whether the backend gathers for `unruled_in_place` and writes the shards back; otherwise the call is an error.
WRITES_BACK = True
WRITES_THROUGH_VIEWS = True
REPLACES_MEMORY = False
BOOL = torch.bool
FUZZ_SHARE = 400
FUZZ_LIMITS: dict[str, Any] = {}
TRAINING_LIMITS: dict[str, Any] = {"again": ("inside", "around", "reentrant")}
TRAINING_SHARE = 200
CHECKPOINTS = ("", "reentrant", "other")


def checkpointed(module: Any, x: Any, reentrant: bool) -> Any:
    return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant)


def unruled_in_place(x: Any) -> Any:
    """Write into ``x`` by an operation without a sharding rule."""
    return x.fill_diagonal_(3.0)


#: Operations that write into their first operand: name -> (function, whether it takes a second operand).
IN_PLACE: dict[str, tuple[Callable[..., Any], bool]] = {
    "add_": (torch.Tensor.add_, True),
    "sub_": (torch.Tensor.sub_, True),
    "mul_": (torch.Tensor.mul_, True),
    "copy_": (torch.Tensor.copy_, True),
    "+=": (operator.iadd, True),
    "*= 2": (lambda x: operator.imul(x, 2.0), False),
    "zero_": (torch.Tensor.zero_, False),
    "fill_": (lambda x: x.fill_(3.0), False),
    "exp_": (torch.Tensor.exp_, False),
}


def attention(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def scaled_attention(q: Any, k: Any, v: Any, mask: Any = None, is_causal: bool = False) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, enable_gqa=q.shape[1] != k.shape[1])


def seed(value: int) -> None:
    torch.manual_seed(value)
