"""Autograd: differentiable functions, and views that are kept for as long as one gradient recording lasts."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from mindspore import Tensor
from mindspore._c_expression import FunctionBase, TensorPy
from mindspore.common._grad_function import _Function
from mindspore.common.api import _no_grad, _pynative_executor

from hyper_parallel.platform.mindspore.tensor import NoDispatch

__all__ = ["AutogradVerbs"]


class _Recording:
    """Which gradient recording is going on.

    MindSpore begins one with ``new_graph`` and ends it with ``end_graph``; nothing says which one a tensor belongs to,
    and ``_version`` does not count most in-place changes. So what was cached in a recording is dropped when it ends or
    another one begins.
    """

    holders: ClassVar[list[weakref.ref]] = []

    @classmethod
    def forget(cls) -> None:
        """Drop what was cached."""
        for ref in cls.holders:
            holder = ref()
            if holder is not None:
                holder.__dict__.pop("_hp_cache", None)
        cls.holders.clear()


def _follow_recordings() -> None:
    for name in ("new_graph", "end_graph"):
        plain = getattr(_pynative_executor, name)

        def followed(*args: Any, _plain: Callable = plain, **kwargs: Any) -> Any:
            _Recording.forget()
            return _plain(*args, **kwargs)

        setattr(_pynative_executor, name, functools.wraps(plain)(followed))


_follow_recordings()

_is_recording = _pynative_executor._executor.requires_grad
#: A plain tensor for the same memory to which nothing leads. `ops.stop_gradient` gives one too, in up to 50 us.
_data = TensorPy.data.__get__


class _Identity(_Function):
    """The same data as a new tensor, whatever its strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _data(x)  # with ``x`` itself, or a view of it, gradients of gradients would be zero

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


_identity = _Identity.apply
_bare_apply = FunctionBase.__dict__["apply"]


class AutogradVerbs:
    """The group "autograd" of the contract."""

    def requires_grad(self, x: Any) -> bool:
        return _is_recording() and x._requires_grad

    def autograd_function(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
        def run_forward(ctx: Any, x: Any, *static: Any) -> Any:
            ctx.count = len(static)
            with NoDispatch():
                return forward(ctx, x, *static)

        def run_backward(ctx: Any, cotangent: Any) -> Any:
            with NoDispatch():
                return (backward(ctx, cotangent), *(None,) * ctx.count) if ctx.count else backward(ctx, cotangent)

        name = getattr(forward, "__qualname__", "function").replace("<locals>.", "")
        function: Any = type(
            name, (_Function,), {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
        )
        # `_Function.apply` without its Python part, which is there for another kind of functions.
        return _bare_apply.__get__(None, function)

    def linear_view(self, convert: Callable[[Any], Any], key: Any) -> Callable[[Any, Any], Any]:
        # For linear layers alone, because nobody else holds the cotangents that they return.
        view = self.autograd_function(lambda ctx, x: self.detach(x), lambda ctx, cotangent: convert(cotangent))

        def view_of(x: Any, weight: Any) -> Any:
            found = self.read_cache(x, key)
            if found is None:
                found = view(x)
                self.write_cache(x, key, found)
            return found

        return view_of

    def detach(self, x: Any) -> Any:
        return _data(x)

    def alias(self, x: Any) -> Any:
        if not self.requires_grad(x):
            return _data(x)
        with NoDispatch():
            return x.view(tuple(x.shape)) if x.is_contiguous() else _identity(x)

    def no_grad(self) -> AbstractContextManager:
        return _no_grad()

    # Outside a recording nothing is stored, because nothing tells whether the holder was written to since.
    def read_cache(self, holder: Any, key: Any) -> Any:
        cache = holder.__dict__.get("_hp_cache")
        return None if cache is None or not _is_recording() else cache.get(key)

    def write_cache(self, holder: Any, key: Any, value: Any) -> None:
        if not _is_recording():
            return
        cache = holder.__dict__.get("_hp_cache")
        if cache is None:
            holder._hp_cache = cache = {}
            _Recording.holders.append(weakref.ref(holder))
        cache[key] = value

    def clear_cache(self, holder: Any) -> None:
        holder.__dict__.pop("_hp_cache", None)
