"""Cross entropy over sharded classes as torch's compiler traces it: the computation of `vocab_parallel` in core.

Forward takes two all-reduces: one of the largest logits, and one of all sums. Backward takes none. Calls that do not
fit are left to eager mode, which raises the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.basics.private import in_loss_parallel
from hyper_parallel.platform.torch.basics.tensor import State
from hyper_parallel.platform.torch.compiled.comparisons import Shards, mark
from hyper_parallel.platform.torch.compiled.functions import largest_of, sum_up
from hyper_parallel.platform.torch.compiled.placed import Outside, kept_on_mesh, placed_class

__all__ = ["loss_of_classes", "loss_of_placed", "trace_losses"]

_KNOWN: set[Callable[..., Any]] = set()
_REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class Found:
    """The facts of `ClassShards`, the shards that ranks compare, and the class of a replicated `Placed`."""

    group: str
    size: int
    total: int
    first: int
    count: int
    shards: Shards
    whole: type


@dataclass(frozen=True)
class Options:
    """Options of ``cross_entropy``."""

    reduction: str
    ignore_index: int
    smoothing: float


@kept_on_mesh
def _found(mesh: Any, own: int, dim: int | None, vocab_size: int | None) -> Found | None:
    c = State.core.class_shards(mesh, own, dim, vocab_size)
    if c is None:
        return None
    whole = placed_class(mesh, c.size, None)
    return Found(c.group().group_name, c.size, c.total, c.first, c.count, Shards(c.compare), whole)


def _find(number: int, own: int, dim: int | None, vocab_size: int | None) -> Found | None:
    """Return the `Found` for local logits with ``own`` classes on this rank. Return None for a loss left to eager mode.
    ``number`` is the ``id()`` of the mesh."""
    mesh = State.core.mesh_with_id(number)
    found: Found | None = None if mesh is None else _found(mesh, own, dim, vocab_size)
    return found


def _is_loss_parallel() -> bool:
    return State.core.is_loss_parallel() or in_loss_parallel()


# Same mark as `torch.compiler.assume_constant_result`, which would import the compiler: called while it traces.
_find._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_loss_parallel._dynamo_marked_constant = True  # type: ignore[attr-defined]


def trace_losses() -> None:
    """Let torch's compiler, which is already imported, trace ``vocab_parallel_cross_entropy``."""
    State.core.watch_losses_of_shards(_trace)


def _trace(original: Callable[..., Any]) -> None:
    if original not in _KNOWN:
        _KNOWN.add(original)
        torch.compiler.substitute_in_graph(original)(_traced(original))


def _traced(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that the compiler traces in place of ``original``, with the same arguments."""

    def traced(
        local_logits: Any, target: Any, mesh: Any, *, dim: Any = None, vocab_size: Any = None, weight: Any = None,
        ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Any:  # fmt: skip
        options = Options(reduction, ignore_index, label_smoothing)
        if _fits(local_logits, target, weight, options) and (
            dim is None or -local_logits.ndim <= dim < local_logits.ndim
        ):
            at = min(1, local_logits.ndim - 1) if dim is None else dim % local_logits.ndim
            found = _find(id(mesh), local_logits.shape[at], dim, vocab_size)
            if found is not None:
                x = mark(local_logits, found.shards.key, "vocab_parallel_cross_entropy")
                y = loss_of_classes(x, target, weight, at, found, options)
                if y is not None:
                    return y
        more = {"dim": dim, "vocab_size": vocab_size, "weight": weight, "ignore_index": ignore_index}
        more = {**more, "reduction": reduction, "label_smoothing": label_smoothing}
        Outside.say("vocab_parallel_cross_entropy with these arguments")
        return Outside.leave(original, (local_logits, target, mesh), more)

    return traced


def _fits(x: Any, target: Any, weight: Any, options: Options) -> bool:
    """Return whether the operands are plain tensors of fitting dtypes, and the options valid."""
    dtensor = State.tensor_class.__bases__[0]
    for one in (x, target) if weight is None else (x, target, weight):
        if not isinstance(one, Tensor) or isinstance(one, dtensor):
            return False
    if not x.is_floating_point() or x.ndim == 0 or x.numel() == 0:
        return False
    return options.reduction in _REDUCTIONS and 0.0 <= options.smoothing <= 1.0


def loss_of_classes(
    x: Tensor, target: Tensor, weight: Tensor | None, dim: int, classes: Found, options: Options
) -> Tensor | None:
    """Return the cross entropy of plain local logits, or None where the operands do not fit.

    Args:
        x, target: local logits, and the target: class indices, or this rank's shard of the probabilities.
        weight: weights of all classes.
        dim: dimension of the classes.
        classes: this rank's classes.
        options: options of ``cross_entropy``.
    """
    probabilities, smoothing, total = target.is_floating_point(), options.smoothing, classes.total
    samples = (*x.shape[:dim], *x.shape[dim + 1 :])
    if tuple(target.shape) != (tuple(x.shape) if probabilities else samples):
        return None
    if weight is not None and (tuple(weight.shape) != (total,) or (weight.requires_grad and not probabilities)):
        return None
    z = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    weight = None if weight is None else weight.to(z.dtype)
    z = z - largest_of(z.detach().amax(dim, keepdim=True), classes.size, classes.group)
    exponentials = z.exp().sum(dim)
    if probabilities:
        soft = target.to(z.dtype)
        if smoothing:
            soft = soft * (1.0 - smoothing) + smoothing / total
        if weight is not None:
            soft = soft * _beside(weight.narrow(0, classes.first, classes.count), z, dim)
        parts = [exponentials, (soft * z).sum(dim), soft.sum(dim)]
        exponentials, dot, mass = _sums(parts, classes)
        loss = mass * exponentials.log() - dot
        return _reduced(loss, options.reduction, loss.numel()).to(x.dtype)
    rows, elsewhere = _rows(target, classes)
    logit = z.gather(dim, rows.unsqueeze(dim)).squeeze(dim).masked_fill(elsewhere, 0.0)
    parts = [exponentials, logit]
    if smoothing:
        own = None if weight is None else _beside(weight.narrow(0, classes.first, classes.count), z, dim)
        parts.append((z if own is None else z * own).sum(dim))
    exponentials, logit, *of_all = _sums(parts, classes)
    log_sum = exponentials.log()
    ignored, wrong = _checked(target, total, options.ignore_index)
    weights = _weights(target, weight, ignored | wrong, z)
    loss = weights * (1.0 - smoothing) * (log_sum - logit)
    if smoothing:
        mass = float(total) if weight is None else weight.sum()
        loss = loss + (log_sum * mass - of_all[0]) * (smoothing / total)
    loss = loss.masked_fill(ignored, 0.0).masked_fill(wrong, math.nan)
    return _reduced(loss, options.reduction, weights.masked_fill(ignored, 0.0).sum()).to(x.dtype)


def _nll(x: Tensor, target: Tensor, weight: Tensor | None, dim: int, classes: Found, options: Options) -> Any:
    """Return the loss of log-probabilities, or None where the operands do not fit."""
    if tuple(target.shape) != (*x.shape[:dim], *x.shape[dim + 1 :]) or target.is_floating_point():
        return None
    if weight is not None and (tuple(weight.shape) != (classes.total,) or weight.requires_grad):
        return None
    rows, elsewhere = _rows(target, classes)
    ignored, wrong = _checked(target, classes.total, options.ignore_index)
    weights = _weights(target, None if weight is None else weight.to(x.dtype), ignored | wrong, x)
    loss = -x.gather(dim, rows.unsqueeze(dim)).squeeze(dim).masked_fill(elsewhere, 0.0) * weights
    loss = loss.masked_fill(ignored, 0.0).masked_fill(wrong, math.nan)
    # Reduced over samples before the all-reduce, so that only one number is sent.
    each = options.reduction == "none"
    (loss,) = _sums([loss if each else loss.sum()], classes)
    return loss / weights.masked_fill(ignored, 0.0).sum() if options.reduction == "mean" else loss


def _sums(parts: list[Tensor], classes: Found) -> list[Tensor]:
    if classes.size == 1:
        return parts
    return list(sum_up(torch.stack(parts), classes.group).unbind(0))


def _rows(target: Tensor, classes: Found) -> tuple[Tensor, Tensor]:
    """Return the targets as indices into this rank's classes, and a mask of the targets on other ranks. Masked targets
    have index 0."""
    rows = target.long() - classes.first
    elsewhere = (rows < 0) | (rows >= classes.count)
    return rows.masked_fill(elsewhere, 0), elsewhere


def _checked(target: Tensor, total: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return a mask of ignored samples, and a mask of samples whose target is not a class."""
    ignored = target == ignore_index
    return ignored, ((target < 0) | (target >= total)) & ~ignored


def _weights(target: Tensor, weight: Tensor | None, without: Tensor, like: Tensor) -> Tensor:
    """Return the weight of each sample. Samples masked by ``without`` get an arbitrary weight."""
    if weight is None:
        return torch.ones_like(target, dtype=like.dtype)
    return weight[target.long().masked_fill(without, 0)]


def _beside(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    return weight.view([-1 if d == dim else 1 for d in range(x.ndim)])


def _reduced(loss: Tensor, reduction: str, count: Any) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / count


# ----------------------------------------------------------------------------------- losses of distributed logits
def loss_of_placed(nll: bool, args: tuple, kwargs: dict) -> Any:
    """Return ``cross_entropy`` or ``nll_loss`` of a `Placed` with sharded classes inside `loss_parallel`. Returns
    None for a call left to eager mode."""
    return _of_placed(nll, *args, **kwargs)


def _of_placed(
    nll: bool, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    dtensor = State.tensor_class.__bases__[0]
    if size_average is not None or reduce is not None or not isinstance(input, dtensor) or not _is_loss_parallel():
        return None
    mesh, dim = input.placed_on, min(1, input.ndim - 1)
    if mesh is None or input.gathers is not None or input.placed_cut != dim:
        return None
    x, options = input.to_local(), Options(reduction, ignore_index, label_smoothing)
    if not _fits(x, target, weight, options):
        return None
    found = _find(id(mesh), x.shape[dim], None, None)
    if found is None:
        return None
    loss = (_nll if nll else loss_of_classes)(x, target, weight, dim, found, options)
    return None if loss is None else loss.as_subclass(found.whole)
