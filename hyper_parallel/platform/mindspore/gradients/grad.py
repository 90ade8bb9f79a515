"""Gradients of functions with distributed parameters and inputs, as DTensors: the functions of
`hyper_parallel.mindspore`.

MindSpore's own `mindspore.value_and_grad` computes the gradients, as plain local tensors. The functions of this module
turn these gradients into DTensors. A gradient has the placements of its parameter, with ``Replicate`` in place of
``Partial``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor

from hyper_parallel.platform.mindspore.basics.private import with_ids
from hyper_parallel.platform.mindspore.gradients.autograd import DelayedGradients
from hyper_parallel.platform.mindspore.gradients.local_gradients import LocalGradients
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor

__all__ = ["grad", "value_and_grad", "wrap_gradients"]


def value_and_grad(
    fn: Callable,
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Sequence[Any] | None = None,
    has_aux: bool = False,
    return_ids: bool = False,
    sens_param: bool = False,
) -> Callable[..., tuple]:
    """Return a function that computes value and gradients: see `hyper_parallel.mindspore.value_and_grad`."""
    plain = ms.value_and_grad(
        _weighted(fn, has_aux) if sens_param else fn, grad_position, weights, has_aux or sens_param
    )

    def call(*args: Any, **kwargs: Any) -> tuple:
        if sens_param and "sens" in kwargs:
            args = (*args, kwargs.pop("sens"))
        with DelayedGradients(weights) as delayed:
            value, gradients = plain(*args, **kwargs)
        gradients = _finished(gradients, _sources(args, grad_position, weights), delayed)
        if return_ids:
            gradients = with_ids(_positions(grad_position), weights, gradients)
        return value[1] if sens_param else value, gradients

    return call


def grad(
    fn: Callable,
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Sequence[Any] | None = None,
    has_aux: bool = False,
    return_ids: bool = False,
    sens_param: bool = False,
) -> Callable:
    """Return a function that computes gradients: see `hyper_parallel.mindspore.grad`."""
    both = value_and_grad(fn, grad_position, weights, has_aux, return_ids, sens_param)

    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1:]) if has_aux else gradients

    return call


def _positions(grad_position: Any) -> tuple[int, ...] | None:
    return (grad_position,) if isinstance(grad_position, int) else grad_position


def _weighted(fn: Callable, has_aux: bool) -> Callable:
    """Return a function of the inputs of ``fn`` and a sensitivity. The new function returns the sum of outputs times
    sensitivity, and the outputs.

    MindSpore would use this rank's shard of a sensitivity as if it were the full one, however it is placed.
    """

    def weighted(*args: Any, **kwargs: Any) -> tuple:
        outputs = fn(*args[:-1], **kwargs)
        return _sum_of_products(outputs[0] if has_aux else outputs, args[-1]), outputs

    return weighted


def _sum_of_products(outputs: Any, sens: Any) -> Any:
    if isinstance(outputs, (tuple, list)):
        if not isinstance(sens, (tuple, list)) or len(sens) != len(outputs):
            raise ValueError(
                f"the function has {len(outputs)} outputs: pass a tuple with one sensitivity for each output, as the "
                "last argument or sens="
            )
        return sum(_sum_of_products(output, s) for output, s in zip(outputs, sens, strict=True))
    if tuple(sens.shape) != tuple(outputs.shape):
        raise ValueError(
            f"the output has shape {tuple(outputs.shape)}, but its sensitivity has shape {tuple(sens.shape)}: pass a "
            "sensitivity of the same shape"
        )
    return (outputs * sens.astype(outputs.dtype)).sum()


def _finished(gradients: Any, sources: Any, delayed: DelayedGradients) -> Any:
    LocalGradients.forget()
    return wrap_gradients(delayed.complete(gradients, sources), sources)


def wrap_gradients(gradients: Any, sources: Any) -> Any:
    """Turn the gradients of DTensors into DTensors.

    Args:
        gradients: the result of `mindspore.grad` or `mindspore.value_and_grad`: a tensor or nested tuples.
        sources: the tensors that were differentiated by, in the same nesting.
    """
    if isinstance(gradients, (tuple, list)):
        sources = sources if isinstance(sources, (tuple, list)) else (sources,)
        return type(gradients)([wrap_gradients(g, s) for g, s in zip(gradients, sources, strict=True)])
    layout = getattr(sources, "_layout", None)
    if layout is None or not isinstance(gradients, Tensor) or getattr(gradients, "_layout", None) is not None:
        return gradients
    if gradients.dtype != sources.dtype:
        # MindSpore returns zeros in single precision for unused tensors.
        gradients = gradients.astype(sources.dtype)
    return InterceptedTensor._core.for_user(gradients, layout)


def _sources(args: tuple, grad_position: Any, weights: Any) -> Any:
    """Return the tensors whose gradients were asked for, nested as MindSpore nests the gradients."""
    inputs: Any = None
    if isinstance(grad_position, int):
        inputs = args[grad_position]
    elif grad_position is not None:
        inputs = tuple(args[i] for i in grad_position)
        inputs = inputs[0] if len(inputs) == 1 else inputs
    if weights is None:
        return inputs
    of_weights = tuple(weights) if isinstance(weights, (tuple, list)) else weights
    return of_weights if inputs is None else (inputs, of_weights)
