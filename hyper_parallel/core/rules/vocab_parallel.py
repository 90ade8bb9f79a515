"""Cross entropy over sharded classes, without gathering the logits, as in Megatron.

For each sample, all ranks need the largest logit, the sum of the exponentials and the logit of the target. These are
three numbers for each sample, in two all-reduces, because all sums share one. Backward needs no further communication.
It consists of similar functions and of steps of `transitions`, so gradients of gradients are right.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.rules.class_softmax import ClassSoftmax
from hyper_parallel.core.rules.classes import Classes
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.autograd import named


@dataclass(frozen=True)
class ClassStatistics:
    """Cross entropy of each sample, and the statistics for its gradient.

    All are plain tensors with a class dimension of size 1. All but the first two are equal on all ranks that share the
    classes.

    Attributes:
        rows: targets as indices into this rank's classes, 0 for targets of other ranks.
        elsewhere: mask of targets of other ranks.
        largest: the largest logit.
        exponentials: the sum of exp(logit - largest).
        loss: loss of each sample.
        kept: 1 for a sample that counts, 0 for an ignored one, NaN for an invalid target.
        weights: the class weight of the target, 0 for an ignored sample.
        whole: factor of the probabilities in the gradient.
    """

    rows: Any
    elsewhere: Any
    largest: Any
    exponentials: Any
    loss: Any
    kept: Any
    weights: Any
    whole: Any


class VocabParallel(ClassSoftmax):
    """All functions over sharded classes, on one platform. Instances come from `vocab_parallel_of`."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        make = platform.autograd_function
        self._of_classes = make(named("CrossEntropyOfClasses", self._of_classes_forward), self._of_classes_cotangent)
        self._of_probabilities = make(
            named("CrossEntropyOfProbabilities", self._of_probabilities_forward), self._of_probabilities_cotangent
        )

    def cross_entropy(
        self, x: Any, target: Any, weight: Any, classes: Classes, ignore_index: int, smoothing: float
    ) -> tuple[Any, Any]:
        """Return the cross entropy of each sample, and the weights that a mean divides by.

        Args:
            x: logits.
            target: class of each sample, equal on all ranks that share the classes.
            weight: weights of this rank's classes, or None for ones. They get no gradient.
            classes: the dimension.
            ignore_index: label of ignored samples.
            smoothing: share of the target that is distributed over all classes, between 0 and 1.

        Returns:
            The losses, of the shape of ``target``, and the weights that a mean divides by.

        Raises:
            IndexError: for an invalid target on the CPU, where the check is cheap. On other devices, the losses of such
                samples are NaN.
        """
        platform, shape = self.platform, self.platform.shape_of(target)
        if not classes.sample_count:
            nothing = self._noting(platform.sum_along(x, classes.dim).reshape(shape), x, True)
            return nothing, platform.detach(nothing)
        logits, x = x, self._with_a_class(x, classes)
        if weight is not None:
            weight = self._with_a_class(platform.detach(weight), classes, 0, 0.0)
        here = self._statistics(x, target, weight, classes, ignore_index, smoothing)
        loss = self._of_classes(x, weight, here, classes, smoothing)
        if not classes.size:
            loss = self._noting(loss, logits)
        return loss.reshape(shape), here.weights.reshape(shape)

    def cross_entropy_of_probabilities(
        self, x: Any, target: Any, weight: Any, classes: Classes, smoothing: float
    ) -> Any:
        """Return the cross entropy of each sample for probabilities as target, with the shape of ``x`` without its
        classes.

        Args:
            x: logits.
            target: this rank's shard of the probabilities. It may require a gradient, which costs one all-reduce in
                backward.
            weight: as in `cross_entropy`, but it may require a gradient.
            classes: the dimension.
            smoothing: as in `cross_entropy`.
        """
        platform = self.platform
        shape = [n for d, n in enumerate(platform.shape_of(x)) if d != classes.dim]
        if not classes.sample_count:
            return self._noting(platform.sum_along(x, classes.dim).reshape(shape), x, True)
        if any(t is not None and platform.requires_grad(t) for t in (target, weight)):
            return self._composed(x, target, weight, classes, smoothing).reshape(shape)
        logits, x = x, self._with_a_class(x, classes)
        target = self._with_a_class(target, classes, value=0.0)
        if weight is not None:
            weight = self._with_a_class(weight, classes, 0, 0.0)
        loss = self._of_probabilities(x, target, weight, classes, smoothing)
        return (loss if classes.size else self._noting(loss, logits)).reshape(shape)

    def nll(self, x: Any, target: Any, weight: Any, classes: Classes, ignore_index: int) -> tuple[Any, Any]:
        """Return this rank's summand of the negative log-likelihood of each sample, and of the weights that a mean
        divides by.

        The caller sums the losses over the ranks that share the classes (see `summed`). The weights are summed too if
        there is a ``weight``. Arguments and errors are those of `cross_entropy`, with log-probabilities for ``x``.
        """
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

    # ------------------------------------------------------------ statistics, outside autograd
    def _statistics(
        self, x: Any, target: Any, weight: Any, classes: Classes, ignore_index: int, smoothing: float
    ) -> ClassStatistics:
        platform, dim, x = self.platform, classes.dim, self.platform.detach(x)
        rows, elsewhere = self._rows(target, classes)
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
            rows,
            elsewhere,
            largest,
            exponentials,
            platform.masked_fill(platform.masked_fill(loss, ignored, 0.0), wrong, math.nan),
            kept,
            platform.masked_fill(weights, ignored, 0.0),
            whole * kept,
        )

    def _check(self, target: Any, classes: Classes, ignore_index: int) -> tuple[Any, Any]:
        """Return two masks with a class dimension: ignored samples, and samples with an invalid target."""
        ignored = target == ignore_index
        wrong = ((target < 0) | (target >= classes.total)) & (target != ignore_index)
        if self._looks() and bool(wrong.any()):
            raise IndexError(
                f"a target is not a class: targets must be between 0 and {classes.total - 1}, or be the ignore_index "
                f"{ignore_index}"
            )
        return self.platform.unsqueeze(ignored, classes.dim), self.platform.unsqueeze(wrong, classes.dim)

    def _looks(self) -> bool:
        """Return whether the values of targets are checked, which is the case only on the CPU.

        Reading a value makes the host wait for an accelerator. There, a wrong target makes the loss NaN instead.
        """
        return self.platform.device_type == "cpu"

    def _rows(self, target: Any, classes: Classes) -> tuple[Any, Any]:
        """Return targets as indices into this rank's classes, 0 for targets of other ranks, and a mask of the
        latter."""
        rows = target - classes.offset
        elsewhere = (rows < 0) | (rows >= classes.size)
        rows = self.platform.masked_fill(rows, elsewhere, 0)
        return self.platform.unsqueeze(rows, classes.dim), self.platform.unsqueeze(elsewhere, classes.dim)

    def _weights_of(self, rows: Any, elsewhere: Any, weight: Any, like: Any, classes: Classes) -> Any:
        """Return the weights of targets among this rank's classes, and 0 for other targets. Without weights, return
        ones."""
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
        """Return ``weight`` in the shape and dtype in which it multiplies ``x``."""
        shape = [1] * len(self.platform.shape_of(x))
        shape[classes.dim] = self.platform.shape_of(weight)[0]
        return self.platform.to_dtype(weight, x.dtype).reshape(shape)

    # ------------------------------------------------------------ forward and backward of each
    def _of_classes_forward(
        self, ctx: Any, x: Any, weight: Any, here: ClassStatistics, classes: Classes, smoothing: float
    ) -> Any:
        ctx.here, ctx.classes, ctx.smoothing = here, classes, smoothing
        ctx.save_for_backward(x, *(() if weight is None else (weight,)))
        return self.platform.detach(here.loss)

    def _of_classes_cotangent(self, ctx: Any, g: Any) -> Any:
        """Return the cotangent of the logits.

        It is probability * whole - weight at the target - share of smoothing, times the cotangent of the loss.
        """
        platform, here, classes, smoothing = self.platform, ctx.here, ctx.classes, ctx.smoothing
        x, *weight = ctx.saved_tensors
        g = self._for_parts(g, classes)
        gradient = self._softmax(x, here.largest, here.exponentials, classes) * (g * here.whole)
        if smoothing:
            share = g * here.kept * (smoothing / classes.total)
            gradient = gradient - (share * self._beside(weight[0], gradient, classes) if weight else share)
        at_target = platform.masked_fill(g * here.weights * (smoothing - 1.0), here.elsewhere, 0.0)
        return platform.to_dtype(platform.scatter_add(gradient, classes.dim, here.rows, at_target), x.dtype)

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
        """Return the loss computed from log_softmax, for gradients of target and weight."""
        log_probabilities = self.log_softmax(x, classes)
        soft = self._soft_target(target, weight, log_probabilities, classes, smoothing)
        return self.summed(-self.platform.sum_along(log_probabilities * soft, classes.dim), classes)


_FUNCTIONS: Table = Table(VocabParallel)


def vocab_parallel_of(platform: Platform) -> VocabParallel:
    """Return the cached `VocabParallel` of a platform."""
    return _FUNCTIONS[platform]
