"""The losses over sharded classes, each written once: local partial sums, one all-reduce, and the loss of the sums.

A loss takes two all-reduces over the ranks that share the classes. The first finds the largest logit of each sample,
and is not differentiated. The second is the step ``sum`` of `platform.contract.programs.STEPS`, for all partial sums
together.

`vocab_parallel` runs these functions outside autograd, and computes the gradient from the statistics. A backend's
compiler traces these functions, and differentiates the traced operations.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ClassLosses", "ClassStatistics"]


@dataclass(frozen=True)
class ClassStatistics:
    """Cross entropy of each sample, and the statistics for its gradient.

    All values are plain tensors with a class dimension of size 1. The first two are local to each rank. The others are
    equal on all ranks that share the classes.

    Attributes:
        rows: targets as indices into this rank's classes, 0 for targets of other ranks.
        elsewhere: mask of targets of other ranks.
        largest: the largest logit.
        exponentials: the sum of exp(logit - largest).
        loss: loss of each sample.
        ignored: mask of ignored samples.
        kept: 1 for a sample that counts, 0 for an ignored one, NaN for an invalid target.
        weights: the class weight of the target, 0 for an ignored sample.
        whole: factor of the probabilities in the gradient.
    """

    rows: Any
    elsewhere: Any
    largest: Any
    exponentials: Any
    loss: Any
    ignored: Any
    kept: Any
    weights: Any
    whole: Any


class ClassLosses:
    """The losses over sharded classes, on local tensors.

    The argument ``classes`` of the methods describes this rank's classes. It has the attributes ``dim``, ``total``,
    ``offset`` and ``size`` of `Classes`. With ``whole_weight``, ``weight`` contains all classes. Otherwise ``weight``
    contains this rank's classes, and the weights of the targets are summed over the ranks.

    Args:
        verbs: `Platform`, or an object with the local verbs that the methods call.
        largest: ``largest(x, classes)`` returns the largest logit of each sample over all ranks.
        sums: ``sums(parts, classes)`` returns the sums over all ranks of several tensors of one shape.
    """

    def __init__(
        self, verbs: Any, largest: Callable[[Any, Any], Any], sums: Callable[[list[Any], Any], list[Any]]
    ) -> None:
        self.verbs, self.largest, self.sums = verbs, largest, sums

    # ------------------------------------------------------------ targets
    def masks(self, target: Any, classes: Any, ignore_index: int) -> tuple[Any, Any]:
        """Return two masks with a class dimension: ignored samples, and samples with an invalid target."""
        verbs, ignored = self.verbs, target == ignore_index
        wrong = ((target < 0) | (target >= classes.total)) & (target != ignore_index)
        return verbs.unsqueeze(ignored, classes.dim), verbs.unsqueeze(wrong, classes.dim)

    def rows(self, target: Any, classes: Any) -> tuple[Any, Any]:
        """Return targets as indices into this rank's classes, and a mask of targets whose classes other ranks hold.

        A masked target has the index 0.
        """
        verbs, rows = self.verbs, target - classes.offset
        elsewhere = (rows < 0) | (rows >= classes.size)
        rows = verbs.masked_fill(rows, elsewhere, 0)
        return verbs.unsqueeze(rows, classes.dim), verbs.unsqueeze(elsewhere, classes.dim)

    # ------------------------------------------------------------ losses of each sample
    def of_classes(
        self,
        x: Any,
        target: Any,
        masks: tuple[Any, Any],
        weight: Any,
        classes: Any,
        smoothing: float,
        whole_weight: bool = False,
    ) -> ClassStatistics:
        """Return the cross entropy for targets that are classes, with its statistics.

        ``masks`` is the result of `masks`.
        """
        verbs, dim, (ignored, wrong) = self.verbs, classes.dim, masks
        rows, elsewhere = self.rows(target, classes)
        largest = self.largest(x, classes)
        parts = [
            verbs.sum_along(verbs.shifted_exp(x, largest), dim),
            verbs.masked_fill(verbs.gather(x, dim, rows) - largest, elsewhere, 0.0),
        ]
        adds_weights = weight is not None and not whole_weight
        if adds_weights:
            parts.append(self._weights(target, masks, rows, elsewhere, weight, largest, classes, False))
        if smoothing:
            parts.append(self._sum_of_logits(x, largest, weight, classes, whole_weight))
        if smoothing and adds_weights:
            nothing = verbs.zeros(verbs.shape_of(largest), largest)
            parts.append(nothing + verbs.to_dtype(weight, largest.dtype).sum())
        exponentials, logit, *sums = self.sums(parts, classes)
        if adds_weights:
            weights = sums[0]
        else:
            weights = self._weights(target, masks, rows, elsewhere, weight, largest, classes, whole_weight)
        log_sum, share = verbs.log(exponentials), smoothing / classes.total
        whole = weights * (1.0 - smoothing)
        loss = whole * (log_sum - logit)
        if smoothing:
            of_all: Any = float(classes.total)
            if weight is not None:
                of_all = sums[2] if adds_weights else verbs.to_dtype(weight, largest.dtype).sum()
            loss = loss + (log_sum * of_all - sums[1 if adds_weights else 0]) * share
            whole = whole + of_all * share
        ones = verbs.ones(verbs.shape_of(largest), largest)
        kept = verbs.masked_fill(verbs.masked_fill(ones, ignored, 0.0), wrong, math.nan)
        loss = verbs.masked_fill(verbs.masked_fill(loss, ignored, 0.0), wrong, math.nan)
        weights = verbs.masked_fill(weights, ignored, 0.0)
        return ClassStatistics(rows, elsewhere, largest, exponentials, loss, ignored, kept, weights, whole * kept)

    def of_probabilities(
        self, x: Any, target: Any, weight: Any, classes: Any, smoothing: float, whole_weight: bool = False
    ) -> tuple[Any, Any, Any, Any]:
        """Return the largest logits, the sums of exponentials, the sums of the targets, and the cross entropy.

        ``target`` has this rank's probabilities. All results have a class dimension of size 1.
        """
        verbs, dim = self.verbs, classes.dim
        largest = self.largest(x, classes)
        parts = [verbs.sum_along(verbs.shifted_exp(x, largest), dim)]
        if classes.size:
            soft = self.soft_target(target, weight, largest, classes, smoothing, whole_weight)
            parts += [verbs.sum_along(soft * (x - largest), dim), verbs.sum_along(soft, dim)]
        else:
            parts += [verbs.zeros(verbs.shape_of(largest), largest)] * 2
        exponentials, logit, mass = self.sums(parts, classes)
        return largest, exponentials, mass, mass * verbs.log(exponentials) - logit

    def nll(
        self, x: Any, target: Any, masks: tuple[Any, Any], weight: Any, classes: Any, whole_weight: bool = False
    ) -> tuple[Any, Any]:
        """Return this rank's partial sum of the negative log-likelihood of each sample, and the weights of the samples.
        The weights are partial sums too, except without ``weight`` and with ``whole_weight``. ``x`` contains
        log-probabilities.
        """
        verbs, (ignored, wrong) = self.verbs, masks
        rows, elsewhere = self.rows(target, classes)
        weights = self._weights(target, masks, rows, elsewhere, weight, x, classes, whole_weight)
        loss = verbs.masked_fill(-verbs.gather(x, classes.dim, rows), elsewhere, 0.0)
        if weight is not None:
            loss = loss * weights
        loss = verbs.masked_fill(verbs.masked_fill(loss, ignored, 0.0), wrong, math.nan)
        return loss, verbs.masked_fill(weights, ignored, 0.0)

    # ------------------------------------------------------------ parts of them
    def soft_target(
        self, target: Any, weight: Any, like: Any, classes: Any, smoothing: float, whole_weight: bool = False
    ) -> Any:
        """Return the smoothed and weighted probabilities of this rank, in the dtype of ``like``."""
        target = self.verbs.to_dtype(target, like.dtype)
        if smoothing:
            target = target * (1.0 - smoothing) + smoothing / classes.total
        return target if weight is None else target * self.beside(weight, target, classes, whole_weight)

    def beside(self, weight: Any, x: Any, classes: Any, whole_weight: bool = False) -> Any:
        """Return this rank's class weights, reshaped and converted so that they can multiply ``x``."""
        verbs, shape = self.verbs, [1] * len(self.verbs.shape_of(x))
        if whole_weight:
            weight = verbs.narrow(weight, 0, classes.offset, classes.size)
        shape[classes.dim] = verbs.shape_of(weight)[0]
        return verbs.to_dtype(weight, x.dtype).reshape(shape)

    def _weights(
        self,
        target: Any,
        masks: tuple[Any, Any],
        rows: Any,
        elsewhere: Any,
        weight: Any,
        like: Any,
        classes: Any,
        whole_weight: bool,
    ) -> Any:
        """Return the weight of each target; 1 without ``weight``.

        Without ``whole_weight``, a target whose class another rank holds gets 0.
        """
        verbs = self.verbs
        if weight is None:
            return verbs.ones(verbs.shape_of(rows), like)
        weight = verbs.to_dtype(weight, like.dtype)
        if whole_weight:
            return weight[verbs.masked_fill(verbs.unsqueeze(target, classes.dim), masks[0] | masks[1], 0)]
        return verbs.masked_fill(weight[rows], elsewhere, 0.0)

    def _sum_of_logits(self, x: Any, largest: Any, weight: Any, classes: Any, whole_weight: bool) -> Any:
        if not classes.size:
            return self.verbs.zeros(self.verbs.shape_of(largest), largest)
        x = x - largest
        weighted = x if weight is None else x * self.beside(weight, x, classes, whole_weight)
        return self.verbs.sum_along(weighted, classes.dim)

    def reduced(self, loss: Any, reduction: str, count: Any) -> Any:
        """Apply ``reduction`` to the losses of samples: no reduction, their sum, or their sum divided by ``count``."""
        if reduction == "none":
            return loss
        # Some backends leave the sum of an empty tensor uninitialised, so do not use it.
        flat = loss.reshape((1, math.prod(self.verbs.shape_of(loss))))
        total = self.verbs.sum_along(flat, 1).reshape(())
        return total if reduction == "sum" else total / count
