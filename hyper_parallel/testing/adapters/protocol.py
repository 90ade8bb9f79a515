"""Protocol between the conformance suite and a framework: the names that an adapter must have.

An adapter is a module. `torch_adapter` and `mindspore_adapter` in `hyper_parallel.testing.adapters` are examples.
The forwards of models are in `forwards` there, and an adapter only calls them. A backend on torch uses torch's adapter.

"Tensor" below is a tensor of the framework, plain or distributed: every operation must accept both. The suite checks
that user code runs unchanged. So an adapter should call the functions that users call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

__all__ = ["Adapter", "missing_names"]

Tensor = Any
Module = Any
#: Names that are required only if the platform supports optimizers, or tensors without memory.
NOT_ALWAYS = frozenset({"optimizer", "clip", "SparseModel", "topk", "without_values"})


class Adapter(Protocol):
    """Attributes of an adapter, which is a module. Floating point tensors are float32 unless a check says otherwise."""

    # ---------------------------------------------------------------- differences between frameworks
    #: Number of combinations of placements that are tried for one operation, drawn at random if there are more.
    COMBINATIONS: int
    #: Dtype of class indices in the framework's losses.
    TARGET_DTYPE: Any
    #: Whether the framework's cross entropy refuses a label smoothing above 1.
    REFUSES_SMOOTHING: bool
    #: Whether the backend gathers for `unruled_in_place` and writes the shards back; otherwise the call is an error.
    WRITES_BACK: bool
    #: Whether the framework's in-place writes reach the base of a view, on every device of the backend.
    WRITES_THROUGH_VIEWS: bool
    #: Whether loading gives a plain parameter other memory, so that an earlier alias keeps the old values.
    REPLACES_MEMORY: bool
    #: The framework's dtype of booleans.
    BOOL: Any
    #: Keywords of `hyper_parallel.testing.fuzz.program.Limits`: limits of random chains of operations.
    FUZZ_LIMITS: dict[str, Any]
    #: Keywords of `hyper_parallel.testing.fuzz.training.programs.TrainingLimits`: limits of random training programs.
    #: An adapter may name further methods of writing and loading. It then has dicts of functions, ``WRITES`` and
    #: ``LOADS``.
    TRAINING_LIMITS: dict[str, Any]
    #: Numbers of random programs that the suite runs: chains of operations, and training programs.
    FUZZ_SHARE: int
    TRAINING_SHARE: int
    #: Kinds of checkpointing that random programs may use. `checkpointed(module, x, reentrant)` calls a module with
    #: checkpointing; if it is not reentrant, a function too.
    CHECKPOINTS: tuple[str, ...]
    #: The first argument of `hyper_parallel.register_sharding` for the operation `custom`.
    CUSTOM: Any
    #: Operations that write into their first operand: name -> (function, whether it takes a second operand).
    IN_PLACE: dict[str, tuple[Callable[..., Any], bool]]

    #: Functions of a tensor and a dimension that return the index of an extreme value, or the value and its index.
    EXTREMES_WITH_PLACES: dict[str, Callable[..., Any]]

    # ---------------------------------------------------------------- tensors and gradients
    def tensor(self, array: np.ndarray) -> Tensor:
        """Return a plain tensor on this rank's device with a copy of ``array``."""

    def numpy(self, x: Tensor) -> np.ndarray:
        """Return the values of a plain tensor, or the full values of a DTensor (`full_tensor`)."""

    def value_and_grads(
        self, function: Callable[..., Any], arrays: Sequence[np.ndarray]
    ) -> tuple[Any, list[np.ndarray | None]]:
        """Call ``function`` on plain tensors made of ``arrays``; it returns ``(loss, value)``.

        Returns the value, and the gradients of the loss with respect to the arguments. An unused argument has zeros as
        gradient. The gradient is None for arguments that are not floating point.
        """

    def model_value_and_grads(
        self, module: Module, function: Callable[[Any], Any], array: np.ndarray
    ) -> tuple[Any, np.ndarray | None, dict[str, Any]]:
        """Return `value_and_grads` of a function of one input, and the gradient of every parameter of ``module``.

        Gradients are by name and as the framework shows them to users, or None for a parameter without one. Earlier
        gradients are cleared first."""

    def second_order(
        self, function: Callable[..., Any], combine: Callable[..., Any], arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the gradient of ``combine(gradients)`` with respect to each argument.

        The gradients are those of ``function``, a loss of plain tensors, and ``combine`` returns a scalar.
        """

    def sgd(self, module: Module, rate: float) -> Callable[[dict[str, Any]], None]:
        """Return a function that takes a step of the framework's SGD with the gradients of `model_value_and_grads`."""

    def optimizer(self, module: Module, name: str, rate: float) -> tuple[Any, Callable[[dict[str, Any]], None]]:
        """Return one of the framework's optimizers for the trained parameters of ``module``, and a step function.

        The step function is called like that of `sgd`. Names are ``"adamw"``, with betas 0.9 and 0.95, and
        ``"momentum"``, SGD with momentum 0.9. Required if the platform knows optimizers (`Platform.is_optimizer`)."""

    def clip(self, module: Module, grads: dict[str, Any], norm: float) -> dict[str, Any]:
        """Return the gradients of `model_value_and_grads`, clipped by the framework to a total norm of at most
        ``norm``. Required if `optimizer` is."""

    def load(self, module: Module, rng: np.random.Generator, dtype: Any = np.float32) -> Module:
        """Set every parameter to 0.3 times standard normal numbers of this dtype, drawn in the order of names. Return
        the module, on this rank's device."""

    def without_values(self) -> AbstractContextManager[Any]:
        """Return a context in which modules are made without memory for parameters and buffers, if possible."""

    def freeze(self, module: Module, name: str) -> None:
        """Turn the gradient of a parameter off."""

    def call(self, module: Module, *args: Any, **kwargs: Any) -> Any:
        """Return ``module(*args, **kwargs)``."""

    def seed(self, value: int) -> None:
        """Seed the framework's default generator."""

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a draw of the framework's ``rand`` or ``randn``."""

    def rand_like(self, x: Tensor) -> Tensor:
        """Return the framework's ``rand_like``."""

    # ---------------------------------------------------------------- modules
    def linear_module(self, n_in: int, n_out: int, bias: bool = True) -> Module:
        """Return the framework's linear layer."""

    def embedding_module(self, count: int, features: int) -> Module:
        """Return the framework's embedding."""

    def norm_module(self, features: int) -> Module:
        """Return the framework's layer norm over the last dimension, with weight and bias."""

    def loss_module(self, **options: Any) -> Module:
        """Return the framework's cross entropy as a module; options are its own keywords."""

    def Mlp(self, features: int, hidden: int, bias: bool = True) -> Module:
        """Module ``down(relu(up(x)))``."""

    def Attention(self, features: int, head_dim: int) -> Module:
        """Attention without a mask, with linear layers ``wq``, ``wk``, ``wv``, ``wo`` without bias. The view infers the
        number of heads, so that the code also fits a shard."""

    def Block(self, features: int, hidden: int, head_dim: int) -> Module:
        """``norm1``, ``attention`` (`Attention`), ``norm2``, ``feed_forward`` with ``w1``, ``w2``, ``w3`` and SiLU."""

    def Tied(self, vocabulary: int, features: int) -> Module:
        """Module ``head(tanh(embedding(ids)))``, where both layers have one parameter."""

    def RmsNorm(self, features: int) -> Module:
        """`rms_norm` with a ``weight``."""

    def GroupedAttention(self, heads: int, kv_heads: int, head_dim: int, normed: bool = False) -> Module:
        """`forwards.grouped_attention`: attributes ``num_heads``, ``num_kv_heads``, ``head_dim``, ``normed``, linear
        layers ``wq``, ``wk``, ``wv``, ``wo`` without bias and, if normed, `RmsNorm` ``q_norm`` and ``k_norm``."""

    def FusedAttention(self, heads: int, kv_heads: int, head_dim: int, viewed: bool = False) -> Module:
        """`forwards.fused_attention`, or `forwards.viewed_attention`: linear layers ``wqkv`` and ``wo``."""

    def FusedGated(self, features: int, hidden: int) -> Module:
        """`forwards.fused_gated`: linear layers ``w13`` and ``w2``."""

    def Experts(self, count: int, features: int, hidden: int) -> Module:
        """`forwards.experts`: parameters ``gate_up`` (count, features, 2 * hidden), ``down`` (count, hidden,
        features)."""

    def SortedExperts(self, count: int, features: int, hidden: int) -> Module:
        """`forwards.sorted_experts`: the parameters of `Experts`, and ``num_experts``."""

    def RoutedExperts(self, count: int, features: int, hidden: int) -> Module:
        """`forwards.routed_experts`: the attributes of `SortedExperts`."""

    def Mixture(self, vocabulary: int, experts: int, features: int, hidden: int, by_index: bool) -> Module:
        """`forwards.mixture`: ``embedding``, a linear layer ``router`` without bias, and ``experts``. With ``by_index``
        these are `RoutedExperts`, else `SortedExperts`. A caller sets ``choose``."""

    def SparseModel(
        self, vocabulary: int, features: int, hidden: int, head_dim: int, experts: int, k: int, by_index: bool
    ) -> Module:
        """A language model for ids (batch, length): ``embedding``, ``layers`` and ``head``. ``layers`` is a list of two
        modules with the forward `forwards.sparse_block`. Required if `optimizer` is."""

    def CausalAttention(self, heads: int, kv_heads: int, head_dim: int) -> Module:
        """`forwards.causal_attention`: linear layers ``wq``, ``wk``, ``wv``, ``wo`` without bias, and ``head_dim``."""

    def CausalModel(self, vocabulary: int, length: int, heads: int, kv_heads: int, head_dim: int) -> Module:
        """`forwards.causal_model`: embeddings ``tokens`` and ``places``, `CausalAttention` ``attention``, and a linear
        layer ``head``."""

    def Projection(self, n_in: int, n_out: int) -> Module:
        """A class that the backend does not know as a linear layer: ``kernel`` (in, out) and ``shift`` (out,)."""

    def LinearByAnotherName(self, n_in: int, n_out: int, bias: bool = True) -> Module:
        """A subclass of the framework's linear layer."""

    def Buffered(self, features: int) -> Module:
        """``linear(x) * scale`` with a buffer ``scale`` of 1, 2, ... up to ``features``."""

    def Scaled(self, n_in: int, n_out: int) -> Module:
        """A subclass of the linear layer that is called with ``(x, scale, *, shift)``: ``y * scale + shift``."""

    def Probe(self) -> Module:
        """Module that saves the arguments of its call as ``seen = (args, kwargs)``. Returns its positional inputs."""

    # ---------------------------------------------------------------- operations
    def weighted_sum(self, y: Tensor, weights: Tensor) -> Tensor:
        """``(y * weights).sum()``."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``."""

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """Matrix product, with leading dimensions broadcast."""

    def detach(self, x: Tensor) -> Tensor:
        """Return ``x`` without its autograd history, sharing its memory."""

    def relu(self, x: Tensor) -> Tensor:
        """``max(x, 0)``."""

    def silu(self, x: Tensor) -> Tensor:
        """``x * sigmoid(x)``."""

    def gelu(self, x: Tensor) -> Tensor:
        """GELU, exact."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """Logistic function."""

    def tanh(self, x: Tensor) -> Tensor:
        """Hyperbolic tangent."""

    def exp(self, x: Tensor) -> Tensor:
        """Exponential."""

    def log(self, x: Tensor) -> Tensor:
        """Natural logarithm."""

    def square(self, x: Tensor) -> Tensor:
        """``x ** 2``."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of ``weight``."""

    def padded_embedding(self, ids: Tensor, weight: Tensor, padding: int) -> Tensor:
        """Return the embedding of DTensors, with no gradient for the row ``padding``, which may be negative."""

    def where(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """``x`` where ``condition``, else ``y``."""

    def sign(self, x: Tensor) -> Tensor:
        """-1, 0 or 1."""

    def softmax(self, x: Tensor, dim: int) -> Tensor:
        """Softmax along ``dim``."""

    def log_softmax(self, x: Tensor, dim: int) -> Tensor:
        """Logarithm of softmax along ``dim``."""

    def logsumexp(self, x: Tensor, dim: int) -> Tensor:
        """Logarithm of the sum of exponentials along ``dim``."""

    def sum(self, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        """Sum over one dimension, several or all."""

    def mean(self, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        """Mean over one dimension, several or all."""

    def amax(self, x: Tensor, dim: int) -> Tensor:
        """Largest element along ``dim``; tied elements share the gradient."""

    def amin(self, x: Tensor, dim: int) -> Tensor:
        """Smallest element along ``dim``; tied elements share the gradient."""

    def max_norm(self, x: Tensor, dim: int | None) -> Tensor:
        """Norm of infinite order along ``dim`` or of all elements; tied elements share the gradient."""

    def max(self, x: Tensor) -> Tensor:
        """Largest of all elements; tied elements share the gradient."""

    def min(self, x: Tensor) -> Tensor:
        """Smallest of all elements; tied elements share the gradient."""

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Change the shape; one size may be -1."""

    def cumsum(self, x: Tensor, dim: int) -> Tensor:
        """Cumulative sum along ``dim``."""

    def contiguous(self, x: Tensor) -> Tensor:
        """Return ``x`` itself if its memory is in row-major order, else a copy in that order."""

    def transpose(self, x: Tensor, a: int, b: int) -> Tensor:
        """Swap two dimensions."""

    def permute(self, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Reorder all dimensions."""

    def unsqueeze(self, x: Tensor, dim: int) -> Tensor:
        """Insert a dimension of size 1."""

    def expand(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Broadcast to ``shape``."""

    def cat(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        """Join along a dimension."""

    def stack(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        """Join along a new dimension."""

    def split(self, x: Tensor, size: Any, dim: int) -> Sequence[Tensor]:
        """Split into pieces of one size, or of a list of sizes."""

    def chunk(self, x: Tensor, chunks: int, dim: int) -> Sequence[Tensor]:
        """Split into ``chunks`` pieces."""

    def index_select(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        """Return the slices of ``x`` along ``dim`` at the indices in a 1-D ``index``."""

    def gather(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        """Take elements of ``x`` along ``dim`` at ``index``, which has as many dimensions as ``x``."""

    def topk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the ``k`` largest elements along the last dimension, and their indices. Required if `optimizer` is."""

    def diagonal(self, x: Tensor, offset: int, a: int, b: int) -> Tensor:
        """Return a diagonal of the dimensions ``a`` and ``b``."""

    def as_strided(self, x: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """Return a view of the memory of ``x``, for random programs; not required if ``FUZZ_LIMITS`` excludes it."""

    def leaf(self, x: Tensor) -> Tensor:
        """Return ``x`` without its autograd history; it requires gradients if tensors of the framework can."""

    def masked_fill(self, x: Tensor, mask: Tensor, value: float) -> Tensor:
        """Return ``value`` where ``mask`` is true, else ``x``."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
        """Normalize over the dimensions of ``weight``. ``epsilon`` is passed by keyword if the framework's function has
        that name."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize over the dimensions of ``weight``, with epsilon 1e-5."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention, (batch, heads, length, head_dim); ``k`` and ``v`` may have fewer heads."""

    def scaled_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Scaled dot-product attention as one operation; ``mask`` is added to the scores, or true for visible keys."""

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Dropout as in training."""

    def cross_entropy(self, logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """Cross entropy of (rows, classes) by class indices."""

    def loss(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: str = "mean",
        smoothing: float = 0.0,
        ignore: int = -100,
    ) -> Tensor:
        """Return cross entropy with all its options."""

    def nll(
        self, log_probabilities: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Negative log likelihood."""

    def unruled(self, x: Tensor) -> Tensor:
        """Apply an operation on square matrices that has no sharding rule."""

    def unruled_in_place(self, x: Tensor) -> Tensor:
        """Write into ``x`` by an operation without a sharding rule."""

    def batch_norm(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Normalisation over the first dimension as in training, which writes the running statistics."""

    def custom(self, x: Tensor) -> Tensor:
        """Apply an elementwise operation without a sharding rule. A check registers one under `CUSTOM`."""


def missing_names(adapter: Any) -> list[str]:
    """Return the required names of `Adapter` that ``adapter`` lacks, sorted."""
    names = {name for name in (*vars(Adapter), *Adapter.__annotations__) if not name.startswith("_")}
    return sorted(name for name in names - NOT_ALWAYS if not hasattr(adapter, name))
