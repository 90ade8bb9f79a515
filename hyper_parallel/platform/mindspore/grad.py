"""Gradients of functions with distributed parameters and inputs, as DTensors: what `hyper_parallel.mindspore` calls.

MindSpore's own `mindspore.value_and_grad` works on such functions too and is what runs here. It gives plain local
tensors, of which these functions make DTensors placed as the gradient contract says: as the parameter, with
``Replicate`` for ``Partial``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor

from hyper_parallel.platform.mindspore.autograd import DelayedGradients
from hyper_parallel.platform.mindspore.handlers.gradients import LocalGradients
from hyper_parallel.platform.mindspore.tensor import InterceptedTensor

__all__ = ["grad", "value_and_grad", "wrap_gradients"]


def value_and_grad(
    fn: Callable,
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Sequence[Any] | None = None,
    has_aux: bool = False,
) -> Callable[..., tuple]:
    """See `hyper_parallel.mindspore.value_and_grad`."""
    plain = ms.value_and_grad(fn, grad_position, weights, has_aux)

    def call(*args: Any, **kwargs: Any) -> tuple:
        with DelayedGradients(weights) as delayed:
            value, gradients = plain(*args, **kwargs)
        return value, _finished(gradients, _sources(args, grad_position, weights), delayed)

    return call


def grad(
    fn: Callable,
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Sequence[Any] | None = None,
    has_aux: bool = False,
) -> Callable:
    """See `hyper_parallel.mindspore.grad`."""
    plain = ms.grad(fn, grad_position, weights, has_aux)

    def call(*args: Any, **kwargs: Any) -> Any:
        with DelayedGradients(weights) as delayed:
            result = plain(*args, **kwargs)
        sources = _sources(args, grad_position, weights)
        if has_aux:
            return _finished(result[0], sources, delayed), result[1]
        return _finished(result, sources, delayed)

    return call


def _finished(gradients: Any, sources: Any, delayed: DelayedGradients) -> Any:
    LocalGradients.forget()
    return wrap_gradients(delayed.complete(gradients, sources), sources)


def wrap_gradients(gradients: Any, sources: Any) -> Any:
    """Make DTensors of the gradients of distributed tensors.

    Args:
        gradients: what `mindspore.grad` or `mindspore.value_and_grad` gave: a tensor or nested tuples.
        sources: what they are gradients of, in the same nesting.
    """
    if isinstance(gradients, (tuple, list)):
        sources = sources if isinstance(sources, (tuple, list)) else (sources,)
        return type(gradients)([wrap_gradients(g, s) for g, s in zip(gradients, sources, strict=True)])
    layout = getattr(sources, "_layout", None)
    if layout is None or not isinstance(gradients, Tensor) or getattr(gradients, "_layout", None) is not None:
        return gradients
    platform = layout.mesh.platform
    if gradients.dtype != sources.dtype:
        # MindSpore gives zeros in single precision for what was not used.
        gradients = gradients.astype(sources.dtype)
    if layout.summed_mesh_dims:
        with platform.no_dispatch():
            gradients = InterceptedTensor._core.to_owner(gradients, layout)
    return platform.wrap(platform.alias(gradients), layout.cotangent)


def _sources(args: tuple, grad_position: Any, weights: Any) -> Any:
    """The tensors that gradients were asked of, nested as MindSpore nests the gradients."""
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
