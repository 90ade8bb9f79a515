"""Cross entropy over sharded classes as torch's compiler traces it: `ClassLosses` of core, on plain tensors.

Forward takes two all-reduces: one of the largest logits, and one of all sums. Backward takes none. Calls that this
module does not support are left to eager mode, which raises any error.
"""

from __future__ import annotations

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
    """Data for a compiled loss, made from `ClassShards`.

    Attributes:
        group, ranks, total, offset, size: see `ClassShards`.
        dim: dimension of the classes.
        shards: shards that ranks compare.
        whole: class of a replicated `Placed`.
    """

    group: str
    ranks: int
    dim: int
    total: int
    offset: int
    size: int
    shards: Shards
    whole: type


@dataclass(frozen=True)
class Options:
    """Options of ``cross_entropy``."""

    reduction: str
    ignore_index: int
    smoothing: float


@kept_on_mesh
def _found(mesh: Any, own: int, at: int, dim: int | None, vocab_size: int | None) -> Found | None:
    c = State.core.class_shards(mesh, own, dim, vocab_size)
    if c is None:
        return None
    whole = placed_class(mesh, c.ranks, None)
    return Found(c.group().group_name, c.ranks, at, c.total, c.offset, c.size, Shards(c.compare), whole)


def _find(number: int, own: int, at: int, dim: int | None, vocab_size: int | None) -> Found | None:
    """Return the `Found` for local logits with ``own`` classes on this rank. Return None for a loss left to eager mode.

    Args:
        number: ``id()`` of the mesh.
        own: number of classes of this rank.
        at: dimension of the classes.
        dim, vocab_size: arguments of the loss.
    """
    mesh = State.core.mesh_with_id(number)
    found: Found | None = None if mesh is None else _found(mesh, own, at, dim, vocab_size)
    return found


def _is_loss_parallel() -> bool:
    return State.core.is_loss_parallel() or in_loss_parallel()


# Same mark as `torch.compiler.assume_constant_result`, which would import the compiler: called while it traces.
_find._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_loss_parallel._dynamo_marked_constant = True  # type: ignore[attr-defined]


def trace_losses() -> None:
    """Let torch's compiler, which is already imported, trace ``vocab_parallel_cross_entropy``."""
    Traced.losses = State.core.class_losses(TracedVerbs, _largest, _sums)
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
            found = _find(id(mesh), local_logits.shape[at], at, dim, vocab_size)
            if found is not None:
                x = mark(local_logits, found.shards.key, "vocab_parallel_cross_entropy")
                y = loss_of_classes(x, target, weight, found, options)
                if y is not None:
                    return y
        more = {"dim": dim, "vocab_size": vocab_size, "weight": weight, "ignore_index": ignore_index}
        more = {**more, "reduction": reduction, "label_smoothing": label_smoothing}
        Outside.say("vocab_parallel_cross_entropy with these arguments")
        return Outside.leave(original, (local_logits, target, mesh), more)

    return traced


def _fits(x: Any, target: Any, weight: Any, options: Options) -> bool:
    """Return whether the operands are plain tensors of supported dtypes, and the options are valid."""
    dtensor = State.tensor_class.__bases__[0]
    for one in (x, target) if weight is None else (x, target, weight):
        if not isinstance(one, Tensor) or isinstance(one, dtensor):
            return False
    if not x.is_floating_point() or x.ndim == 0 or x.numel() == 0:
        return False
    return options.reduction in _REDUCTIONS and 0.0 <= options.smoothing <= 1.0


class TracedVerbs:
    """The `LocalVerbs` that losses call, each in a form that the compiler can differentiate."""

    narrow, masked_fill, to_dtype = map(staticmethod, (Tensor.narrow, Tensor.masked_fill, Tensor.to))
    log, unsqueeze = map(staticmethod, (Tensor.log, Tensor.unsqueeze))

    @staticmethod
    def shape_of(x: Tensor) -> tuple[int, ...]:
        return x.shape

    @staticmethod
    def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_zeros(shape)

    @staticmethod
    def ones(shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_ones(shape)

    @staticmethod
    def sum_along(x: Tensor, dim: int) -> Tensor:
        return x.sum(dim, keepdim=True)

    @staticmethod
    def shifted_exp(x: Tensor, shift: Tensor) -> Tensor:
        return (x - shift).exp()

    @staticmethod
    def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
        return x.gather(dim, index)


class Traced:
    """The losses of core as the compiler traces them. `trace_losses` sets them."""

    losses: Any = None


def _largest(x: Tensor, classes: Found) -> Tensor:
    return largest_of(x.detach().amax(classes.dim, keepdim=True), classes.ranks, classes.group)


def _sums(parts: list[Tensor], classes: Found) -> list[Tensor]:
    if classes.ranks == 1:
        return parts
    return list(sum_up(torch.stack(parts), classes.group).unbind(0))


def loss_of_classes(x: Tensor, target: Tensor, weight: Tensor | None, classes: Found, options: Options) -> Any:
    """Return the cross entropy of plain local logits, or None for unsupported operands.

    Args:
        x, target: local logits, and the target: class indices, or this rank's shard of the probabilities.
        weight: weights of all classes.
        classes: this rank's classes.
        options: options of ``cross_entropy``.
    """
    losses, dim, smoothing = Traced.losses, classes.dim, options.smoothing
    probabilities, samples = target.is_floating_point(), (*x.shape[:dim], *x.shape[dim + 1 :])
    if tuple(target.shape) != (tuple(x.shape) if probabilities else samples):
        return None
    if weight is not None and (tuple(weight.shape) != (classes.total,) or weight.requires_grad):
        return None
    z = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if probabilities:
        _, _, _, loss = losses.of_probabilities(z, target, weight, classes, smoothing, whole_weight=True)
        count = loss.numel()
    else:
        target = target.long()
        masks = losses.masks(target, classes, options.ignore_index)
        found = losses.of_classes(z, target, masks, weight, classes, smoothing, whole_weight=True)
        loss, count = found.loss, found.weights.sum()
    return losses.reduced(loss.reshape(samples), options.reduction, count).to(x.dtype)


def _nll(x: Tensor, target: Tensor, weight: Tensor | None, classes: Found, options: Options) -> Any:
    """Return the loss of log-probabilities, or None for unsupported operands."""
    losses, dim = Traced.losses, classes.dim
    if tuple(target.shape) != (*x.shape[:dim], *x.shape[dim + 1 :]) or target.is_floating_point():
        return None
    if weight is not None and (tuple(weight.shape) != (classes.total,) or weight.requires_grad):
        return None
    each, shape, target = options.reduction == "none", target.shape, target.long()
    masks = losses.masks(target, classes, options.ignore_index)
    loss, weights = losses.nll(x, target, masks, weight, classes, whole_weight=True)
    # Reduced over samples before the all-reduce, so that only one number is sent.
    (loss,) = _sums([loss.reshape(shape) if each else loss.sum()], classes)
    return loss / weights.sum() if options.reduction == "mean" else loss


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
    found = _find(id(mesh), x.shape[dim], dim, None, None)
    if found is None:
        return None
    loss = (_nll if nll else loss_of_classes)(x, target, weight, found, options)
    return None if loss is None else loss.as_subclass(found.whole)
