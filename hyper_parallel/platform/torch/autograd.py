"""Differentiable functions, and values cached on tensors without keeping anything alive."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.torch.levels import SEEN, refuse_levels
from hyper_parallel.platform.torch.private import any_autocast as _any_autocast
from hyper_parallel.platform.torch.private import bare_apply, current_node, will_execute
from hyper_parallel.platform.torch.private import saved_tensor_hooks as _saved_tensor_hooks

__all__ = ["AutogradVerbs"]

# Not as methods of DTensors, which first ask whether they are to be intercepted.
_view_as, _detach = torch.Tensor.view_as, torch.Tensor.detach
_shape_of, _stride_of, _address_of = torch.Tensor.shape.__get__, torch.Tensor.stride, torch.Tensor.data_ptr
_is_grad_enabled = torch.is_grad_enabled

_PLAIN = frozenset({torch.Tensor, type(None)})
#: What is compared where something was kept for a tensor, besides the version, which ``x.data = y`` leaves as it is:
#: that the view that was kept has the same data; nothing, for DTensors, which forget what was kept; else address, shape
#: and strides.
_SAME_AS_VIEW, _NOTHING = None, ()


class _NoContext:
    """The context of a function that nothing is recorded of."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keep nothing."""


class _Cache(dict):
    """``key -> (value or weak reference, version of the holder, what of its data is compared)``, kept in the attribute
    ``_cached`` of the holder. All values share the memory of the holder, so while one lives no other data can have its
    address.

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

        def run_forward(ctx: Any, x: torch.Tensor, *static: Any) -> torch.Tensor:
            ctx.static_count = len(static)
            with no_dispatch():
                y = forward(ctx, x, *static)
                # As a view of ``x`` the result could not be changed in place.
                return y.detach() if y is x or y._is_view() else y

        def run_backward(ctx: Any, cotangent: torch.Tensor) -> Any:
            with no_dispatch():
                gradient = backward(ctx, _as_plain(cotangent))
            return (gradient, *(None,) * ctx.static_count) if ctx.static_count else gradient

        apply = _bare_apply(getattr(forward, "__name__", "Function").strip("_"), run_forward, run_backward)

        def run(x: torch.Tensor, *static: Any) -> torch.Tensor:
            if SEEN:
                refuse_levels(x)
            if _is_grad_enabled() and x.requires_grad:
                return apply(x, *static)
            with no_dispatch():
                return forward(_NoContext(), x, *static)

        return run

    def autograd_step(
        self, forward: Callable[[Any, torch.Tensor], torch.Tensor], backward: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `Platform.autograd_step`."""
        apply = _bare_apply("Step", forward, _without_context(backward))

        def run(x: torch.Tensor) -> torch.Tensor:
            if SEEN:
                refuse_levels(x)
            return apply(x) if _is_grad_enabled() and x.requires_grad else forward(None, x)

        return run

    def autograd_pair(
        self,
        forward: Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        backward: Callable[[Any, Any], torch.Tensor],
    ) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """See `Platform.autograd_pair`."""

        def run_forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ctx.set_materialize_grads(False)
            return forward(ctx, x)

        return _bare_apply("Pair", run_forward, _without_context(backward))

    def gradient_view(
        self, convert: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], key: Any
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `Platform.gradient_view`: a view with a hook, where an autograd function costs several times as much."""
        read = self.read_cache

        def view(x: torch.Tensor) -> torch.Tensor:
            if SEEN:
                refuse_levels(x)
            if not (_is_grad_enabled() and x.requires_grad):
                return x
            cache = x.__dict__.get("_cached")
            if cache and (found := read(x, key)) is not None:
                return found
            y: Any = _view_as(x, x)
            of_x = partial(convert, x)
            y._backward_hooks = {0: _hook(of_x, of_x)}
            y.grad_fn._register_hook_dict(y)
            if cache is None:
                cache = x.__dict__["_cached"] = _Cache()
            # Weak, see `write_cache`: the operation keeps it.
            cache[key] = (weakref.ref(y), x._version, _SAME_AS_VIEW if type(x) is torch.Tensor else _NOTHING)
            return y

        return view

    def can_delay_gradient(self, parameter: torch.Tensor) -> bool:
        """See `Platform.can_delay_gradient`."""
        # What runs now is the view's own backward, with the node that accumulates next to it if this is a leaf.
        node = current_node()
        accumulation: Any = node.next_functions[0][0] if node is not None else None
        with no_dispatch():
            if parameter._post_accumulate_grad_hooks or getattr(accumulation, "variable", None) is not parameter:
                return False
        try:
            return will_execute(accumulation)
        except RuntimeError:
            return False  # torch refuses the question for leaves inside `autograd.grad`, which accumulates nothing

    def add_to_gradient(self, parameter: torch.Tensor, cotangent: torch.Tensor) -> None:
        """See `Platform.add_to_gradient`."""
        with no_dispatch():
            gradient: Any = parameter.grad
            gradient.add_(cotangent)

    def linear_view(
        self,
        convert: Callable[[torch.Tensor], torch.Tensor],
        record: Callable[[torch.Tensor], torch.Tensor],
        key: Any,
        otherwise: Callable[[torch.Tensor], torch.Tensor],
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """See `Platform.linear_view`: as `gradient_view`, with one table of hooks for all views, and the cache."""
        hooks = OrderedDict({0: _hook(convert, record)})

        def view(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if SEEN:
                refuse_levels(x)
            if not (_is_grad_enabled() and x.requires_grad):
                return x
            cache = x.__dict__.get("_cached")
            if cache:
                # As `read_cache`, of the weak references that are written below.
                entry = cache.get(key)
                if entry is not None and entry[1] == x._version and (found := entry[0]()) is not None:
                    data = entry[2]
                    if (
                        found.is_set_to(x)
                        if data is _SAME_AS_VIEW
                        else data is _NOTHING or data == (_address_of(x), _shape_of(x), _stride_of(x))
                    ):
                        return found
            dims = x.dim()
            if dims < 2 or not weight.requires_grad or _any_autocast() or _saved_tensor_hooks(True) is not None:
                # `F.linear` would keep something else: nothing, a copy in the dtype of autocast, or what hooks on saved
                # tensors (checkpointing, offloading) make of it.
                return otherwise(x)
            # Of a view with more dimensions it would keep a 2-D view, and not that one.
            y: Any = x.view_as(x) if dims == 2 else x.flatten(0, -2)
            y._backward_hooks = hooks
            y.grad_fn._register_hook_dict(y)
            if cache is None:
                cache = x.__dict__["_cached"] = _Cache()
            # Weak, see `write_cache`: the operation keeps it.
            if type(x) is not torch.Tensor:
                compared: Any = _NOTHING
            else:
                compared = _SAME_AS_VIEW if dims == 2 else (_address_of(x), _shape_of(x), _stride_of(x))
            cache[key] = (weakref.ref(y), x._version, compared)
            return y

        return view

    def overwriting(
        self,
        write: Callable[[torch.Tensor], torch.Tensor],
        record: Callable[[torch.Tensor], torch.Tensor],
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `Platform.overwriting`."""
        hooks = OrderedDict({0: _hook(None, record)})

        def apply(y: Any) -> torch.Tensor:
            if not (_is_grad_enabled() and y.requires_grad):
                return write(y)
            data = _detach(y)
            written = write(data)
            if written is not data:
                data.copy_(written)
            y._backward_hooks = hooks
            y.grad_fn._register_hook_dict(y)
            # The graph has the table now. The tensor must not: a hook of its user would go into it.
            y._backward_hooks = None
            return y

        return apply

    def requires_grad(self, x: torch.Tensor) -> bool:
        """See `Platform.requires_grad`."""
        return _is_grad_enabled() and x.requires_grad

    def detach(self, x: torch.Tensor) -> torch.Tensor:
        """See `Platform.detach`."""
        if SEEN:
            refuse_levels(x)
        if type(x) is torch.Tensor:
            return x.detach()
        with no_dispatch():
            return _detach(x)

    def alias(self, x: torch.Tensor) -> torch.Tensor:
        """See `Platform.alias`."""
        with no_dispatch():
            return _view_as(x, x)

    def same_memory(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """See `Platform.same_memory`."""
        return x.untyped_storage()._cdata == y.untyped_storage()._cdata

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
        value = entry[0]
        if type(value) is weakref.ref and (value := value()) is None:
            return None
        if entry[1] != holder._version:
            return None
        data = entry[2]
        if data is _SAME_AS_VIEW:
            return value if value.is_set_to(holder) else None
        same = data is _NOTHING or data == (_address_of(holder), _shape_of(holder), _stride_of(holder))
        return value if same else None

    def write_cache(self, holder: torch.Tensor, key: Any, value: torch.Tensor) -> None:
        """See `Platform.write_cache`.

        A strong reference from a leaf to a value computed from it would be a cycle through its gradient accumulator,
        and one to a view of it a cycle through the view's base: both run through C++, where the garbage collector
        does not see them. There the reference is weak, and the value lives as long as the graph that uses it.
        """
        if not _is_grad_enabled() or holder.is_inference():
            return
        weak = holder.is_leaf or value is holder or value._base is holder
        kept = weakref.ref(value) if weak else value
        plain = type(holder) is torch.Tensor
        data = (_address_of(holder), _shape_of(holder), _stride_of(holder)) if plain else _NOTHING
        entry = (kept, holder._version, data)
        cache = holder.__dict__.get("_cached")
        if cache is None:
            cache = holder.__dict__["_cached"] = _Cache()
        cache[key] = entry

    def clear_cache(self, holder: torch.Tensor) -> None:
        """See `Platform.clear_cache`."""
        holder.__dict__.pop("_cached", None)


def _bare_apply(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` of an autograd function of these methods."""
    function = type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    return bare_apply(function)


def _without_context(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward`` of plain cotangents as a method of an autograd function."""

    def run(ctx: Any, *cotangents: Any) -> Any:
        for cotangent in cotangents:
            if type(cotangent) not in _PLAIN:
                with no_dispatch():
                    return backward(*map(_as_plain, cotangents))
        return backward(*cotangents)

    return run


def _as_plain(cotangent: Any) -> Any:
    """A cotangent as a plain tensor, whatever the user let backward begin with. Interception is off."""
    return cotangent if cotangent is None or type(cotangent) is torch.Tensor else cotangent.as_subclass(torch.Tensor)


def _hook(
    convert: Callable[[torch.Tensor], Any] | None, record: Callable[[torch.Tensor], Any]
) -> Callable[[torch.Tensor], Any]:
    """The hook that changes a cotangent by ``convert``, if at all, and where it has a gradient itself by ``record``.
    Both get plain tensors."""

    def hook(cotangent: torch.Tensor) -> Any:
        change = record if _is_grad_enabled() and cotangent.requires_grad else convert
        if change is None:
            return None
        if type(cotangent) is torch.Tensor:
            return change(cotangent)
        with no_dispatch():
            return change(_as_plain(cotangent))

    return hook
