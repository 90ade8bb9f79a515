"""Gradient clipping: the functions of `torch.nn.utils` run on local gradients, with one all-reduce for the norm.

`platform.torch.patches` wraps these functions. Torch's own code computes the norm of this rank's gradients, and scales
local gradients. In between, core reduces the norms over the ranks.

If a program imported ``clip_grad_norm_`` before the patch, it has torch's own function. Torch's function calls the
wrapped functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch
from torch.nn.utils import clip_grad

from hyper_parallel.platform.torch.basics.tensor import State, layout_of
from hyper_parallel.platform.torch.handlers.foreach import reduced, widened
from hyper_parallel.platform.torch.native.native_dtensors import are_native_apart, from_native, is_native, to_native

__all__ = ["norm_clipping", "scaling_to_norm", "total_norm_of_all", "value_clipping"]


# ---------------------------------------------------------------------------------------------------- the functions


def norm_clipping(original: Any) -> Any:
    """Wrap ``clip_grad_norm_``."""
    tensor_class = State.tensor_class
    # Torch's own functions: nothing has been replaced yet.
    total_norm, clip_with_norm = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_

    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        parameters = _listed(parameters)
        if are_native_apart(parameters, tensor_class) or tensor_class not in map(type, parameters):
            # Torch's function calls the wrapped functions below.
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        max_norm = float(max_norm)
        with torch.no_grad(), no_dispatch():
            gradients, layouts = _gradients(parameters, tensor_class)
            if not any(layouts):
                return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
            with _plain(gradients, tensor_class):
                total, mesh = _global_norm(total_norm, gradients, layouts, norm_type, error_if_nonfinite, foreach)
                clip_with_norm(parameters, max_norm, total, foreach)
        State.core.notice_writes(gradients)
        return State.core.replicated(total, mesh)

    return clip_grad_norm_


def total_norm_of_all(original: Any) -> Any:
    """Wrap ``get_total_norm``."""
    tensor_class = State.tensor_class

    @functools.wraps(original)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Any:
        tensors = _listed(tensors)
        native = are_native_apart(tensors, tensor_class)
        if not native and tensor_class not in map(type, tensors):
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            tensors = [reduced(from_native(x) if native and is_native(x) else x) for x in tensors]
            layouts = [layout_of(x) for x in tensors]
            with no_dispatch(), _plain(tensors, tensor_class):
                total, mesh = _global_norm(original, tensors, layouts, norm_type, error_if_nonfinite, foreach)
        norm = State.core.replicated(total, mesh)
        return to_native(norm) if native else norm

    return get_total_norm


def scaling_to_norm(original: Any) -> Any:
    """Wrap ``clip_grads_with_norm_``."""
    tensor_class = State.tensor_class

    @functools.wraps(original)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None) -> None:
        parameters = _listed(parameters)
        if are_native_apart(parameters, tensor_class):
            parameters = [_LocalGradient(p.grad) for p in parameters]
            total_norm = from_native(total_norm) if is_native(total_norm) else total_norm
        elif tensor_class not in map(type, parameters):
            return original(parameters, max_norm, total_norm, foreach)
        max_norm = float(max_norm)
        with torch.no_grad():
            norm = reduced(total_norm)
            with no_dispatch(), _plain(gradients := _gradients(parameters, tensor_class)[0], tensor_class):
                norm = norm.detach() if type(norm) is tensor_class else norm
                original(parameters, max_norm, norm, foreach)
        State.core.notice_writes(gradients)
        return None

    return clip_grads_with_norm_


def value_clipping(original: Any) -> Any:
    """Wrap ``clip_grad_value_``."""
    tensor_class = State.tensor_class

    @functools.wraps(original)
    def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        parameters = _listed(parameters)
        if tensor_class not in map(type, parameters):
            return original(parameters, clip_value, foreach)
        clip_value = float(clip_value)
        with no_dispatch(), _plain(gradients := _gradients(parameters, tensor_class)[0], tensor_class):
            original(parameters, clip_value, foreach)
        State.core.notice_writes(gradients)
        return None

    return clip_grad_value_


class _LocalGradient:
    """Stand-in for a parameter whose gradient is one of torch's own DTensors: its ``grad`` is the local tensor."""

    def __init__(self, gradient: Any) -> None:
        self.grad = gradient.to_local() if gradient is not None and is_native(gradient) else gradient


def _listed(tensors: Any) -> Any:
    """Return a list that can be read twice. An empty generator stays an empty generator, because torch warns of one."""
    if isinstance(tensors, Tensor):
        return [tensors]
    values = list(tensors)
    return tensors if isinstance(tensors, GeneratorType) and not values else values


def _gradients(parameters: list[Any], tensor_class: Any) -> tuple[list[Any], list[Any]]:
    """Return the existing gradients and their layouts, None for plain gradients. Interception is off."""
    gradients, layouts = [], []
    for p in parameters:
        gradient = p.grad
        if gradient is None:
            continue
        gradients.append(gradient)
        if type(gradient) is tensor_class:
            layouts.append(gradient._layout)
        else:
            # Backward leaves it with that layout; it becomes a DTensor when it is first read.
            layouts.append(p._layout.cotangent if type(p) is tensor_class else None)
    return gradients, layouts


@contextmanager
def _plain(tensors: list[Any], tensor_class: Any) -> Iterator[None]:
    """Turn DTensors into plain tensors inside this context: kernels over lists then take half the time. Interception is
    off."""
    plain_class = tensor_class.__bases__[-1]
    distributed = [x for x in tensors if type(x) is tensor_class]
    try:
        for x in distributed:
            x.__class__ = plain_class
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
    """Return the norm, a plain tensor, and the first mesh. ``tensors`` are plain, ``total_norm`` is torch's
    function."""
    order, device = float(order), tensors[0].device
    # Ranks without tensors, or with tensors of one dtype only, must use the dtype of the others.
    dtype = functools.reduce(torch.promote_types, {_real(x.dtype) for x in tensors})
    wide = widened(dtype)
    total, mesh = State.core.total_norm(
        tensors, layouts, order, lambda some: total_norm(some, order, False, foreach).to(device, wide)
    )
    total = total.to(dtype)
    if error_if_nonfinite:
        # Torch's check, applied to the norm; all ranks have the same one.
        total_norm([total], order, True, foreach)
    return total, mesh


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
