"""MindSpore's adapter for the conformance suite; see `hyper_parallel.testing.adapters.protocol`."""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Tensor, experimental, mint, nn, ops
from mindspore.nn.utils import no_init_parameters

from hyper_parallel import DTensor
from hyper_parallel.mindspore import scaled_dot_product_attention
from hyper_parallel.platform.mindspore.gradients import grad as gradients
from hyper_parallel.testing.adapters import forwards

_ADAPTER = sys.modules[__name__]
Module = nn.Cell
#: Number of combinations of placements that are tried for an operation; collectives take milliseconds on this backend.
COMBINATIONS = 12
#: Dtype of class indices in losses, and whether losses refuse a label smoothing above 1.
TARGET_DTYPE = np.int32
REFUSES_SMOOTHING = False


def tensor(array: np.ndarray) -> Tensor:
    return Tensor(np.array(array))


def numpy(x: Any) -> np.ndarray:
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.asnumpy()


def value_and_grads(function: Callable[..., Any], arrays: Sequence[np.ndarray]) -> tuple[Any, list[np.ndarray | None]]:
    """Call ``function`` on plain tensors; it returns ``(loss, value)``.

    Return the value, and the gradients of the loss with respect to the arguments. The gradient is None for arguments
    that are not floating point.
    """
    inputs = [tensor(a) for a in arrays]
    floating = tuple(i for i, a in enumerate(arrays) if np.issubdtype(a.dtype, np.floating))
    values: list[Any] = []

    def loss(*xs: Any) -> Any:
        result, value = function(*xs)
        values.append(value)
        return result

    if not floating:
        loss(*inputs)
        return values[-1], [None] * len(inputs)
    _, grads = ms.value_and_grad(loss, floating)(*inputs)
    grads = grads if isinstance(grads, tuple) else (grads,)
    by_index = {i: g.asnumpy() for i, g in zip(floating, grads, strict=True)}
    return values[-1], [by_index.get(i) for i in range(len(inputs))]


def model_value_and_grads(
    module: nn.Cell, function: Callable[[Any], Any], array: np.ndarray
) -> tuple[Any, np.ndarray | None, dict[str, Any]]:
    """Return `value_and_grads` of a function of one input, and the gradient of every parameter of ``module`` by name.
    The gradient is None for a parameter without one."""
    named = dict(module.parameters_and_names())
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    values: list[Any] = []

    def loss(x: Any) -> Any:
        result, value = function(x)
        values.append(value)
        return result

    weights = list(trainable.values())
    if np.issubdtype(array.dtype, np.floating):
        _, (grad, grads) = gradients.value_and_grad(loss, 0, weights)(tensor(array))
        grad = grad.asnumpy()
    else:
        _, grads = gradients.value_and_grad(loss, None, weights)(tensor(array))
        grad = None
    by_name = dict(zip(trainable, grads, strict=True))
    return values[-1], grad, {name: by_name.get(name) for name in named}


def second_order(
    function: Callable[..., Any], combine: Callable[..., Any], arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the gradient of ``combine(gradients)`` with respect to each argument.

    ``combine`` returns a scalar of the gradients of ``function``.
    """
    places = tuple(range(len(arrays)))

    def outer(*xs: Any) -> Any:
        return combine(*_as_tuple(ms.grad(function, places)(*xs)))

    return [g.asnumpy() for g in _as_tuple(ms.grad(outer, places)(*map(tensor, arrays)))]


def _as_tuple(grads: Any) -> tuple:
    """Return gradients as a tuple: MindSpore returns a single gradient bare."""
    return grads if isinstance(grads, tuple) else (grads,)


def sgd(module: nn.Cell, rate: float) -> Callable[[dict[str, Any]], None]:
    """Return a function that takes one step of the framework's SGD with the gradients of `model_value_and_grads`."""
    named = {name: p for name, p in module.parameters_and_names() if p.requires_grad}
    optimizer = nn.SGD(list(named.values()), rate)
    return lambda grads: optimizer(tuple(grads[name] for name in named))


def optimizer(module: nn.Cell, name: str, rate: float) -> tuple[Any, Callable[[dict[str, Any]], None]]:
    """Return an optimizer and a function that takes a step. See `Adapter.optimizer`."""
    named = {name: p for name, p in module.parameters_and_names() if p.requires_grad}
    if name == "adamw":
        made = experimental.optim.AdamW(list(named.values()), rate, (0.9, 0.95))
    elif next(iter(named.values())).dtype == ms.float64:
        made = nn.Momentum(list(named.values()), rate, 0.9)  # the same algorithm; SGD has no kernel for float64
    else:
        made = experimental.optim.SGD(list(named.values()), rate, 0.9)

    def take(grads: dict[str, Any]) -> None:
        # MindSpore compiles optimizer steps, which takes seconds for each. The tests in tests/mindspore cover that.
        with mock.patch.dict(os.environ, MS_JIT="0"):
            made(tuple(grads[name] for name in named))

    return made, take


def clip(module: nn.Cell, grads: dict[str, Any], norm: float) -> dict[str, Any]:
    """Return clipped gradients. See `Adapter.clip`."""
    given = tuple(grads.values())
    # `clip_by_global_norm` computes the norm in single precision.
    clipping = ops.clip_by_norm if given[0].dtype == ms.float64 else ops.clip_by_global_norm
    return dict(zip(grads, clipping(given, norm), strict=True))


def load(module: nn.Cell, rng: np.random.Generator, dtype: Any = np.float32) -> nn.Cell:
    """Set every parameter to random numbers from ``rng``, in the order of names."""
    for _, p in sorted(dict(module.parameters_and_names()).items()):
        p.set_dtype(ms.float64 if dtype is np.float64 else ms.float32)
        p.set_data(Tensor(rng.standard_normal(p.shape).astype(dtype) * dtype(0.3)))
    return module


def without_values() -> Any:
    """Return a context in which modules get no memory. See `Adapter.without_values`."""
    return no_init_parameters()


def freeze(module: nn.Cell, name: str) -> None:
    dict(module.parameters_and_names())[name].requires_grad = False


def call(module: nn.Cell, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


# ------------------------------------------------------------------ modules
def linear_module(n_in: int, n_out: int, bias: bool = True) -> nn.Cell:
    return mint.nn.Linear(n_in, n_out, bias=bias)


def embedding_module(count: int, features: int) -> nn.Cell:
    return nn.Embedding(count, features)


def norm_module(features: int) -> nn.Cell:
    return nn.LayerNorm((features,))


class Mlp(nn.Cell):
    def __init__(self, features: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Dense(features, hidden, has_bias=bias)
        self.down = nn.Dense(hidden, features, has_bias=bias)

    def construct(self, x: Any) -> Any:
        return self.down(ops.relu(self.up(x)))


class Attention(nn.Cell):
    def __init__(self, features: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = mint.nn.Linear(features, features, bias=False)
        self.wk = mint.nn.Linear(features, features, bias=False)
        self.wv = mint.nn.Linear(features, features, bias=False)
        self.wo = mint.nn.Linear(features, features, bias=False)

    def construct(self, x: Any) -> Any:
        batch, length = x.shape[0], x.shape[1]
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = softmax(mint.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5, -1)
        return self.wo(mint.matmul(scores, v).transpose(1, 2).reshape(batch, length, -1))


class Gated(nn.Cell):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1 = mint.nn.Linear(features, hidden, bias=False)
        self.w3 = mint.nn.Linear(features, hidden, bias=False)
        self.w2 = mint.nn.Linear(hidden, features, bias=False)

    def construct(self, x: Any) -> Any:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Cell):
    """Norm, attention, norm, gated feed-forward, as in Llama."""

    def __init__(self, features: int, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((features,)), nn.LayerNorm((features,))
        self.attention = Attention(features, head_dim)
        self.feed_forward = Gated(features, hidden)

    def construct(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Tied(nn.Cell):
    """Language model whose embedding and head are one parameter."""

    def __init__(self, vocabulary: int, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.head = mint.nn.Linear(features, vocabulary, bias=False)
        self.head.weight = self.embedding.embedding_table

    def construct(self, ids: Any) -> Any:
        return self.head(ops.tanh(self.embedding(ids)))


class RmsNorm(nn.Cell):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones((features,), np.float32)), name="weight")

    def construct(self, x: Any) -> Any:
        return rms_norm(x, self.weight)


class GroupedAttention(nn.Cell):
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

    def construct(self, x: Any) -> Any:
        return forwards.grouped_attention(_ADAPTER, self, x)


class FusedAttention(nn.Cell):
    """Attention with one weight for query, key and value."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, viewed: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.normed = heads, kv_heads, head_dim, False
        self.viewed = viewed
        features = heads * head_dim
        self.wqkv = linear_module(features, features + 2 * kv_heads * head_dim)
        self.wo = linear_module(features, features)

    def construct(self, x: Any) -> Any:
        return (forwards.viewed_attention if self.viewed else forwards.fused_attention)(_ADAPTER, self, x)


class FusedGated(nn.Cell):
    """Gated feed-forward with one weight for gate and up."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w13, self.w2 = linear_module(features, 2 * hidden), linear_module(hidden, features)

    def construct(self, x: Any) -> Any:
        return forwards.fused_gated(_ADAPTER, self, x)


class Experts(nn.Cell):
    """Feed-forward layers of several experts, as stacked parameters."""

    def __init__(self, count: int, features: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = ms.Parameter(
            Tensor(
                np.zeros(
                    (
                        count,
                        features,
                        2 * hidden,
                    ),
                    np.float32,
                )
            ),
            name="gate_up",
        )
        self.down = ms.Parameter(
            Tensor(
                np.zeros(
                    (
                        count,
                        hidden,
                        features,
                    ),
                    np.float32,
                )
            ),
            name="down",
        )

    def construct(self, x: Any) -> Any:
        return forwards.experts(_ADAPTER, self, x)


class SortedExperts(Experts):
    """Experts that are called with tokens sorted by expert."""

    def __init__(self, count: int, features: int, hidden: int) -> None:
        super().__init__(count, features, hidden)
        self.num_experts = count

    def construct(self, x: Any, counts: Any) -> Any:
        return forwards.sorted_experts(_ADAPTER, self, x, counts)


class RoutedExperts(SortedExperts):
    """Experts that are called with tokens and the indices of their experts."""

    def construct(self, x: Any, indices: Any, weights: Any) -> Any:
        return forwards.routed_experts(_ADAPTER, self, x, indices, weights)


class Mixture(nn.Cell):
    """Embeddings, a router and experts."""

    choose: Any = None

    def __init__(self, vocabulary: int, experts: int, features: int, hidden: int, by_index: bool) -> None:
        super().__init__()
        self.by_index = by_index
        self.embedding = nn.Embedding(vocabulary, features)
        self.router = mint.nn.Linear(features, experts, bias=False)
        self.experts = (RoutedExperts if by_index else SortedExperts)(experts, features, hidden)

    def construct(self, ids: Any) -> Any:
        return forwards.mixture(_ADAPTER, self, ids)


class SparseBlock(nn.Cell):
    """Norm, attention, norm, a router to experts and a shared expert."""

    def __init__(self, features: int, hidden: int, head_dim: int, experts: int, k: int, by_index: bool) -> None:
        super().__init__()
        self.k, self.by_index = k, by_index
        self.norm1, self.norm2 = RmsNorm(features), RmsNorm(features)
        self.attention = Attention(features, head_dim)
        self.router = mint.nn.Linear(features, experts, bias=False)
        self.experts = (RoutedExperts if by_index else SortedExperts)(experts, features, hidden)
        self.shared = Gated(features, hidden)

    def construct(self, x: Any) -> Any:
        return forwards.sparse_block(_ADAPTER, self, x)


class SparseModel(nn.Cell):
    """A language model of two blocks with experts."""

    def __init__(self, vocabulary: int, features: int, *sizes: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.layers = nn.CellList([SparseBlock(features, *sizes) for _ in range(2)])
        self.head = mint.nn.Linear(features, vocabulary)

    def construct(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class CausalAttention(nn.Cell):
    """Causal attention by the framework's attention function."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        features = heads * head_dim
        self.wq, self.wo = (linear_module(features, features, False) for _ in range(2))
        self.wk, self.wv = (linear_module(features, kv_heads * head_dim, False) for _ in range(2))

    def construct(self, x: Any) -> Any:
        return forwards.causal_attention(_ADAPTER, self, x)


class CausalModel(nn.Cell):
    """Causal model: embeddings of tokens and positions, attention and a head."""

    def __init__(self, vocabulary: int, length: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.tokens, self.places = (embedding_module(n, heads * head_dim) for n in (vocabulary, length))
        self.attention = CausalAttention(heads, kv_heads, head_dim)
        self.head = linear_module(heads * head_dim, vocabulary)

    def construct(self, ids: Any, positions: Any) -> Any:
        return forwards.causal_model(_ADAPTER, self, ids, positions)


class Projection(nn.Cell):
    """A user-defined linear layer: its weight is (in, out)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.kernel = ms.Parameter(
            Tensor(
                np.zeros(
                    (
                        n_in,
                        n_out,
                    ),
                    np.float32,
                )
            ),
            name="kernel",
        )
        self.shift = ms.Parameter(Tensor(np.zeros((n_out,), np.float32)), name="shift")

    def construct(self, x: Any) -> Any:
        return matmul(x, self.kernel) + self.shift


class LinearByAnotherName(mint.nn.Linear):
    """A subclass of the linear layer."""


class Buffered(nn.Cell):
    """A linear module and a buffer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = mint.nn.Linear(features, features)
        self.register_buffer("scale", Tensor(np.arange(1, features + 1).astype(np.float32)))

    def construct(self, x: Any) -> Any:
        return self.linear(x) * self.scale


class Scaled(mint.nn.Linear):
    """A linear layer whose forward takes further arguments."""

    def construct(self, x: Any, scale: float, *, shift: float) -> Any:
        return super().construct(x) * scale + shift


class Probe(nn.Cell):
    """Module that saves the arguments of its call, and returns its positional inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple = ()

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return args if len(args) > 1 else args[0]


# ------------------------------------------------------------------ operations
def detach(x: Any) -> Any:
    return ops.stop_gradient(x)


def weighted_sum(y: Any, weights: Any) -> Any:
    return (y * weights).sum()


linear = mint.nn.functional.linear
matmul = mint.matmul
relu = ops.relu
silu = mint.nn.functional.silu
sigmoid = ops.sigmoid
tanh = ops.tanh
exp = ops.exp
log = ops.log
where = mint.where


def gelu(x: Any) -> Any:
    return ops.gelu(x, approximate="none")


def embedding(ids: Any, weight: Any) -> Any:
    return ops.gather(weight, ids, 0)


def padded_embedding(ids: Any, weight: Any, padding: int) -> Any:
    return mint.nn.functional.embedding(ids, weight, padding_idx=padding)


def square(x: Any) -> Any:
    return x**2


sign = mint.sign


def softmax(x: Any, dim: int) -> Any:
    return mint.nn.functional.softmax(x, dim=dim)


def log_softmax(x: Any, dim: int) -> Any:
    return ops.log_softmax(x, dim)


def sum(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return x.sum() if dim is None else mint.sum(x, dim, keepdim)


def mean(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return x.mean() if dim is None else mint.mean(x, dim, keepdim)


def amax(x: Any, dim: int) -> Any:
    return ops.amax(x, dim)


def max_norm(x: Any, dim: int | None) -> Any:
    return mint.norm(x, float("inf"), dim)


def amin(x: Any, dim: int) -> Any:
    return ops.amin(x, dim)


def max(x: Any) -> Any:
    return x.max()


def min(x: Any) -> Any:
    return x.min()


EXTREMES_WITH_PLACES: dict[str, Callable[..., Any]] = {
    "mint.max": mint.max,
    "mint.min": mint.min,
    "ops.argmax": ops.argmax,
    "ops.max": ops.max,
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
    return mint.cat(list(xs), dim)


def stack(xs: Sequence[Any], dim: int) -> Any:
    return ops.stack(list(xs), dim)


def split(x: Any, size: Any, dim: int) -> Any:
    # On plain tensors the gradient of mint.split is wrong in MindSpore 2.10 if a piece is transposed twice.
    return (mint.split if isinstance(x, DTensor) else ops.split)(x, size, dim)


def chunk(x: Any, chunks: int, dim: int) -> Any:
    return mint.chunk(x, chunks, dim)


def index_select(x: Any, dim: int, index: Any) -> Any:
    return mint.index_select(x, dim, index)


def gather(x: Any, dim: int, index: Any) -> Any:
    return mint.gather(x, dim, index)


def topk(x: Any, k: int) -> Any:
    _, places = ops.topk(ops.stop_gradient(x).astype(ms.float32), k)  # topk has no kernel for double precision
    return mint.gather(x, -1, places), places


def diagonal(x: Any, offset: int, a: int, b: int) -> Any:
    return ops.diagonal(x, offset, a, b)


def as_strided(x: Any, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    raise TypeError("MindSpore has no such function")


def leaf(x: Any) -> Any:
    return ops.stop_gradient(x)


def masked_fill(x: Any, mask: Any, value: float) -> Any:
    return x.masked_fill(mask, value)


def layer_norm(x: Any, weight: Any, bias: Any, epsilon: float = 1e-5) -> Any:
    return ops.LayerNorm(-1, -1, epsilon)(x, weight, bias)[0]


def rms_norm(x: Any, weight: Any) -> Any:
    return x * mint.rsqrt(mint.mean(x * x, -1, True) + 1e-5) * weight


def cross_entropy(logits: Any, target: Any, reduction: str = "mean") -> Any:
    return ops.cross_entropy(logits, target.astype(ms.int32), reduction=reduction)


def loss(
    logits: Any, target: Any, weight: Any = None, reduction: str = "mean", smoothing: float = 0.0, ignore: int = -100
) -> Any:
    """Return cross entropy with all its options."""
    return ops.cross_entropy(logits, target, weight, ignore, reduction, smoothing)


def loss_module(**options: Any) -> nn.Cell:
    """Return cross entropy as a cell; ``options`` are keywords of the framework's class."""
    return nn.CrossEntropyLoss(**options)


def nll(log_probabilities: Any, target: Any, weight: Any = None, reduction: str = "mean") -> Any:
    return ops.nll_loss(log_probabilities, target, weight, reduction=reduction)


def logsumexp(x: Any, dim: int) -> Any:
    return ops.logsumexp(x, dim)


def dropout(x: Any, p: float) -> Any:
    return ops.dropout(x, p, True)


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a draw of the framework's ``rand`` or ``randn``."""
    return getattr(ops, name)(*shape)


def _inverse(x: np.ndarray) -> np.ndarray:
    return np.linalg.inv(x)


def _gradient_of_inverse(x: Any, y: Any, cotangent: Any) -> tuple:
    transposed = ops.transpose(y, (1, 0))
    return (-ops.matmul(ops.matmul(transposed, cotangent), transposed),)


@functools.cache
def _own_inverse() -> ops.Custom:
    return ops.Custom(
        _inverse, lambda shape: shape, lambda dtype: dtype, func_type="pyfunc", bprop=_gradient_of_inverse
    )


def unruled(x: Any) -> Any:
    """Apply a user-defined inverse, for which the library has no rule. It has a rule for MindSpore's inverse."""
    return _own_inverse()(x)


@functools.cache
def _relu_v3() -> Any:
    return ops.operations.nn_ops.ReLUV3()


def custom(x: Any) -> Any:
    """Apply a primitive that no function of MindSpore calls. A user-defined operation would not run on empty shards."""
    return _relu_v3()(x)


#: Name under which `custom` is registered.
CUSTOM = "ReLUV3"


def rand_like(x: Any) -> Any:
    return ops.rand_like(x)


def batch_norm(x: Any, mean: Any, variance: Any) -> Any:
    ones, zeros = ops.ones(mean.shape, mean.dtype), ops.zeros(mean.shape, mean.dtype)
    if isinstance(x, DTensor):
        ones, zeros = (DTensor.from_local(a, x.device_mesh) for a in (ones, zeros))
    return ops.batch_norm(x, mean, variance, ones, zeros, training=True)


#: Whether the backend gathers for `unruled_in_place` and writes the shards back; otherwise the call is an error.
WRITES_BACK = False
WRITES_THROUGH_VIEWS = False
#: `set_data` gives a plain parameter other memory: earlier aliases keep the old values.
REPLACES_MEMORY = True
BOOL = ms.bool_
#: On CPU the minimum of numbers with a NaN is not NaN. Second-order gradients through views are not supported.
FUZZ_SHARE = 100
FUZZ_LIMITS: dict[str, Any] = {
    "writes_with_gradients": False,
    "nan": False,
    "second_order": False,
    # A diagonal's own assignments change the matrix in MindSpore; its other in-place operations do not.
    "without": frozenset({"as_strided", "diagonal"}),
    # If the first softmax of a process is over one element, all later gradients are wrong.
    "shortest": 2,
    "gradients_of_nothing": False,
    "copies_offsets": True,
    "row_major": True,
    "gradient_shapes": False,
    "gradients_of_steps": False,
}
TRAINING_LIMITS: dict[str, Any] = {
    "dtypes": ("float32",),
    "without": frozenset({"cast", "empty"}),
    "writers": ("teacher", "counter", "buffer"),
    # Other methods of tensors do not change the tensor on CPU.
    "ways": ("copy", "assign", "set_data"),
    "loads": ("write", "whole", "sharded", "set_data", "load_param_into_net"),
    # Norms and gradients of embeddings have no kernels for empty tensors.
    "least": 1,
    # The other kind, `reentrant`, is refused for a submodule of a unit.
    "again": ("inside", "around"),
}
TRAINING_SHARE = 60
CHECKPOINTS = ("", "reentrant", "other")


def checkpointed(module: Any, x: Any, reentrant: bool) -> Any:
    return ms.recompute(module, x, use_reentrant=reentrant)


#: Method of writing a full value in a forward -> function of a parameter and the value.
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "assign": ops.assign,
    "set_data": lambda p, value: p.set_data(value),
}


def _load_each(module: Any, values: dict[str, tuple[Any, Any]]) -> None:
    for p, value in values.values():
        p.set_data(value)


def _load_into_net(module: Any, values: dict[str, tuple[Any, Any]]) -> None:
    state = {p.name: ms.Parameter(value, name=p.name) for p, value in values.values()}
    not_loaded, unknown = ms.load_param_into_net(module, state)
    left = [name for name in not_loaded if name in state]
    if left or unknown:
        raise ValueError(f"load_param_into_net leaves {left} out, and does not know {unknown}")


#: Method of loading -> function of a module and a dict: name -> (parameter, full value).
LOADS = {"set_data": _load_each, "load_param_into_net": _load_into_net}


def unruled_in_place(x: Any) -> Any:
    """Write into ``x`` by an operation without a sharding rule."""
    return x.index_add_(0, Tensor(np.array([0])), x[:1])


#: Operations that write into their first operand: name -> (function, whether it takes a second operand). Other
#: operations have no kernel on CPU.
IN_PLACE: dict[str, tuple[Callable[..., Any], bool]] = {
    "add_": (lambda x, y: x.add_(y), True),
    "sub_": (lambda x, y: x.sub_(y), True),
    "mul_": (lambda x, y: x.mul_(y), True),
    "copy_": (lambda x, y: x.copy_(y), True),
    "+=": (operator.iadd, True),
    "*= 2": (lambda x: operator.imul(x, 2.0), False),
    "exp_": (lambda x: x.exp_(), False),
}


def attention(q: Any, k: Any, v: Any) -> Any:
    """Return causal attention by elementary operations; k and v may have fewer heads."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = repeat_heads(k, groups), repeat_heads(v, groups)
    length = q.shape[2]
    scores = mint.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    future = Tensor(np.triu(np.ones((length, length), bool), 1))
    if isinstance(scores, DTensor):
        future = DTensor.from_local(future, scores.device_mesh)
    return mint.matmul(softmax(scores.masked_fill(future, -1e9), -1), v)


def scaled_attention(q: Any, k: Any, v: Any, mask: Any = None, is_causal: bool = False) -> Any:
    return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)


def repeat_heads(x: Any, groups: int) -> Any:
    batch, heads, length, features = x.shape
    wide = x.unsqueeze(2).expand((batch, heads, groups, length, features))
    return wide.reshape(batch, heads * groups, length, features)


def seed(value: int) -> None:
    ms.set_seed(value)
