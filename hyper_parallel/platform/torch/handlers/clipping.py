"""Gradient clipping: the functions of `torch.nn.utils` work on local gradients, with one all-reduce for the norm.

They are wrapped (`platform.torch.patches`). Torch's own code computes the norm of the gradients that this
rank counts, and scales local gradients; core adds up what the ranks counted in between.

A program that imported ``clip_grad_norm_`` before that has torch's own function, which calls the wrapped ones.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch
from torch.nn.utils import clip_grad

from hyper_parallel.platform.torch.handlers.foreach import reduced, widened
from hyper_parallel.platform.torch.tensor import State, is_dtensor, layout_of

__all__ = ["norm_clipping", "scaling_to_norm", "total_norm_of_all", "value_clipping"]


# ---------------------------------------------------------------------------------------------------- the functions


def _where_distributed(original: Callable) -> Callable[[Callable], Callable]:
    """Decorator of a function with the arguments of torch's ``original``, which is called if none of the tensors that
    come first is distributed. Either gets a list that can be gone through twice."""

    def decorate(function: Callable) -> Callable:
        (first, *_) = inspect.signature(function).parameters

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs.pop(first)
            tensors = [given] if isinstance(given, Tensor) else list(given)
            if State.tensor_class in map(type, tensors):
                return function(tensors, *args[1:], **kwargs)
            # An empty generator stays what it is: torch warns of one.
            return original(given if isinstance(given, GeneratorType) and not tensors else tensors, *args[1:], **kwargs)

        return run

    return decorate


def norm_clipping(original: Callable) -> Callable:
    """What stands for ``clip_grad_norm_``."""
    # Torch's own as well: nothing has been replaced yet.
    total_norm, clip_with_norm = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_

    @_where_distributed(original)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        max_norm = float(max_norm)
        with torch.no_grad(), no_dispatch():
            gradients, layouts = _gradients(parameters)
            if not any(layouts):
                return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
            with _plain(gradients):
                total, mesh = _global_norm(total_norm, gradients, layouts, norm_type, error_if_nonfinite, foreach)
                clip_with_norm(parameters, max_norm, total, foreach)
        return State.core.replicated(total, mesh)

    return clip_grad_norm_


def total_norm_of_all(original: Callable) -> Callable:
    """What stands for ``get_total_norm``."""

    @_where_distributed(original)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Any:
        with torch.no_grad():
            tensors = [reduced(x) for x in tensors]
            layouts = [layout_of(x) for x in tensors]
            with no_dispatch(), _plain(tensors):
                total, mesh = _global_norm(original, tensors, layouts, norm_type, error_if_nonfinite, foreach)
        return State.core.replicated(total, mesh)

    return get_total_norm


def scaling_to_norm(original: Callable) -> Callable:
    """What stands for ``clip_grads_with_norm_``."""

    @_where_distributed(original)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None) -> None:
        max_norm = float(max_norm)
        with torch.no_grad():
            norm = reduced(total_norm)
            with no_dispatch(), _plain(_gradients(parameters)[0]):
                return original(parameters, max_norm, norm.detach() if is_dtensor(norm) else norm, foreach)

    return clip_grads_with_norm_


def value_clipping(original: Callable) -> Callable:
    """What stands for ``clip_grad_value_``."""

    @_where_distributed(original)
    def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        with no_dispatch(), _plain(_gradients(parameters)[0]):
            return original(parameters, float(clip_value), foreach)

    return clip_grad_value_


def _gradients(parameters: list[Any]) -> tuple[list[Any], list[Any]]:
    """The gradients there are and their layouts, None for plain ones. Interception is off."""
    tensor_class, gradients, layouts = State.tensor_class, [], []
    for p in parameters:
        gradient = p.grad
        if gradient is None:
            continue
        gradients.append(gradient)
        if type(gradient) is tensor_class:
            layouts.append(gradient._layout)
        else:
            # Backward leaves it with the right layout, and it is tagged when somebody looks at it.
            layouts.append(p._layout.cotangent if type(p) is tensor_class else None)
    return gradients, layouts


@contextmanager
def _plain(tensors: list[Any]) -> Iterator[None]:
    """Let distributed tensors be plain ones: kernels over lists then take half of the time. Interception is off."""
    tensor_class = State.tensor_class
    distributed = [x for x in tensors if type(x) is tensor_class]
    try:
        for x in distributed:
            x.__class__ = tensor_class.__bases__[-1]
        yield
    finally:
        for x in distributed:
            x.__class__ = tensor_class


# ---------------------------------------------------------------------------------------------------- the norm


def _global_norm(
    total_norm: Callable[..., Tensor],
    tensors: list[Any],
    layouts: list[Any],
    order: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> tuple[Tensor, Any]:
    """The norm, a plain tensor, and the first mesh. ``tensors`` are plain, ``total_norm`` is torch's function."""
    order, device = float(order), tensors[0].device
    # Ranks that count nothing, or tensors of one dtype only, must agree with the others.
    dtype = functools.reduce(torch.promote_types, {_real(x.dtype) for x in tensors})
    wide = widened(dtype)
    total, mesh = State.core.total_norm(
        tensors, layouts, order, lambda some: total_norm(some, order, False, foreach).to(device, wide)
    )
    total = total.to(dtype)
    if error_if_nonfinite:
        # Of one number; all ranks have the same one.
        total_norm([total], order, True, foreach)
    return total, mesh


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
