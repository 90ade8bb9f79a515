"""Protocol that the conformance suite asks of a framework: the names of an adapter.

An adapter is a module. `torch_adapter` and `mindspore_adapter` in `hyper_parallel.testing.adapters` are the two to
learn from. The computations of models are in `forwards` there and need no repeating. A backend of torch shares torch's
adapter.

"Tensor" below is a tensor of the framework, plain or distributed: every operation gets both. Operations come in the
framework's own words: the suite checks that a user's code runs unchanged, so call the functions that users call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

__all__ = ["Adapter", "missing_names"]

Tensor = Any
Module = Any
#: Names that are asked for where the platform knows optimizers, or tensors without values.
NOT_ALWAYS = frozenset({"optimizer", "clip", "SparseModel", "topk", "without_values"})


class Adapter(Protocol):
    """The attributes of a module that is an adapter. Floating point tensors are float32 unless a check says
    otherwise."""

    # ---------------------------------------------------------------- differences between frameworks
    #: How many combinations of placements are tried for one operation, drawn at random when there are more.
    COMBINATIONS: int
    #: Dtype of class indices in the framework's losses.
    TARGET_DTYPE: Any
    #: Whether the framework's own cross entropy refuses a label smoothing above 1.
    REFUSES_SMOOTHING: bool
    #: Whether the backend gathers for `unruled_in_place` and writes the parts back; otherwise it is an error.
    WRITES_BACK: bool
    #: Whether the framework's own writes in place reach the base of a view, on every device of the backend.
    WRITES_THROUGH_VIEWS: bool
    #: Whether loading gives a plain parameter other memory, so that an earlier alias keeps the old values.
    REPLACES_MEMORY: bool
    #: The framework's dtype of booleans.
    BOOL: Any
    #: Keywords of `hyper_parallel.testing.fuzz.program.Limits`: the allowed contents of random programs.
    FUZZ_LIMITS: dict[str, Any]
    #: Keywords of `hyper_parallel.testing.fuzz.training.programs.TrainingLimits`: the same of those of trainers.
    #: Further ways to write and to load that it names are in dicts of functions, ``WRITES`` and ``LOADS``. Adapters
    #: without such ways lack these.
    TRAINING_LIMITS: dict[str, Any]
    #: How many random programs the suite runs: chains of operations, and trainers.
    FUZZ_SHARE: int
    TRAINING_SHARE: int
    #: Kinds of checkpointing that random programs may use; `checkpointed(module, x, reentrant)` calls a module so,
    #: and a function too where it is not reentrant.
    CHECKPOINTS: tuple[str, ...]
    #: The first argument of `hyper_parallel.register_sharding` for the operation `custom`.
    CUSTOM: Any
    #: Operations that write into their first operand: name -> (function, whether it takes a second operand).
    IN_PLACE: dict[str, tuple[Callable[..., Any], bool]]

    #: Functions of a tensor and a dimension that give the place of an extreme value, or the value and its place.
    EXTREMES_WITH_PLACES: dict[str, Callable[..., Any]]

    # ---------------------------------------------------------------- tensors and gradients
    def tensor(self, array: np.ndarray) -> Tensor:
        """A plain tensor on this rank's device with a copy of ``array``."""

    def numpy(self, x: Tensor) -> np.ndarray:
        """The values of a plain tensor; of a DTensor, the whole of it (`full_tensor`)."""

    def value_and_grads(
        self, function: Callable[..., Any], arrays: Sequence[np.ndarray]
    ) -> tuple[Any, list[np.ndarray | None]]:
        """``function`` of plain tensors made of ``arrays`` gives ``(loss, value)``. Returns that value, and the loss's
        gradient by each floating point argument. The gradient is zeros where there is none, and None for arguments of
        other dtypes."""

    def model_value_and_grads(
        self, module: Module, function: Callable[[Any], Any], array: np.ndarray
    ) -> tuple[Any, np.ndarray | None, dict[str, Any]]:
        """`value_and_grads` of a function of one input. It also gives the gradient of every parameter of ``module`` by
        name as the framework gives it to a user. That is None where there is none. Starts from no gradients."""

    def second_order(
        self, function: Callable[..., Any], combine: Callable[..., Any], arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """``function`` of plain tensors gives a loss, ``combine`` of its gradients a scalar: the gradient of that
        scalar by each argument."""

    def sgd(self, module: Module, rate: float) -> Callable[[dict[str, Any]], None]:
        """A function that takes one step of the framework's SGD, given the gradients of `model_value_and_grads`."""

    def optimizer(self, module: Module, name: str, rate: float) -> tuple[Any, Callable[[dict[str, Any]], None]]:
        """One of the framework's optimizers for the trained parameters of ``module``, and a function that takes a step.
        The function is as that of `sgd`. Names are ``"adamw"``, with betas 0.9 and 0.95, and ``"momentum"``, SGD with
        momentum 0.9. Asked for where the platform knows optimizers (`Platform.is_optimizer`)."""

    def clip(self, module: Module, grads: dict[str, Any], norm: float) -> dict[str, Any]:
        """The gradients of `model_value_and_grads`, clipped by the framework so that the norm of all is ``norm`` at
        most. Asked for where `optimizer` is."""

    def load(self, module: Module, rng: np.random.Generator, dtype: Any = np.float32) -> Module:
        """Give every parameter 0.3 times standard normal numbers, drawn in the order of names, and this floating point
        dtype. Returns the module, on this rank's device."""

    def without_values(self) -> AbstractContextManager[Any]:
        """Inside, modules are made without memory for their parameters and buffers, where the framework can do that."""

    def freeze(self, module: Module, name: str) -> None:
        """Switch the gradient of a parameter off."""

    def call(self, module: Module, *args: Any, **kwargs: Any) -> Any:
        """``module(*args, **kwargs)``."""

    def seed(self, value: int) -> None:
        """Seed the framework's default generator."""

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The framework's ``rand`` or ``randn``."""

    def rand_like(self, x: Tensor) -> Tensor:
        """The framework's ``rand_like``."""

    # ---------------------------------------------------------------- modules
    def linear_module(self, n_in: int, n_out: int, bias: bool = True) -> Module:
        """The framework's linear layer."""

    def embedding_module(self, count: int, features: int) -> Module:
        """The framework's embedding."""

    def norm_module(self, features: int) -> Module:
        """The framework's layer norm over the last dimension, with weight and bias."""

    def loss_module(self, **options: Any) -> Module:
        """The framework's cross entropy as a module; options in its own words."""

    def Mlp(self, features: int, hidden: int, bias: bool = True) -> Module:
        """``down(relu(up(x)))``."""

    def Attention(self, features: int, head_dim: int) -> Module:
        """Attention without a mask, with linear layers ``wq``, ``wk``, ``wv``, ``wo`` without bias. The number of heads
        is left to the view, so that it is right on this rank's part."""

    def Block(self, features: int, hidden: int, head_dim: int) -> Module:
        """``norm1``, ``attention`` (`Attention`), ``norm2``, ``feed_forward`` with ``w1``, ``w2``, ``w3`` and SiLU."""

    def Tied(self, vocabulary: int, features: int) -> Module:
        """``head(tanh(embedding(ids)))``, where both have one parameter."""

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
        """`forwards.routed_experts`: the same."""

    def Mixture(self, vocabulary: int, experts: int, features: int, hidden: int, by_index: bool) -> Module:
        """`forwards.mixture`: ``embedding``, a linear layer ``router`` without bias, and ``experts``, which are
        `RoutedExperts` with ``by_index`` and else `SortedExperts`. A caller sets ``choose``."""

    def SparseModel(
        self, vocabulary: int, features: int, hidden: int, head_dim: int, experts: int, k: int, by_index: bool
    ) -> Module:
        """A language model for ids (batch, length): ``embedding``, a list ``layers`` of two modules with the forward
        `forwards.sparse_block`, and ``head``. Asked for where `optimizer` is."""

    def CausalAttention(self, heads: int, kv_heads: int, head_dim: int) -> Module:
        """`forwards.causal_attention`: linear layers ``wq``, ``wk``, ``wv``, ``wo`` without bias, and ``head_dim``."""

    def CausalModel(self, vocabulary: int, length: int, heads: int, kv_heads: int, head_dim: int) -> Module:
        """`forwards.causal_model`: embeddings ``tokens`` and ``places``, `CausalAttention` ``attention``, and a linear
        layer ``head``."""

    def Projection(self, n_in: int, n_out: int) -> Module:
        """A class that is no linear layer to the backend: parameters ``kernel`` (in, out) and ``shift`` (out,)."""

    def LinearByAnotherName(self, n_in: int, n_out: int, bias: bool = True) -> Module:
        """A subclass of the framework's linear layer."""

    def Buffered(self, features: int) -> Module:
        """``linear(x) * scale`` with a buffer ``scale`` of 1, 2, ... up to ``features``."""

    def Scaled(self, n_in: int, n_out: int) -> Module:
        """A subclass of the linear layer that is called ``(x, scale, *, shift)`` and gives ``y * scale + shift``."""

    def Probe(self) -> Module:
        """Keeps the arguments of its call as ``seen = (args, kwargs)``; returns its positional inputs."""

    # ---------------------------------------------------------------- operations
    def weighted_sum(self, y: Tensor, weights: Tensor) -> Tensor:
        """``(y * weights).sum()``."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``."""

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """Matrix product, with leading dimensions broadcast."""

    def detach(self, x: Tensor) -> Tensor:
        """``x`` without its history; its memory is shared."""

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
        """The same, of DTensors, with no gradient for the row ``padding``, which may be negative."""

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
        """Largest along ``dim``; elements that tie share its gradient."""

    def amin(self, x: Tensor, dim: int) -> Tensor:
        """Smallest along ``dim``, as `amax`."""

    def max(self, x: Tensor) -> Tensor:
        """Largest of all, as `amax`."""

    def min(self, x: Tensor) -> Tensor:
        """Smallest of all, as `amax`."""

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Change the shape, with one -1 at most."""

    def cumsum(self, x: Tensor, dim: int) -> Tensor:
        """Sums of all elements so far along ``dim``."""

    def contiguous(self, x: Tensor) -> Tensor:
        """``x`` itself if it lies in memory in row-major order, else a copy that does."""

    def transpose(self, x: Tensor, a: int, b: int) -> Tensor:
        """Swap two dimensions."""

    def permute(self, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Reorder all dimensions."""

    def unsqueeze(self, x: Tensor, dim: int) -> Tensor:
        """A new dimension of size 1."""

    def expand(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Broadcast to ``shape``."""

    def cat(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        """Join along a dimension."""

    def stack(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        """Join along a new dimension."""

    def split(self, x: Tensor, size: Any, dim: int) -> Sequence[Tensor]:
        """Pieces of one size, or of a list of sizes."""

    def chunk(self, x: Tensor, chunks: int, dim: int) -> Sequence[Tensor]:
        """Cut ``x`` into so many pieces."""

    def index_select(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        """The slices of ``x`` along ``dim`` that a 1-D ``index`` names."""

    def gather(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        """Take elements of ``x`` along ``dim`` at ``index``, which has as many dimensions as ``x``."""

    def topk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` largest along the last dimension, and their places. Asked for where `optimizer` is."""

    def diagonal(self, x: Tensor, offset: int, a: int, b: int) -> Tensor:
        """A diagonal of the dimensions ``a`` and ``b``."""

    def as_strided(self, x: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """A view of the memory of ``x``; for random programs, where ``FUZZ_LIMITS`` does not leave it out."""

    def leaf(self, x: Tensor) -> Tensor:
        """``x`` without its history, requiring gradients where a tensor can."""

    def masked_fill(self, x: Tensor, mask: Tensor, value: float) -> Tensor:
        """``value`` where ``mask``, else ``x``."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
        """Normalize over the dimensions of ``weight``; ``epsilon`` is passed by keyword where the framework's function
        has that name."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize over the dimensions of ``weight``, with epsilon 1e-5."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention, (batch, heads, length, head_dim); ``k`` and ``v`` may have fewer heads."""

    def scaled_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Scaled dot-product attention as one operation; ``mask`` is added to the scores."""

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
        """Cross entropy with all its options."""

    def nll(
        self, log_probabilities: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Negative log likelihood."""

    def unruled(self, x: Tensor) -> Tensor:
        """An operation on square matrices that has no sharding rule."""

    def unruled_in_place(self, x: Tensor) -> Tensor:
        """An operation without a sharding rule that writes into ``x``."""

    def batch_norm(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Normalisation over the first dimension as in training, which writes the running statistics."""

    def custom(self, x: Tensor) -> Tensor:
        """An element-wise operation without a sharding rule, which a check registers under `CUSTOM`."""


def missing_names(adapter: Any) -> list[str]:
    """The names of `Adapter` that ``adapter`` does not have and has to have, sorted."""
    names = {name for name in (*vars(Adapter), *Adapter.__annotations__) if not name.startswith("_")}
    return sorted(name for name in names - NOT_ALWAYS if not hasattr(adapter, name))
