"""Softmax and its logarithms over sharded classes, without gathering the logits.

Backward saves the logits, which their producer holds anyway, and two numbers for each sample. Probabilities are
recomputed. Backward of softmax and log_softmax does one sum over the classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.rules.classes import Classes, ClassFunctions
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.autograd import named


class ClassSoftmax(ClassFunctions):
    """Softmax functions on one platform. Results are float32, or float64 for float64 logits."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        self._softmax = self._of_logits(
            "Softmax",
            platform.shifted_exp,
            lambda p, g, classes: p * (g - self._full_sum(p * g, classes)),
        )
        self._log_softmax = self._of_logits(
            "LogSoftmax",
            lambda x, largest, exponentials: (x - largest) - platform.log(exponentials),
            lambda p, g, classes: g - p * self._full_sum(g, classes),
        )
        self._log_sum_exp = self._of_logits(
            "LogSumExp",
            lambda x, largest, exponentials: largest + platform.log(exponentials),
            lambda p, g, classes: p * self._for_parts(g, classes),
        )

    def softmax(self, x: Any, classes: Classes) -> Any:
        """Return this rank's shard of the softmax over the classes, with the shape of ``x``."""
        return self._along(self._softmax, x, classes)

    def log_softmax(self, x: Any, classes: Classes) -> Any:
        """Return this rank's shard of the log-softmax over the classes, with the shape of ``x``."""
        return self._along(self._log_softmax, x, classes)

    def log_sum_exp(self, x: Any, classes: Classes) -> Any:
        """Return log(sum(exp(x))) over the classes, whose dimension gets size 1. It is equal on all ranks that share
        the classes."""
        if not classes.sample_count:
            return self._noting(self.platform.sum_along(x, classes.dim), x, True)
        padded = self._with_a_class(x, classes)
        y = self._log_sum_exp(padded, *self._sums_of_exponentials(padded, classes, finite=True), classes)
        return y if classes.size else self._noting(y, x)

    def _along(self, function: Any, x: Any, classes: Classes) -> Any:
        if not classes.sample_count:
            return self._noting(self.platform.clone(x), x, True)
        padded = self._with_a_class(x, classes)
        y = function(padded, *self._sums_of_exponentials(padded, classes), classes)
        return y if classes.size else self._noting(self._resize(y, classes.dim, 0, 0.0), x)

    def _of_logits(
        self, name: str, value: Callable[[Any, Any, Any], Any], cotangent: Callable[[Any, Any, Classes], Any]
    ) -> Callable[..., Any]:
        """Return a differentiable function of logits, their `_sums_of_exponentials` and the classes.

        Args:
            name: name of the node in the graph.
            value: ``value(x, largest, exponentials)`` computes the result.
            cotangent: ``cotangent(p, g, classes)`` returns the cotangent of logits whose softmax is ``p``, from the
                cotangent ``g`` of the result.
        """
        platform = self.platform

        def forward(ctx: Any, x: Any, largest: Any, exponentials: Any, classes: Classes) -> Any:
            ctx.classes = classes
            ctx.save_for_backward(x, largest, exponentials)
            return value(platform.detach(x), largest, exponentials)

        def backward(ctx: Any, g: Any) -> Any:
            x, largest, exponentials = ctx.saved_tensors
            p = self._softmax(x, largest, exponentials, ctx.classes)
            return platform.to_dtype(cotangent(p, g, ctx.classes), x.dtype)

        return platform.autograd_function(named(name, forward), backward)
