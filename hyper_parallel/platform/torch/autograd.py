"""Differentiable functions, and values cached on tensors without keeping anything alive."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.base import Platform

__all__ = ["AutogradVerbs"]

_is_grad_enabled = torch.is_grad_enabled


class _Cache(dict):
    """``key -> (value or weak reference, version of the holder)``, kept in the ``_cached`` attribute of the holder.

    It belongs to that one tensor object: a copy of the tensor, or one that was saved and loaded, starts empty.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict) -> _Cache:
        return _Cache()

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # A class that torch.load(weights_only=True) accepts.
        return (OrderedDict, ())


class AutogradVerbs(Platform):
    """The autograd verbs of `Platform`."""

    def autograd_function(
        self, forward: Callable[..., torch.Tensor], backward: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        """See `Platform.autograd_function`."""

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, *static: Any) -> torch.Tensor:
                ctx.static_count = len(static)
                with no_dispatch():
                    y = forward(ctx, x, *static)
                    # As a view of ``x`` the result could not be changed in place.
                    return y.detach() if y is x or y._is_view() else y

            @staticmethod
            def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
                with no_dispatch():
                    if type(cotangent) is not torch.Tensor:
                        cotangent = cotangent.as_subclass(torch.Tensor)
                    gradient = backward(ctx, cotangent)
                return (gradient, *(None,) * ctx.static_count) if ctx.static_count else gradient

        Function.__name__ = Function.__qualname__ = getattr(forward, "__name__", "Function").strip("_")
        # `Function.apply` without torch's Python wrapper, which is there for functorch and takes half of the time.
        base: Any = torch._C._FunctionBase
        return base.__dict__["apply"].__get__(None, Function)

    def requires_grad(self, x: torch.Tensor) -> bool:
        """See `Platform.requires_grad`."""
        return _is_grad_enabled() and x.requires_grad

    def detach(self, x: torch.Tensor) -> torch.Tensor:
        """See `Platform.detach`."""
        with no_dispatch():
            return x.detach()

    def alias(self, x: torch.Tensor) -> torch.Tensor:
        """See `Platform.alias`."""
        with no_dispatch():
            return x.view_as(x)

    def no_grad(self) -> AbstractContextManager:
        """See `Platform.no_grad`."""
        return torch.no_grad()

    def read_cache(self, holder: torch.Tensor, key: Any) -> torch.Tensor | None:
        """See `Platform.read_cache`."""
        cache = holder.__dict__.get("_cached")
        if not cache or not _is_grad_enabled():
            return None
        entry = cache.get(key)
        if entry is None:
            return None
        value, version = entry
        if version != _version(holder):
            return None
        return value() if type(value) is weakref.ref else value

    def write_cache(self, holder: torch.Tensor, key: Any, value: torch.Tensor) -> None:
        """See `Platform.write_cache`.

        A strong reference from a leaf to a value computed from it would be a cycle through its gradient accumulator,
        and one to a view of it a cycle through the view's base: both run through C++, where the garbage collector
        does not see them. There the reference is weak, and the value lives as long as the graph that uses it.
        """
        with no_dispatch():
            if not _is_grad_enabled() or holder.is_inference():
                return
            weak = holder.is_leaf or value is holder or value._base is holder
            entry = (weakref.ref(value) if weak else value, holder._version)
        cache = holder.__dict__.get("_cached")
        if cache is None:
            cache = holder.__dict__["_cached"] = _Cache()
        cache[key] = entry

    def clear_cache(self, holder: torch.Tensor) -> None:
        """See `Platform.clear_cache`."""
        holder.__dict__.pop("_cached", None)


def _version(holder: torch.Tensor) -> int:
    with no_dispatch():
        return holder._version
