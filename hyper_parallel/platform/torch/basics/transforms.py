"""Function transforms and forward-mode AD, which DTensors do not support.

`torch.func` and `torch.vmap` compute with tensors that wrap other tensors. Forward-mode AD computes with tensors that
carry a tangent. To the transform, a DTensor inside such a tensor is a plain local tensor. A collective reads the inner
tensor: one value of the batch, or the value without its tangent. In both cases torch reports no error. So the verbs
between local tensors and other ranks raise while a transform is active.

The check costs as much as a view. So it runs only while `MAYBE_INSIDE` is not empty: from the first wrapped tensor
until a check finds that the transform has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch import Tensor

from hyper_parallel.platform.torch.basics.private import dual_level, is_batched, old_vmap_level, transform_level

__all__ = ["MAYBE_INSIDE", "refuse_transforms", "remember_opening", "remember_wrapping"]

#: Threads that have entered a transform, and were not yet found outside it.
MAYBE_INSIDE: dict[int, bool] = {}

_BATCHED = "autograd.grad(is_grads_batched=True) or jacobian(vectorize=True)"
_REMEDY = (
    "compute gradients with torch.autograd.grad or backward(), one call for each output. For products with Hessians "
    "and Jacobians use create_graph=True. In place of vmap use a batch dimension or a loop. Or gather the tensors "
    "with full_tensor() before the transform"
)


def refuse_transforms(x: Tensor | None = None) -> None:
    """Raise if a transform is active in this thread. Called only if `MAYBE_INSIDE` is not empty.

    Args:
        x: the local tensor that is about to be read. It shows batched cotangents in threads in which devices run
            backward, where transforms of another thread are not visible.

    Raises:
        ValueError: a transform is active. It is active on all ranks, since they run the same program.
    """
    name = _open_transform() or (_BATCHED if x is not None and is_batched(x) else None)
    if name is not None:
        raise ValueError(_message(name))
    MAYBE_INSIDE.pop(get_ident(), None)


def _open_transform() -> str | None:
    if dual_level() >= 0:
        return "forward-mode AD (torch.func.jvp, torch.autograd.forward_ad)"
    if transform_level() is not None:
        return "a transform of torch.func or torch.vmap"
    return _BATCHED if old_vmap_level() else None


def _message(name: str) -> str:
    return f"distributed tensors and parallelised modules do not work inside {name}: {_REMEDY}"


def remember_wrapping(original: Callable, tensor: Any, *args: Any) -> Any:
    """Replace the function of a transform that wraps one tensor: note the transform, and reject DTensors."""
    if getattr(tensor, "_layout", None) is not None:
        raise ValueError(_message("a transform of torch.func or torch.vmap"))
    return remember_opening(original, tensor, *args)


def remember_opening(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Replace a function that enters a transform: note the transform."""
    MAYBE_INSIDE[get_ident()] = True
    return original(*args, **kwargs)
