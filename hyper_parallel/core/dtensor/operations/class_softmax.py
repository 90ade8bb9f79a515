"""Softmax and its logarithms over sharded classes. The logits are not gathered.

What is saved for backward is the logits themselves, which their producer has anyway, and two numbers for each sample;
probabilities are computed again. Backward of softmax and log_softmax sums once over the classes.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.operations.classes import Classes, ClassFunctions
from hyper_parallel.platform.contract import Platform


class ClassSoftmax(ClassFunctions):
    """The functions on one platform. Results have the dtype of the statistics: float32, or float64 for float64
    logits."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        make = platform.autograd_function
        self._softmax = make(self._softmax_forward, self._softmax_cotangent)
        self._log_softmax = make(self._log_softmax_forward, self._log_softmax_cotangent)
        self._log_sum_exp = make(self._log_sum_exp_forward, self._log_sum_exp_cotangent)

    def softmax(self, x: Any, classes: Classes) -> Any:
        """Softmax over the classes: this rank's part, of the shape of ``x``."""
        return self._along(self._softmax, x, classes)

    def log_softmax(self, x: Any, classes: Classes) -> Any:
        """Log-softmax over the classes: this rank's part, of the shape of ``x``."""
        return self._along(self._log_softmax, x, classes)

    def log_sum_exp(self, x: Any, classes: Classes) -> Any:
        """log(sum(exp(x))) over the classes, whose dimension has size 1 then; the same on all ranks that share them."""
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

    # ------------------------------------------------------------ forward and backward of each
    def _keep(self, ctx: Any, x: Any, largest: Any, exponentials: Any, classes: Classes) -> Any:
        ctx.classes = classes
        ctx.save_for_backward(x, largest, exponentials)
        return self.platform.detach(x)

    def _softmax_again(self, ctx: Any) -> tuple[Any, Any]:
        """The softmax of what `_keep` has saved, and the dtype of that."""
        x, largest, exponentials = ctx.saved_tensors
        return self._softmax(x, largest, exponentials, ctx.classes), x.dtype

    def _softmax_forward(self, ctx: Any, x: Any, largest: Any, exponentials: Any, classes: Classes) -> Any:
        x = self._keep(ctx, x, largest, exponentials, classes)
        return self.platform.shifted_exp(x, largest, exponentials)

    def _softmax_cotangent(self, ctx: Any, g: Any) -> Any:
        p, dtype = self._softmax_again(ctx)
        return self.platform.to_dtype(p * (g - self._full_sum(p * g, ctx.classes)), dtype)

    def _log_softmax_forward(self, ctx: Any, x: Any, largest: Any, exponentials: Any, classes: Classes) -> Any:
        x = self._keep(ctx, x, largest, exponentials, classes)
        return (x - largest) - self.platform.log(exponentials)

    def _log_softmax_cotangent(self, ctx: Any, g: Any) -> Any:
        p, dtype = self._softmax_again(ctx)
        return self.platform.to_dtype(g - p * self._full_sum(g, ctx.classes), dtype)

    def _log_sum_exp_forward(self, ctx: Any, x: Any, largest: Any, exponentials: Any, classes: Classes) -> Any:
        self._keep(ctx, x, largest, exponentials, classes)
        return largest + self.platform.log(exponentials)

    def _log_sum_exp_cotangent(self, ctx: Any, g: Any) -> Any:
        p, dtype = self._softmax_again(ctx)
        return self.platform.to_dtype(p * self._for_parts(g, ctx.classes), dtype)
