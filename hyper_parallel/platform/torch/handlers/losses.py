"""Losses that are no sum over elements, composed of operations that have rules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.basics.tensor import State, dispatch, handles, replaces
from hyper_parallel.platform.torch.handlers.bodies import body_of
from hyper_parallel.platform.torch.op_table import OP_TABLE, UnboundCallError

__all__: list[str] = []


def _reduced(losses: Any, reduction: str, size_average: Any = None, reduce: Any = None) -> Any:
    if size_average is not None or reduce is not None:
        raise UnboundCallError  # deprecated spellings of the reduction
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


@replaces(F.margin_ranking_loss)
def margin_ranking_loss(
    input1: Any,
    input2: Any,
    target: Any,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Return how far the order of two inputs violates the target. Mirrors `torch.nn.functional.margin_ranking_loss`."""
    if not input1.dim() == input2.dim() == target.dim():
        raise RuntimeError(
            "margin_ranking_loss : All input tensors should have same dimension but got sizes: "
            f"input1: {input1.size()}, input2: {input2.size()}, target: {target.size()} "
        )
    return _reduced((-target * (input1 - input2) + margin).clamp_min(0), reduction, size_average, reduce)


@replaces(F.cosine_embedding_loss)
def cosine_embedding_loss(
    input1: Any,
    input2: Any,
    target: Any,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Return a loss of the angle between vectors. The target says whether they should be similar. Mirrors
    `torch.nn.functional.cosine_embedding_loss`."""
    if target.dim() > 1 or not input1.dim() == input2.dim() == target.dim() + 1:
        raise UnboundCallError  # torch raises the error
    tiny, dim = 1e-12, target.dim()
    lengths = ((input1 * input1).sum(dim) + tiny) * ((input2 * input2).sum(dim) + tiny)
    cosine = (input1 * input2).sum(dim) / lengths.sqrt()
    zero = torch.zeros_like(cosine)
    together = torch.where(target == 1, 1 - cosine, zero)
    apart = torch.where(target == -1, (cosine - margin).clamp_min(0), zero)
    return _reduced(together + apart, reduction, size_average, reduce)


@replaces(torch.pairwise_distance)
def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    """Return the norm of the difference along the last dimension. Mirrors `torch.pairwise_distance`."""
    return (x1 - x2 + eps).norm(p, -1, keepdim)


@replaces(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Return by how much the negative example violates the margin. Mirrors
    `torch.nn.functional.triplet_margin_loss`."""
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    if not anchor.dim() == positive.dim() == negative.dim():
        raise UnboundCallError  # torch raises the error
    near, far = pairwise_distance(anchor, positive, p, eps), pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp_min(0), reduction, size_average, reduce)


@replaces(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """Return the negative log density of normal distributions. One all-reduced number shows whether a variance is
    negative."""
    negative = var < 0 if isinstance(var, (int, float)) else (var < 0).any().full_tensor().item()
    if negative:
        raise ValueError("var has negative entry/entries")
    if isinstance(var, (int, float)):
        var = var * torch.ones_like(input)
    if var.size() != input.size():
        if input.size()[:-1] == var.size():
            var = var.unsqueeze(-1)
        elif input.dim() != var.dim() or sum(m for n, m in zip(input.size(), var.size(), strict=True) if n != m) != 1:
            raise ValueError("var is of incorrect size")
    # Clamped without a gradient of the clamp, as in torch.
    var = var + (var.detach().clamp_min(eps) - var.detach())
    losses = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


@handles(F.multi_margin_loss, F.multilabel_margin_loss)
def margin_loss(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute the loss of each sample, then reduce. All classes of a sample are on one rank."""
    how = {name: value for name, value in kwargs.items() if name in ("reduction", "size_average", "reduce")}
    rest = {name: value for name, value in kwargs.items() if name not in how}
    return _reduced(dispatch(OP_TABLE[func], func, args, rest), how.pop("reduction", "mean"), **how)


@handles(F.linear_cross_entropy)
def linear_cross_entropy(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute the product, then the loss. The classes of the logits are sharded like the weight.

    Options for computing in chunks are dropped, because chunks need all classes.
    """
    return body_of(func)(*args, **{name: value for name, value in kwargs.items() if name != "options"})


#: The loss of each sample.
_CTC = NativeOp(
    "labelled",
    lambda func, args, kwargs: (args[:4], (".n.,n.,n,n->n", ((args[0].shape[1],),), 0, *args[4:])),
    lambda func, xs, static_args: func(*xs, static_args[3], "none", static_args[4]),
)


@handles(F.ctc_loss)
def ctc_loss(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute the loss of each rank's samples, with targets padded to one length, then reduce."""

    def run(
        log_probs: Any,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Any:
        if log_probs.dim() != 3 or targets.dim() != 2:
            raise UnboundCallError
        lengths = [_as_tensor(x, targets) for x in (input_lengths, target_lengths)]
        losses = dispatch(_CTC, func, (log_probs, targets, *lengths, blank, zero_infinity), {})
        if reduction == "mean":
            losses = losses / lengths[1].clamp_min(1).to(losses.dtype)
        return _reduced(losses, reduction)

    return run(*args, **kwargs)


def _as_tensor(lengths: Any, like: Any) -> Any:
    if isinstance(lengths, Tensor):
        return lengths
    return State.core.replicated(torch.tensor(lengths, device=like.device), like.device_mesh)
