"""Function transforms and forward-mode AD, which distributed tensors do not go through.

`torch.func` and `torch.vmap` compute with tensors that they put around others, forward-mode AD with tensors that carry
a tangent. To the function, a DTensor inside of one is a plain local tensor. A collective reads the inner tensor: one
value of the batch, the value without its tangent. Neither is an error by itself. So the verbs that stand between local
tensors and other ranks refuse while a transform is open.

Asking torch costs as much as a view, so it is asked only after something was wrapped: `MAYBE_INSIDE` is empty until
then, and again when the transform is found closed.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch import Tensor

from hyper_parallel.platform.torch.basics.private import dual_level, is_batched, old_vmap_level, transform_level

__all__ = ["MAYBE_INSIDE", "refuse_transforms", "remember_opening", "remember_wrapping"]

#: Threads that have opened a transform and not been found outside of it since.
MAYBE_INSIDE: dict[int, bool] = {}

_BATCHED = "autograd.grad(is_grads_batched=True) or jacobian(vectorize=True)"
_REMEDY = (
    "differentiate with torch.autograd.grad or backward(), one call for each output, and with create_graph=True for "
    "products with Hessians and Jacobians; in place of vmap use a batch dimension or a loop; or gather the tensors "
    "with full_tensor() before the transform"
)


def refuse_transforms(x: Tensor | None = None) -> None:
    """Raise when a transform is open in this thread. To be called unless `MAYBE_INSIDE` is empty.

    Args:
        x: the local tensor that is about to be read, which tells of batched cotangents in the threads in which devices
            run backward. Transforms that are open in another thread are not known there.

    Raises:
        ValueError: a transform is open. It is on all ranks, since they run the same program.
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
    """Stands for the function of a transform that wraps one tensor: notes that there is one, and refuses DTensors."""
    if getattr(tensor, "_layout", None) is not None:
        raise ValueError(_message("a transform of torch.func or torch.vmap"))
    return remember_opening(original, tensor, *args)


def remember_opening(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Stands for a function that opens a transform: notes that there is one."""
    MAYBE_INSIDE[get_ident()] = True
    return original(*args, **kwargs)
