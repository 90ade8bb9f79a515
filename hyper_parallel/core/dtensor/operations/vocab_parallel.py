"""Softmax and cross entropy of tensors whose classes are sharded: the logits are never gathered.

Written by hand, as in Megatron: what all ranks need of the logits of a sample is their largest one, the sum of their
exponentials and the logit of the target. Three numbers a sample, in two all-reduces, because all sums travel together.
Backward of cross entropy needs nothing else; that of softmax and log_softmax sums once over the classes.

Statistics are computed outside autograd, in float32 for narrower logits. What is saved for backward is the logits
themselves, which their producer has anyway, and a few numbers a sample; probabilities are computed again. Backward is
made of functions like these and of steps of `transitions`, so gradients of gradients are right.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; Micikevicius et al. 2018 for the float32 sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.communication import collectives
from hyper_parallel.core.dtensor.communication.transitions import identity_reduce_grad, summation

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
    from hyper_parallel.core.dtensor.layouts.layout import Layout
    from hyper_parallel.platform.contract import Platform

__all__ = ["Classes", "ClassStatistics", "VocabParallel", "vocab_parallel_of"]


@dataclass(frozen=True)
class Classes:
    """The sharded class dimension of a tensor, as this rank sees it.

    Attributes:
        mesh: the mesh.
        mesh_dims: its dimensions that shard the classes.
        dim: the tensor dimension.
        total: the number of classes.
        offset: the first class of this rank.
        size: how many this rank has; may be 0.
        sample_count: how many samples this rank has; may be 0.
    """

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    dim: int
    total: int
    offset: int
    size: int
    sample_count: int

    @staticmethod
    def of(layout: Layout, dim: int) -> Classes | None:
        """Dimension ``dim`` of a tensor with ``layout``, None when each rank has all of it."""
        classes = Classes.along(layout, dim)
        return classes if classes.mesh_dims else None

    @staticmethod
    def along(layout: Layout, dim: int) -> Classes:
        """Dimension ``dim`` of a tensor with ``layout``, sharded or not."""
        return Classes(
            layout.mesh,
            tuple(d for d in layout.shard_mesh_dims(dim) if layout.mesh.shape[d] > 1),
            dim,
            layout.shape[dim],
            layout.local_offset[dim],
            layout.local_shape[dim],
            math.prod(n for d, n in enumerate(layout.local_shape) if d != dim),
        )


@dataclass(frozen=True)
class ClassStatistics:
    """Cross entropy of each sample, and what its gradient needs. Plain tensors, the same on all ranks that share the
    classes, with a class dimension of size 1.

    Attributes:
        largest: the largest logit.
        exponentials: the sum of exp(logit - largest).
        loss: of each sample.
        kept: 1 for a sample that counts, 0 for an ignored one, not a number for a target that is no class.
        weights: the class weight of the target, 0 for an ignored one.
        whole: what the probabilities are multiplied with in the gradient.
    """

    largest: Any
    exponentials: Any
    loss: Any
    kept: Any = None
    weights: Any = None
    whole: Any = None


class VocabParallel:
    """The functions on one platform. Get it with `vocab_parallel_of`.

    They take local tensors under `Platform.no_dispatch`; results have the dtype of the statistics (float32, or float64
    for float64 logits).
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        make = platform.autograd_function
        self._add_class = make(self._add_class_forward, self._add_class_cotangent)
        self._take_class = make(self._take_class_forward, self._take_class_cotangent)
        self._noting = make(self._noting_forward, self._noting_cotangent)
        self._softmax = make(self._softmax_forward, self._softmax_cotangent)
        self._log_softmax = make(self._log_softmax_forward, self._log_softmax_cotangent)
        self._log_sum_exp = make(self._log_sum_exp_forward, self._log_sum_exp_cotangent)
        self._of_classes = make(self._of_classes_forward, self._of_classes_cotangent)
        self._of_probabilities = make(self._of_probabilities_forward, self._of_probabilities_cotangent)

    # ------------------------------------------------------------ along the classes
    def softmax(self, x: Any, classes: Classes) -> Any:
        """Softmax over the classes: this rank's part, of the shape of ``x``."""
        return self._along(self._softmax, x, classes)

    def log_softmax(self, x: Any, classes: Classes) -> Any:
        """Log-softmax over the classes: this rank's part, of the shape of ``x``."""
        return self._along(self._log_softmax, x, classes)

    def log_sum_exp(self, x: Any, classes: Classes) -> Any:
        """log(sum(exp(x))) over the classes, whose dimension has size 1 then; the same on all ranks that share them."""
        if not classes.sample_count:
            return self._noting(self.platform.sum_along(x, classes.dim), x)
        padded = self._with_a_class(x, classes)
        y = self._log_sum_exp(padded, *self._sums_of_exponentials(padded, classes, finite=True), classes)
        return y if classes.size else self._noting(y, x)

    def _along(self, function: Any, x: Any, classes: Classes) -> Any:
        if not classes.sample_count:
            return self._noting(self.platform.clone(x), x)
        padded = self._with_a_class(x, classes)
        y = function(padded, *self._sums_of_exponentials(padded, classes), classes)
        return y if classes.size else self._noting(self._take_class(y, classes.dim), x)

    # ------------------------------------------------------------ losses of samples
    def cross_entropy(
        self, x: Any, target: Any, weight: Any, classes: Classes, ignore_index: int, smoothing: float
    ) -> tuple[Any, Any]:
        """Cross entropy of each sample.

        Args:
            x: logits.
            target: class of each sample, the same on all ranks that share the classes.
            weight: weights of this rank's classes, or None for ones; has no gradient.
            classes: the dimension.
            ignore_index: class that does not count.
            smoothing: between 0 and 1: how much of the target is spread over all classes.

        Returns:
            The losses, of the shape of ``target``, and the weights that a mean divides by.

        Raises:
            IndexError: for a target that is no class, where looking costs nothing (on CPU). Elsewhere the losses of
                such samples are not a number.
        """
        platform, shape = self.platform, self.platform.shape_of(target)
        if not classes.sample_count:
            nothing = self._noting(platform.sum_along(x, classes.dim).reshape(shape), x)
            return nothing, platform.detach(nothing)
        logits, x = x, self._with_a_class(x, classes)
        if weight is not None:
            weight = self._with_a_class(platform.detach(weight), classes, 0, 0.0)
        rows, elsewhere = self._rows(target, classes)
        here = self._statistics(x, target, weight, rows, elsewhere, classes, ignore_index, smoothing)
        loss = self._of_classes(x, here, rows, elsewhere, weight, classes, smoothing)
        if not classes.size:
            loss = self._noting(loss, logits)
        return loss.reshape(shape), here.weights.reshape(shape)

    def cross_entropy_of_probabilities(
        self, x: Any, target: Any, weight: Any, classes: Classes, smoothing: float
    ) -> Any:
        """Cross entropy of each sample with probabilities as target, of the shape of ``x`` without its classes.

        Args:
            x: logits.
            target: this rank's classes of the probabilities; may need a gradient, which costs one all-reduce in
                backward.
            weight: as for `cross_entropy`, but may need a gradient too.
            classes: the dimension.
            smoothing: as for `cross_entropy`.
        """
        platform = self.platform
        shape = [n for d, n in enumerate(platform.shape_of(x)) if d != classes.dim]
        if not classes.sample_count:
            return self._noting(platform.sum_along(x, classes.dim).reshape(shape), x)
        if any(t is not None and platform.requires_grad(t) for t in (target, weight)):
            return self._composed(x, target, weight, classes, smoothing).reshape(shape)
        logits, x = x, self._with_a_class(x, classes)
        target = self._with_a_class(target, classes, value=0.0)
        if weight is not None:
            weight = self._with_a_class(weight, classes, 0, 0.0)
        loss = self._of_probabilities(x, target, weight, classes, smoothing)
        return (loss if classes.size else self._noting(loss, logits)).reshape(shape)

    def nll(self, x: Any, target: Any, weight: Any, classes: Classes, ignore_index: int) -> tuple[Any, Any]:
        """This rank's part of the negative log-likelihood of each sample, and of the weights that a mean divides by:
        both are to be summed over the ranks that share the classes (see `summed`), the weights only when there is a
        ``weight``. Arguments and errors are those of `cross_entropy`, with log-probabilities for ``x``."""
        platform, shape = self.platform, self.platform.shape_of(target)
        if not classes.sample_count:
            nothing = platform.sum_along(x, classes.dim).reshape(shape)
            return nothing, platform.detach(nothing)
        x = self._with_a_class(x, classes, value=0.0)
        rows, elsewhere = self._rows(target, classes)
        ignored, wrong = self._check(target, classes, ignore_index)
        weights = self._weights_of(rows, elsewhere, weight, x, classes)
        loss = platform.masked_fill(-platform.gather(x, classes.dim, rows), elsewhere, 0.0)
        if weight is not None:
            loss = loss * weights
        loss = platform.masked_fill(platform.masked_fill(loss, ignored, 0.0), wrong, math.nan)
        return loss.reshape(shape), platform.masked_fill(weights, ignored, 0.0).reshape(shape)

    def summed(self, x: Any, classes: Classes) -> Any:
        """The sum of every rank's ``x`` over the ranks that share the classes; differentiable."""
        for mesh_dim in classes.mesh_dims:
            x = summation(classes.mesh, mesh_dim)(x)
        return x

    # ------------------------------------------------------------ statistics, outside autograd
    def _reduce(self, x: Any, classes: Classes, op: str) -> Any:
        x = self.platform.clone(x)
        for mesh_dim in classes.mesh_dims:
            x = collectives.all_reduce(x, classes.mesh, mesh_dim, op)
        return x

    def _sums(self, parts: list[Any], classes: Classes) -> list[Any]:
        """The sums over ranks of several tensors of one shape, in one collective."""
        platform = self.platform
        if len(parts) == 1:
            return [self._reduce(parts[0], classes, "sum")]
        sums = self._reduce(platform.cat([platform.unsqueeze(part, 0) for part in parts], 0), classes, "sum")
        shape = platform.shape_of(parts[0])
        return [platform.narrow(sums, 0, i, 1).reshape(shape) for i in range(len(parts))]

    def _largest(self, x: Any, classes: Classes) -> Any:
        return self._reduce(self.platform.amax(x, classes.dim), classes, "max")

    def _sums_of_exponentials(self, x: Any, classes: Classes, finite: bool = False) -> tuple[Any, Any]:
        """The largest element, and the sum of the exponentials of the others' distances to it. With ``finite``, an
        infinite largest element counts as 0, which gives the logarithm of the sum its limit."""
        platform, x = self.platform, self.platform.detach(x)
        largest = self._largest(x, classes)
        if finite:
            largest = platform.masked_fill(largest, (largest == math.inf) | (largest == -math.inf), 0.0)
        (sums,) = self._sums([platform.sum_along(platform.shifted_exp(x, largest), classes.dim)], classes)
        return largest, sums

    def _statistics(
        self,
        x: Any,
        target: Any,
        weight: Any,
        rows: Any,
        elsewhere: Any,
        classes: Classes,
        ignore_index: int,
        smoothing: float,
    ) -> ClassStatistics:
        platform, dim, x = self.platform, classes.dim, self.platform.detach(x)
        ignored, wrong = self._check(target, classes, ignore_index)
        largest = self._largest(x, classes)
        parts = [
            platform.sum_along(platform.shifted_exp(x, largest), dim),
            platform.masked_fill(platform.gather(x, dim, rows) - largest, elsewhere, 0.0),
        ]
        if weight is not None:
            parts.append(self._weights_of(rows, elsewhere, weight, largest, classes))
        if smoothing:
            parts.append(self._sum_of_logits(x, largest, weight, classes))
        if smoothing and weight is not None:
            parts.append(
                platform.zeros(platform.shape_of(largest), largest) + platform.to_dtype(weight, largest.dtype).sum()
            )
        sums = self._sums(parts, classes)
        exponentials, logit = sums[:2]
        ones = platform.ones(platform.shape_of(largest), largest)
        kept = platform.masked_fill(platform.masked_fill(ones, ignored, 0.0), wrong, math.nan)
        weights = ones if weight is None else sums[2]
        log_sum = platform.log(exponentials)
        whole = weights * (1.0 - smoothing)
        loss = whole * (log_sum - logit)
        if smoothing:
            share = smoothing / classes.total
            of_all = sums[-1] if weight is not None else float(classes.total)
            loss = loss + (log_sum * of_all - sums[-2 if weight is not None else -1]) * share
            whole = whole + of_all * share
        return ClassStatistics(
            largest,
            exponentials,
            platform.masked_fill(platform.masked_fill(loss, ignored, 0.0), wrong, math.nan),
            kept,
            platform.masked_fill(weights, ignored, 0.0),
            whole * kept,
        )

    def _check(self, target: Any, classes: Classes, ignore_index: int) -> tuple[Any, Any]:
        """Which samples are ignored, and which have a target that is no class; with a class dimension."""
        ignored = target == ignore_index
        wrong = ((target < 0) | (target >= classes.total)) & (target != ignore_index)
        if self._looks() and bool(wrong.any()):
            raise IndexError(
                f"a target is no class: targets must lie between 0 and {classes.total - 1}, or be the "
                f"ignore_index {ignore_index}"
            )
        return self.platform.unsqueeze(ignored, classes.dim), self.platform.unsqueeze(wrong, classes.dim)

    def _looks(self) -> bool:
        """Whether to read values: it makes the host wait for an accelerator, where the loss tells instead."""
        return self.platform.device_type == "cpu"

    def _rows(self, target: Any, classes: Classes) -> tuple[Any, Any]:
        """Targets as indices into this rank's classes, 0 for those of other ranks, and which are of other ranks."""
        rows = target - classes.offset
        elsewhere = (rows < 0) | (rows >= classes.size)
        rows = self.platform.masked_fill(rows, elsewhere, 0)
        return self.platform.unsqueeze(rows, classes.dim), self.platform.unsqueeze(elsewhere, classes.dim)

    def _weights_of(self, rows: Any, elsewhere: Any, weight: Any, like: Any, classes: Classes) -> Any:
        """Weights of the targets among this rank's classes, 0 for others; ones without weights."""
        platform = self.platform
        if weight is None:
            return platform.ones(platform.shape_of(rows), like)
        weight = self._with_a_class(platform.detach(weight), classes, 0, 0.0)
        return platform.masked_fill(platform.to_dtype(weight, like.dtype)[rows], elsewhere, 0.0)

    def _sum_of_logits(self, x: Any, largest: Any, weight: Any, classes: Classes) -> Any:
        if not classes.size:
            return self.platform.zeros(self.platform.shape_of(largest), largest)
        x = x - largest
        return self.platform.sum_along(x if weight is None else x * self._beside(weight, x, classes), classes.dim)

    def _beside(self, weight: Any, x: Any, classes: Classes) -> Any:
        """``weight`` in the shape and dtype in which it multiplies ``x``."""
        shape = [1] * len(self.platform.shape_of(x))
        shape[classes.dim] = self.platform.shape_of(weight)[0]
        return self.platform.to_dtype(weight, x.dtype).reshape(shape)

    def _with_a_class(self, x: Any, classes: Classes, dim: int | None = None, value: float = -math.inf) -> Any:
        """``x``; on a rank without classes one with ``value``, so that the rank takes part in every collective."""
        dim = classes.dim if dim is None else dim
        return x if self.platform.shape_of(x)[dim] else self._add_class(x, dim, value)

    # ------------------------------------------------------------ forward and backward of each
    def _full_sum(self, x: Any, classes: Classes) -> Any:
        """The sum over all classes, for use in this rank's part of the gradient."""
        total = self.summed(self.platform.sum_along(x, classes.dim), classes)
        return self._for_parts(total, classes)

    def _for_parts(self, x: Any, classes: Classes) -> Any:
        """A replicated ``x`` of which each rank uses its part: its own gradient is a sum over ranks."""
        return identity_reduce_grad(classes.mesh, classes.mesh_dims)(x)

    # Functions of their own, because backends lose track of gradients without elements, and what they lead to may
    # communicate.
    def _add_class_forward(self, ctx: Any, x: Any, dim: int, value: float) -> Any:
        ctx.dim = dim
        shape = list(self.platform.shape_of(x))
        shape[dim] = 1
        return self.platform.zeros(shape, x) + value

    def _add_class_cotangent(self, ctx: Any, g: Any) -> Any:
        return self._take_class(g, ctx.dim)

    def _take_class_forward(self, ctx: Any, x: Any, dim: int) -> Any:
        ctx.dim = dim
        shape = list(self.platform.shape_of(x))
        shape[dim] = 0
        return self.platform.zeros(shape, x)

    def _take_class_cotangent(self, ctx: Any, g: Any) -> Any:
        return self._add_class(g, ctx.dim, 0.0)

    def _noting_forward(self, ctx: Any, y: Any, x: Any) -> Any:
        """``y``; backward fails where ``x`` was written to since, as it does on ranks that have kept elements of it:
        where only some ranks failed, the others would wait for them."""
        ctx.save_for_backward(x)
        return self.platform.detach(y)

    def _noting_cotangent(self, ctx: Any, g: Any) -> Any:
        _ = ctx.saved_tensors
        return g

    def _keep(self, ctx: Any, x: Any, largest: Any, exponentials: Any, classes: Classes) -> Any:
        ctx.classes = classes
        ctx.save_for_backward(x, largest, exponentials)
        return self.platform.detach(x)

    def _softmax_forward(self, ctx: Any, x: Any, largest: Any, exponentials: Any, classes: Classes) -> Any:
        x = self._keep(ctx, x, largest, exponentials, classes)
        return self.platform.shifted_exp(x, largest, exponentials)

    def _softmax_cotangent(self, ctx: Any, g: Any) -> Any:
        x, largest, exponentials = ctx.saved_tensors
        p = self._softmax(x, largest, exponentials, ctx.classes)
        return self.platform.to_dtype(p * (g - self._full_sum(p * g, ctx.classes)), x.dtype)

    def _log_softmax_forward(self, ctx: Any, x: Any, largest: Any, exponentials: Any, classes: Classes) -> Any:
        x = self._keep(ctx, x, largest, exponentials, classes)
        return (x - largest) - self.platform.log(exponentials)

    def _log_softmax_cotangent(self, ctx: Any, g: Any) -> Any:
        x, largest, exponentials = ctx.saved_tensors
        p = self._softmax(x, largest, exponentials, ctx.classes)
        return self.platform.to_dtype(g - p * self._full_sum(g, ctx.classes), x.dtype)

    def _log_sum_exp_forward(self, ctx: Any, x: Any, largest: Any, exponentials: Any, classes: Classes) -> Any:
        self._keep(ctx, x, largest, exponentials, classes)
        return largest + self.platform.log(exponentials)

    def _log_sum_exp_cotangent(self, ctx: Any, g: Any) -> Any:
        x, largest, exponentials = ctx.saved_tensors
        p = self._softmax(x, largest, exponentials, ctx.classes)
        return self.platform.to_dtype(p * self._for_parts(g, ctx.classes), x.dtype)

    def _of_classes_forward(
        self,
        ctx: Any,
        x: Any,
        here: ClassStatistics,
        rows: Any,
        elsewhere: Any,
        weight: Any,
        classes: Classes,
        smoothing: float,
    ) -> Any:
        ctx.classes, ctx.smoothing, ctx.has_weight = classes, smoothing, weight is not None
        saved = (x, here.largest, here.exponentials, here.kept, here.weights, here.whole, rows, elsewhere)
        ctx.save_for_backward(*saved, *(() if weight is None else (weight,)))
        return self.platform.detach(here.loss)

    def _of_classes_cotangent(self, ctx: Any, g: Any) -> Any:
        """Probability * whole - weight of the target at the target - share of smoothing, times the cotangent."""
        platform, classes, smoothing = self.platform, ctx.classes, ctx.smoothing
        x, largest, exponentials, kept, weights, whole, rows, elsewhere, *weight = ctx.saved_tensors
        g = self._for_parts(g, classes)
        gradient = self._softmax(x, largest, exponentials, classes) * (g * whole)
        if smoothing:
            share = g * kept * (smoothing / classes.total)
            gradient = gradient - (share * self._beside(weight[0], gradient, classes) if weight else share)
        at_target = platform.masked_fill(g * weights * (smoothing - 1.0), elsewhere, 0.0)
        return platform.to_dtype(platform.scatter_add(gradient, classes.dim, rows, at_target), x.dtype)

    def _soft_target(self, target: Any, weight: Any, like: Any, classes: Classes, smoothing: float) -> Any:
        target = self.platform.to_dtype(target, like.dtype)
        if smoothing:
            target = target * (1.0 - smoothing) + smoothing / classes.total
        return target if weight is None else target * self._beside(weight, target, classes)

    def _of_probabilities_forward(
        self, ctx: Any, x: Any, target: Any, weight: Any, classes: Classes, smoothing: float
    ) -> Any:
        platform, logits = self.platform, self.platform.detach(x)
        largest = self._largest(logits, classes)
        parts = [platform.sum_along(platform.shifted_exp(logits, largest), classes.dim)]
        if classes.size:
            soft = self._soft_target(platform.detach(target), weight, largest, classes, smoothing)
            parts += [platform.sum_along(soft * (logits - largest), classes.dim), platform.sum_along(soft, classes.dim)]
        else:
            parts += [platform.zeros(platform.shape_of(largest), largest)] * 2
        exponentials, logit, mass = self._sums(parts, classes)
        ctx.classes, ctx.smoothing = classes, smoothing
        ctx.save_for_backward(x, largest, exponentials, mass, target, *(() if weight is None else (weight,)))
        return mass * platform.log(exponentials) - logit

    def _of_probabilities_cotangent(self, ctx: Any, g: Any) -> Any:
        x, largest, exponentials, mass, target, *weight = ctx.saved_tensors
        g = self._for_parts(g, ctx.classes)
        soft = self._soft_target(target, weight[0] if weight else None, largest, ctx.classes, ctx.smoothing)
        p = self._softmax(x, largest, exponentials, ctx.classes)
        return self.platform.to_dtype((p * mass - soft) * g, x.dtype)

    def _composed(self, x: Any, target: Any, weight: Any, classes: Classes, smoothing: float) -> Any:
        """By way of log_softmax, for gradients with respect to target and weight."""
        log_probabilities = self.log_softmax(x, classes)
        soft = self._soft_target(target, weight, log_probabilities, classes, smoothing)
        return self.summed(-self.platform.sum_along(log_probabilities * soft, classes.dim), classes)


_FUNCTIONS: dict[Any, VocabParallel] = {}


def vocab_parallel_of(platform: Platform) -> VocabParallel:
    """The `VocabParallel` of a platform, made once."""
    found = _FUNCTIONS.get(platform)
    if found is None:
        found = _FUNCTIONS[platform] = VocabParallel(platform)
    return found
