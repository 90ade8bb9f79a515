"""Layers that draw random numbers or look up rows, composed of operations that have rules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.torch.basics.tensor import State, dispatch, handles, is_dtensor, replaces
from hyper_parallel.platform.torch.op_table import OP_TABLE, UnboundCallError
from hyper_parallel.platform.torch.op_table.binding import find
from hyper_parallel.platform.torch.op_table.nn import SKIPPING

__all__: list[str] = []

#: -scale * alpha of the activation `selu`: the value of dropped elements.
_SATURATED = 1.7580993408473766


@replaces(*find("alpha_dropout", torch, F))
def alpha_dropout(
    input: Any, p: float = 0.5, training: bool = False, inplace: bool = False, train: bool = False
) -> Any:
    """Dropout that preserves mean and variance. The noise is drawn as on a single device, with the layout of the
    input."""
    return _alpha_dropout(input, p, training or train, inplace, tuple(input.shape))


@replaces(*find("feature_alpha_dropout", torch, F))
def feature_alpha_dropout(
    input: Any, p: float = 0.5, training: bool = False, inplace: bool = False, train: bool = False
) -> Any:
    """Drop entire channels. Every rank draws the few numbers that select them."""
    shape = (*input.shape[:2], *(1,) * (input.dim() - 2))
    return _alpha_dropout(input, p, training or train, inplace, shape)


def _alpha_dropout(x: Any, p: float, training: bool, inplace: bool, shape: tuple[int, ...]) -> Any:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not training or not x.numel():
        return x
    if inplace:
        raise TypeError("alpha_dropout(inplace=True) is not supported on distributed tensors: use inplace=False")
    if p == 1:
        return x * torch.zeros_like(x)
    noise = torch.empty_like(x) if shape == tuple(x.shape) else _new_replicated(x, shape)
    noise.bernoulli_(1 - p)
    scale = 1.0 / math.sqrt((_SATURATED**2 * p + 1) * (1 - p))
    return x * (noise * scale) + ((noise - 1) * (_SATURATED * scale) + _SATURATED * scale * p)


def _new_replicated(x: Any, shape: tuple[int, ...]) -> Any:
    plain = torch.empty(shape, dtype=x.dtype, device=x.device)
    return State.core.replicated(plain, x.device_mesh)


@handles(F.rrelu, torch.rrelu)
def rrelu(func: Any, args: tuple, kwargs: dict) -> Any:
    """Apply the average slope outside training. In training the draws depend on the data, so the operands are
    gathered."""

    def slope(
        input: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, inplace: bool = False
    ) -> Any:
        if training or inplace:
            raise UnboundCallError
        return F.leaky_relu(input, (lower + upper) / 2)

    return slope(*args, **kwargs)


@handles(*find("fractional_max_pool2d fractional_max_pool3d", F))
def fractional_max_pool(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the maxima of the windows, without their indices."""
    name = f"{func.__name__.strip('_')}_with_indices"
    return fractional_max_pool_with_indices(getattr(F, name), args, kwargs)[0]


@handles(*find("fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices", F))
def fractional_max_pool_with_indices(func: Any, args: tuple, kwargs: dict) -> Any:
    """Draw window positions for all samples and channels on every rank, then run the pooling by its op-table row."""
    if kwargs.get("_random_samples") is None and len(args) < 6:
        x, dims = args[0], 2 if "2d" in func.__name__ else 3
        batch = x.shape[0] if x.dim() == dims + 2 else 1
        samples = _new_replicated(x, (batch, x.shape[-dims - 1], dims)).uniform_()
        kwargs = {**kwargs, "_random_samples": samples}
    return dispatch(OP_TABLE[func], func, args, kwargs)


@handles(F.embedding_bag)
def embedding_bag(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the reduced bags of rows.

    Bags of one size are sharded by bag; bags of different sizes only by feature. If rows of the weight are sharded and
    bags are sums or means, each rank sums its rows.
    """
    names = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("max_norm") is not None:
        raise TypeError(
            "embedding_bag(max_norm=...) changes the weight in place, which is not supported with distributed "
            "tensors: leave max_norm out"
        )
    if given.get("scale_grad_by_freq") or given.get("sparse"):
        raise UnboundCallError
    ids, weight, mode = given["input"], given["weight"], given.get("mode", "mean")
    summed = is_dtensor(weight) and any(p.is_shard(0) for p in weight.placements) and mode in ("sum", "mean")
    if summed and ids.dim() == 2 and given.get("offsets") is None:
        return _bags_of_one_size(ids, weight, mode, given.get("per_sample_weights"), given.get("padding_idx"))
    return dispatch(OP_TABLE[func], func, args, kwargs)


def _bags_of_one_size(ids: Any, weight: Any, mode: str, own_weights: Any, padding: int | None) -> Any:
    if own_weights is not None and mode == "mean":
        raise NotImplementedError("embedding_bag: per_sample_weights is only supported for mode='sum'")
    if padding is None:
        rows = F.embedding(ids, weight)
        if own_weights is not None:
            rows = rows * own_weights.unsqueeze(-1)
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    padding %= weight.shape[0]
    rows = dispatch(SKIPPING, F.embedding, (ids, weight, padding), {})
    if own_weights is not None:
        rows = rows * own_weights.masked_fill(ids == padding, 0).unsqueeze(-1)
    if mode == "sum":
        return rows.sum(1)
    counts = (ids != padding).to(weight.dtype).sum(1, keepdim=True)
    return rows.sum(1) * counts.clamp_min(1).reciprocal()  # a product keeps partial sums partial


@replaces(F.softmin)
def softmin(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """Return the softmax of ``-input``. Mirrors `torch.nn.functional.softmin`."""
    return F.softmax(-input, dim, dtype=dtype)


@handles(F.normalize)
def normalize(func: Any, args: tuple, kwargs: dict) -> Any:
    """Divide by the norm. If ``dim`` is sharded, only the norm is communicated."""

    def divided(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
        if out is not None:
            raise UnboundCallError  # `handlers.unknown` copies the result there
        return input / input.norm(p, dim, keepdim=True).clamp_min(eps)

    return divided(*args, **kwargs)
