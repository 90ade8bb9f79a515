"""NumPy for the conformance suite; see `hyper_parallel.testing.adapters.protocol`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel import DTensor
from hyper_parallel.testing.adapters import forwards
from numpy_backend import layers, methods, modules, random
from numpy_backend import operations as o
from numpy_backend.array import Array, Parameter, gradients
from numpy_backend.interception import no_dispatch
from numpy_backend.layers import (  # noqa: F401 - operations that the checks know by these names
    embedding,
    gelu,
    linear,
    log_softmax,
    rand_like,
    relu,
    sigmoid,
    silu,
    softmax,
)
from numpy_backend.operations import (  # noqa: F401 - the same
    cat,
    chunk,
    contiguous,
    cumsum,
    detach,
    exp,
    expand,
    log,
    masked_fill,
    matmul,
    permute,
    reshape,
    sign,
    split,
    stack,
    tanh,
    unsqueeze,
    where,
)

assert methods.METHODS
_ADAPTER = sys.modules[__name__]
COMBINATIONS = 12
TARGET_DTYPE = np.int64
REFUSES_SMOOTHING = False
WRITES_BACK = False
WRITES_THROUGH_VIEWS = True
REPLACES_MEMORY = False
BOOL = np.dtype(np.bool_)
FUZZ_SHARE = 100
TRAINING_SHARE = 60
CHECKPOINTS = ()
TRAINING_LIMITS: dict[str, Any] = {
    "optimizers": ("sgd",),
    "without": frozenset({"cast", "empty", "resume"}),
}
FUZZ_LIMITS: dict[str, Any] = {
    "nan": False,
    "writes_with_gradients": False,
    "dtypes": ("float64", "float32", "int64", "bool"),
    "without": frozenset({"as_strided", "diagonal"}),
}


def tensor(array: np.ndarray) -> Array:
    return Array(np.array(array))


def numpy(x: Any) -> np.ndarray:
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return np.array(x.value)


def _backward(loss: Any, leaves: Sequence[Any], create_graph: bool = False) -> list[Any]:
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    with no_dispatch():
        return gradients(loss, leaves, Array(np.ones(loss.shape, loss.dtype)), create_graph)


def value_and_grads(function: Callable[..., Any], arrays: Sequence[np.ndarray]) -> tuple[Any, list[np.ndarray | None]]:
    leaves = [tensor(a) for a in arrays]
    for leaf in leaves:
        leaf.requires_grad = np.issubdtype(leaf.dtype, np.floating)
    loss, value = function(*leaves)
    found = _backward(loss, leaves)
    return value, [
        None if not x.requires_grad else np.zeros(x.shape, np.float32) if g is None else np.array(g.value)
        for x, g in zip(leaves, found, strict=True)
    ]


def model_value_and_grads(
    module: Any, function: Callable[[Any], Any], array: np.ndarray
) -> tuple[Any, np.ndarray | None, dict[str, Any]]:
    x = tensor(array)
    x.requires_grad = np.issubdtype(x.dtype, np.floating)
    named = dict(module.named_parameters())
    loss, value = function(x)
    first, *rest = _backward(loss, [x, *named.values()])
    for parameter, g in zip(named.values(), rest, strict=True):
        parameter._grad = g if parameter.requires_grad else None
    grad = None if not x.requires_grad else np.zeros(x.shape, np.float32) if first is None else np.array(first.value)
    return value, grad, {name: parameter.grad for name, parameter in named.items()}


def second_order(
    function: Callable[..., Any], combine: Callable[..., Any], arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    leaves = [tensor(a).requires_grad_() for a in arrays]
    grads = _backward(function(*leaves), leaves, create_graph=True)
    return [np.array(g.value) for g in _backward(combine(*grads), leaves)]


def sgd(module: Any, rate: float) -> Callable[[dict[str, Any]], None]:
    def step(grads: dict[str, Any]) -> None:
        with no_dispatch():
            for name, parameter in module.named_parameters():
                if grads[name] is not None:
                    parameter.value[...] -= rate * grads[name].value
                    parameter.writes[0] += 1

    return step


def optimizer(module: Any, name: str, rate: float) -> tuple[Any, Callable[[dict[str, Any]], None]]:
    """The backend has no optimizers of its own."""
    return None, sgd(module, rate)


def load(module: Any, rng: np.random.Generator, dtype: Any = np.float32) -> Any:
    for _, p in sorted(module.named_parameters()):
        p.value = rng.standard_normal(p.value.shape).astype(dtype) * dtype(0.3)
    return module


def freeze(module: Any, name: str) -> None:
    dict(module.named_parameters())[name].requires_grad = False


def call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


# ------------------------------------------------------------------ modules
def linear_module(n_in: int, n_out: int, bias: bool = True) -> Any:
    return modules.Linear(n_in, n_out, bias)


embedding_module, norm_module, loss_module = modules.Embedding, modules.LayerNorm, modules.CrossEntropy


class Mlp(modules.Module):
    def __init__(self, features: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = linear_module(features, hidden, bias), linear_module(hidden, features, bias)

    def forward(self, x: Any) -> Any:
        return self.down(relu(self.up(x)))


class Attention(modules.Module):
    def __init__(self, features: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, linear_module(features, features, False))

    def forward(self, x: Any) -> Any:
        batch, length = x.shape[:2]
        q, k, v = (
            transpose(reshape(w(x), (batch, length, -1, self.head_dim)), 1, 2) for w in (self.wq, self.wk, self.wv)
        )
        scores = softmax(matmul(q, transpose(k, 2, 3)) * self.head_dim**-0.5, -1)
        return self.wo(reshape(transpose(matmul(scores, v), 1, 2), (batch, length, -1)))


class Gated(modules.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = linear_module(features, hidden, False), linear_module(features, hidden, False)
        self.w2 = linear_module(hidden, features, False)

    def forward(self, x: Any) -> Any:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(modules.Module):
    def __init__(self, features: int, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.norm1, self.attention = norm_module(features), Attention(features, head_dim)
        self.norm2, self.feed_forward = norm_module(features), Gated(features, hidden)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Tied(modules.Module):
    def __init__(self, vocabulary: int, features: int) -> None:
        super().__init__()
        self.embedding, self.head = embedding_module(vocabulary, features), linear_module(features, vocabulary, False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Any) -> Any:
        return self.head(tanh(self.embedding(ids)))


class RmsNorm(modules.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = Parameter(np.ones(features, np.float32))

    def forward(self, x: Any) -> Any:
        return rms_norm(x, self.weight)


class GroupedAttention(modules.Module):
    def __init__(self, heads: int, kv_heads: int, head_dim: int, normed: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.normed = heads, kv_heads, head_dim, normed
        features = heads * head_dim
        self.wq, self.wo = linear_module(features, features, False), linear_module(features, features, False)
        self.wk, self.wv = (linear_module(features, kv_heads * head_dim, False) for _ in range(2))
        if normed:
            self.q_norm, self.k_norm = RmsNorm(head_dim), RmsNorm(head_dim)

    def forward(self, x: Any) -> Any:
        return forwards.grouped_attention(_ADAPTER, self, x)


class FusedAttention(modules.Module):
    def __init__(self, heads: int, kv_heads: int, head_dim: int, viewed: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.normed = heads, kv_heads, head_dim, False
        self.viewed = viewed
        features = heads * head_dim
        self.wqkv = linear_module(features, features + 2 * kv_heads * head_dim)
        self.wo = linear_module(features, features)

    def forward(self, x: Any) -> Any:
        return (forwards.viewed_attention if self.viewed else forwards.fused_attention)(_ADAPTER, self, x)


class FusedGated(modules.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w13, self.w2 = linear_module(features, 2 * hidden), linear_module(hidden, features)

    def forward(self, x: Any) -> Any:
        return forwards.fused_gated(_ADAPTER, self, x)


class Experts(modules.Module):
    def __init__(self, count: int, features: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = Parameter(np.zeros((count, features, 2 * hidden), np.float32))
        self.down = Parameter(np.zeros((count, hidden, features), np.float32))

    def forward(self, x: Any) -> Any:
        return forwards.experts(_ADAPTER, self, x)


class SortedExperts(Experts):
    def __init__(self, count: int, features: int, hidden: int) -> None:
        super().__init__(count, features, hidden)
        self.num_experts = count

    def forward(self, x: Any, counts: Any) -> Any:
        return forwards.sorted_experts(_ADAPTER, self, x, counts)


class RoutedExperts(SortedExperts):
    def forward(self, x: Any, indices: Any, weights: Any) -> Any:
        return forwards.routed_experts(_ADAPTER, self, x, indices, weights)


class Mixture(modules.Module):
    choose: Any = None

    def __init__(self, vocabulary: int, experts: int, features: int, hidden: int, by_index: bool) -> None:
        super().__init__()
        self.by_index = by_index
        self.embedding, self.router = embedding_module(vocabulary, features), linear_module(features, experts, False)
        self.experts = (RoutedExperts if by_index else SortedExperts)(experts, features, hidden)

    def forward(self, ids: Any) -> Any:
        return forwards.mixture(_ADAPTER, self, ids)


class CausalAttention(modules.Module):
    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        features = heads * head_dim
        self.wq, self.wo = (linear_module(features, features, False) for _ in range(2))
        self.wk, self.wv = (linear_module(features, kv_heads * head_dim, False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return forwards.causal_attention(_ADAPTER, self, x)


class CausalModel(modules.Module):
    def __init__(self, vocabulary: int, length: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.tokens, self.places = (embedding_module(n, heads * head_dim) for n in (vocabulary, length))
        self.attention = CausalAttention(heads, kv_heads, head_dim)
        self.head = linear_module(heads * head_dim, vocabulary)

    def forward(self, ids: Any, positions: Any) -> Any:
        return forwards.causal_model(_ADAPTER, self, ids, positions)


class Projection(modules.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.kernel = Parameter(np.zeros((n_in, n_out), np.float32))
        self.shift = Parameter(np.zeros(n_out, np.float32))

    def forward(self, x: Any) -> Any:
        return matmul(x, self.kernel) + self.shift


class LinearByAnotherName(modules.Linear):
    pass


class Buffered(modules.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = linear_module(features, features)
        self.register_buffer("scale", Array(np.arange(1.0, features + 1, dtype=np.float32)))

    def forward(self, x: Any) -> Any:
        return self.linear(x) * self.scale


class Scaled(modules.Linear):
    def forward(self, x: Any, scale: float, *, shift: float) -> Any:
        return super().forward(x) * scale + shift


class Probe(modules.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return args if len(args) > 1 else args[0]


# ------------------------------------------------------------------ operations
batch_norm, unruled, unruled_in_place, padded_embedding = (
    layers.batch_norm,
    layers.inverse,
    layers.scale_rows_,
    layers.embedding,
)
custom = CUSTOM = layers.entropy


def weighted_sum(y: Any, weights: Any) -> Any:
    return o.sum(y * weights)


def square(x: Any) -> Any:
    return x**2


def _dims(dim: Any) -> Any:
    return (dim,) if isinstance(dim, int) else dim


def logsumexp(x: Any, dim: int) -> Any:
    return layers.logsumexp(x, (dim,))


def sum(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return o.sum(x, _dims(dim), keepdim)


def mean(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return o.mean(x, _dims(dim), keepdim)


def amax(x: Any, dim: int) -> Any:
    return o.amax(x, (dim,))


def amin(x: Any, dim: int) -> Any:
    return o.amin(x, (dim,))


def max_norm(x: Any, dim: int | None) -> Any:
    return o.amax(o.abs_(x)) if dim is None else o.amax(o.abs_(x), (dim,))


def max(x: Any) -> Any:
    return o.amax(x)


def min(x: Any) -> Any:
    return o.amin(x)


EXTREMES_WITH_PLACES: dict[str, Callable[..., Any]] = {"argmax": layers.argmax, "argmin": layers.argmin}


def transpose(x: Any, a: int, b: int) -> Any:
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return o.permute(x, tuple(order))


def index_select(x: Any, dim: int, index: Any) -> Any:
    return o.index_select(x, index, dim)


def gather(x: Any, dim: int, index: Any) -> Any:
    return o.gather(x, index, dim)


def diagonal(x: Any, offset: int, a: int, b: int) -> Any:
    return layers.diagonal(x, offset, a, b)


def as_strided(x: Any, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    raise TypeError("these arrays have no as_strided")


def leaf(x: Any) -> Any:
    x = o.detach(x)
    return x.requires_grad_() if np.issubdtype(x.dtype, np.floating) else x


def layer_norm(x: Any, weight: Any, bias: Any, epsilon: float = 1e-5) -> Any:
    return layers.layer_norm(x, weight, bias, len(weight.shape), epsilon=epsilon)


def rms_norm(x: Any, weight: Any) -> Any:
    return layers.rms_norm(x, weight, len(weight.shape))


def attention(q: Any, k: Any, v: Any) -> Any:
    return layers.attention(q, k, v, None, True)


def scaled_attention(q: Any, k: Any, v: Any, mask: Any = None, is_causal: bool = False) -> Any:
    return layers.attention(q, k, v, mask, is_causal)


def dropout(x: Any, p: float) -> Any:
    return layers.dropout(x, p, True)


def cross_entropy(logits: Any, target: Any, reduction: str = "mean") -> Any:
    return layers.cross_entropy(logits, target, None, reduction)


def loss(
    logits: Any, target: Any, weight: Any = None, reduction: str = "mean", smoothing: float = 0.0, ignore: int = -100
) -> Any:
    return layers.cross_entropy(logits, target, weight, reduction, ignore, smoothing)


def nll(log_probabilities: Any, target: Any, weight: Any = None, reduction: str = "mean") -> Any:
    return layers.nll_loss(log_probabilities, target, weight, reduction)


def seed(value: int) -> None:
    random.seed(value)


def draw(name: str, shape: tuple[int, ...]) -> Array:
    how = random.GENERATOR.random if name == "rand" else random.GENERATOR.standard_normal
    return Array(how(shape).astype(np.float32))


#: Operations that write into their first operand: name -> (function, whether it takes a second operand).
IN_PLACE: dict[str, tuple[Callable[..., Any], bool]] = {
    "add_": (o.add_, True),
    "sub_": (o.sub_, True),
    "mul_": (o.mul_, True),
    "copy_": (o.copy_, True),
    "+=": (operator.iadd, True),
    "*= 2": (lambda x: operator.imul(x, 2.0), False),
    "fill_": (lambda x: o.fill_(x, 3.0), False),
    "exp_": (o.exp_, False),
}
