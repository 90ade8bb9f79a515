"""Softmax and its logarithms. The normalised dimension may be sharded, too, and stays sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.rules.classes import Classes
from hyper_parallel.core.rules.labels import axes, axis, named, unary, whole, without
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding
from hyper_parallel.core.rules.registry import rule
from hyper_parallel.core.rules.vocab_parallel import VocabParallel, vocab_parallel_of

_TAKES = "x | dim=-1 dtype=None"


def _along(function: Callable[[VocabParallel, Any, Classes], Any]) -> Callable[[tuple, tuple], OpSharding | None]:
    def softmax(shapes: tuple, static_args: tuple) -> OpSharding | None:
        """Softmax or log-softmax along one dimension, which may be sharded."""
        x, dim = shapes[0], static_args[0]
        if not x:
            return unary((), (), ())
        dim = axis(dim, len(x))

        def run(call: LocalCall) -> Any:
            platform = call.platform
            classes = Classes.along(call.operand_layouts[0], dim)
            dtype = call.static_args[1] if len(call.static_args) > 1 else None
            local = call.operands[0] if dtype is None else platform.to_dtype(call.operands[0], dtype)
            return platform.to_dtype(function(vocab_parallel_of(platform), local, classes), local.dtype)

        labels = named(x)
        return unary(labels, labels, x, call=run, native_if=lambda layouts: Classes.of(layouts[0], dim) is None)

    return softmax


rule("softmax", _TAKES, repeatable=True)(_along(VocabParallel.softmax))
rule("log_softmax", _TAKES, repeatable=True)(_along(VocabParallel.log_softmax))


@rule("logsumexp", "x | dims=None keepdim=False")
def logsumexp(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Logarithm of the sum of exponentials, over one dimension, which may be sharded, or several unsharded ones."""
    x, (dims, keepdim) = shapes[0], static_args[:2]
    reduced = axes(dims, len(x))
    labels = named(x) if len(reduced) == 1 else whole(named(x), reduced)
    return unary(
        labels,
        without(labels, reduced, keepdim),
        without(x, reduced, keepdim, 1),
        combined=tuple(labels[d] for d in reduced if labels[d] is not None),
        call=_log_sum_exp if len(reduced) == 1 else None,
        native_if=lambda layouts: len(reduced) != 1 or Classes.of(layouts[0], min(reduced)) is None,
    )


def _log_sum_exp(call: LocalCall) -> Any:
    (dim,) = axes(call.static_args[0], call.operand_layouts[0].ndim)
    classes = Classes.along(call.operand_layouts[0], dim)
    (x,) = call.operands
    if not call.platform.is_floating_point(x):
        x = x * 1.0  # integers become the framework's default dtype
    y = call.platform.to_dtype(vocab_parallel_of(call.platform).log_sum_exp(x, classes), x.dtype)
    return y.reshape(call.result_layouts[0].local_shape)
