"""Cross entropy over sharded classes as a function of autograd, without gathering the logits, as in Megatron.

For each sample, all ranks need the largest logit, the sum of the exponentials and the logit of the target. These are
three numbers for each sample, in two all-reduces, because all sums share one. `class_losses` computes the loss from
these numbers. Backward needs no further communication. It consists of similar functions and of steps of `transitions`,
so gradients of gradients are right.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.rules.class_losses import ClassLosses, ClassStatistics
from hyper_parallel.core.rules.class_softmax import ClassSoftmax
from hyper_parallel.core.rules.classes import Classes
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.autograd import named


class VocabParallel(ClassSoftmax):
    """All functions over sharded classes, on one platform. Instances come from `vocab_parallel_of`."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        self.losses = ClassLosses(platform, self._largest, self._sums)
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
        masks = self._checked(target, classes, ignore_index)
        here = self.losses.of_classes(platform.detach(x), target, masks, weight, classes, smoothing)
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
        differentiated = [t for t in (target, weight) if t is not None and platform.requires_grad(t)]
        if not classes.sample_count:
            nothing = self._noting(platform.sum_along(x, classes.dim).reshape(shape), x, True)
            for t in differentiated:  # their gradients may be summed with those of ranks that have samples
                nothing = self._with_path(None, nothing, t)[0]
            return nothing
        if differentiated:
            return self._composed(x, target, weight, classes, smoothing).reshape(shape)
        logits, x = x, self._with_a_class(x, classes)
        target = self._with_a_class(target, classes, value=0.0)
        if weight is not None:
            weight = self._with_a_class(weight, classes, 0, 0.0)
        loss = self._of_probabilities(x, target, weight, classes, smoothing)
        return (loss if classes.size else self._noting(loss, logits)).reshape(shape)

    def nll(self, x: Any, target: Any, weight: Any, classes: Classes, ignore_index: int) -> tuple[Any, Any]:
        """Return this rank's partial sums: the negative log-likelihood of each sample, and the weights that a mean
        divides by.

        The caller sums the losses over the ranks that share the classes (see `summed`). The weights are summed too if
        there is a ``weight``. Arguments and errors are those of `cross_entropy`, with log-probabilities for ``x``.
        """
        platform, shape = self.platform, self.platform.shape_of(target)
        if not classes.sample_count:
            nothing = platform.sum_along(x, classes.dim).reshape(shape)
            return nothing, platform.detach(nothing)
        x = self._with_a_class(x, classes, value=0.0)
        if weight is not None:
            weight = self._with_a_class(platform.detach(weight), classes, 0, 0.0)
        loss, weights = self.losses.nll(x, target, self._checked(target, classes, ignore_index), weight, classes)
        return loss.reshape(shape), weights.reshape(shape)

    # ------------------------------------------------------------ invalid targets
    def _checked(self, target: Any, classes: Classes, ignore_index: int) -> tuple[Any, Any]:
        """Return the masks of `ClassLosses.masks`. Raise IndexError for an invalid target, where that is cheap."""
        ignored, wrong = self.losses.masks(target, classes, ignore_index)
        if self._looks() and bool(wrong.any()):
            raise IndexError(
                f"a target is not a class: targets must be between 0 and {classes.total - 1}, or be the ignore_index "
                f"{ignore_index}"
            )
        return ignored, wrong

    def _looks(self) -> bool:
        """Return whether the values of targets are checked, which is the case only on the CPU.

        On an accelerator, a check would make the host wait. There an invalid target makes the loss NaN instead.
        """
        return self.platform.device_type == "cpu"

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
        # The mean over no targets has an infinite cotangent, and infinity times zero is NaN.
        g = platform.masked_fill(self._for_parts(g, classes), here.ignored, 0.0)
        gradient = self._softmax(x, here.largest, here.exponentials, classes) * (g * here.whole)
        if smoothing:
            share = g * here.kept * (smoothing / classes.total)
            gradient = gradient - (share * self.losses.beside(weight[0], gradient, classes) if weight else share)
        at_target = platform.masked_fill(g * here.weights * (smoothing - 1.0), here.elsewhere, 0.0)
        return platform.to_dtype(platform.scatter_add(gradient, classes.dim, here.rows, at_target), x.dtype)

    def _of_probabilities_forward(
        self, ctx: Any, x: Any, target: Any, weight: Any, classes: Classes, smoothing: float
    ) -> Any:
        logits, probabilities = self.platform.detach(x), self.platform.detach(target)
        found = self.losses.of_probabilities(logits, probabilities, weight, classes, smoothing)
        largest, exponentials, mass, loss = found
        ctx.classes, ctx.smoothing = classes, smoothing
        ctx.save_for_backward(x, largest, exponentials, mass, target, *(() if weight is None else (weight,)))
        return loss

    def _of_probabilities_cotangent(self, ctx: Any, g: Any) -> Any:
        x, largest, exponentials, mass, target, *weight = ctx.saved_tensors
        g = self._for_parts(g, ctx.classes)
        soft = self.losses.soft_target(target, weight[0] if weight else None, largest, ctx.classes, ctx.smoothing)
        p = self._softmax(x, largest, exponentials, ctx.classes)
        return self.platform.to_dtype((p * mass - soft) * g, x.dtype)

    def _composed(self, x: Any, target: Any, weight: Any, classes: Classes, smoothing: float) -> Any:
        """Return the loss computed from log_softmax, for gradients of target and weight."""
        log_probabilities = self.log_softmax(x, classes)
        soft = self.losses.soft_target(target, weight, log_probabilities, classes, smoothing)
        return self.summed(-self.platform.sum_along(log_probabilities * soft, classes.dim), classes)


_FUNCTIONS: Table = Table(VocabParallel)


def vocab_parallel_of(platform: Platform) -> VocabParallel:
    """Return the cached `VocabParallel` of a platform."""
    return _FUNCTIONS[platform]
