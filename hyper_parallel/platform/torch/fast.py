"""Verbs that make torch faster than the contract requires: see `hyper_parallel.platform.contract.fast`."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import Fast, LinearCollective
from hyper_parallel.platform.contract.autograd import BACKWARD_WRAPPERS, TensorFunction
from hyper_parallel.platform.torch.basics.gathered_rows import GatheredRows
from hyper_parallel.platform.torch.basics.private import (
    any_autocast,
    chunk_cat,
    current_node,
    dispatching,
    graph_task,
    saved_tensor_hooks,
    set_order,
    will_execute,
)
from hyper_parallel.platform.torch.basics.transforms import MAYBE_INSIDE, refuse_transforms
from hyper_parallel.platform.torch.gradients.autograd import (
    ADDING,
    NOTHING,
    SAME_AS_VIEW,
    Cache,
    address_of,
    as_plain,
    hook_of,
    make_apply,
    name_of,
    shape_of,
    stride_of,
)
from hyper_parallel.platform.torch.gradients.flat_storage import find_flat, move_to_flat
from hyper_parallel.platform.torch.processes import overlap

__all__ = ["TorchFast"]

_detach, is_grad_enabled = Tensor.detach, torch.is_grad_enabled
_PLAIN = frozenset({Tensor, type(None)})
_IS_LEAF, _READ = map(attrgetter, ("is_leaf", "_read_in_backward"))
_HOOKS, _HOOKS_AFTER = map(attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks"))
_NODE = itemgetter(0)


def _hooked(hooks: Mapping[int, Callable[[Tensor], Any]], gradient: Tensor) -> Tensor:
    """Apply the tensor hooks of a parameter to its gradient, and return the result."""
    with dispatching():
        for hook in tuple(hooks.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
    return gradient


def _call(hooks: Mapping[int, Callable[[Tensor], Any]], parameter: Tensor) -> None:
    """Call the hooks of a parameter whose gradient was accumulated."""
    with dispatching():
        for hook in tuple(hooks.values()):
            hook(parameter)


class TorchFast(Fast):
    """`Platform.fast` of the torch backends; ``platform`` is its owner."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform

    # ------------------------------------------------------------------------------------------------ modules
    #: Norm class -> the native function that `torch.nn.functional` calls; see `Fast.norm_call`.
    norm_calls: ClassVar[dict[type, Callable[[Any, Any, Any], Any]]] = {
        nn.LayerNorm: lambda module, x, own: torch.layer_norm(
            x, module.normalized_shape, own["weight"], own["bias"], module.eps
        ),
        nn.RMSNorm: lambda module, x, own: torch.rms_norm(x, module.normalized_shape, own["weight"], module.eps),
    }

    def norm_call(self, module: nn.Module) -> Callable[[Any, Any, Any], Any] | None:
        """Return the forward of a norm with other parameters; see `Fast.norm_call`."""
        return self.norm_calls.get(type(module))

    def is_plain_linear(self, module: Any) -> bool:
        """Return whether a call of ``module`` computes exactly `linear`; see `Fast.is_plain_linear`."""
        return type(module) is nn.Linear

    #: ``x @ weight.T + bias``.
    linear: Any = staticmethod(F.linear)

    # ------------------------------------------------------------------------------------------------ autograd
    def autograd_step(self, forward: Callable[[Any, Tensor], Tensor], backward: TensorFunction) -> TensorFunction:
        """Make a differentiable function that saves nothing for backward; see `Fast.autograd_step`."""
        name = name_of(forward)
        apply = make_apply(name, forward, _without_context(backward))

        def run_attributed(ctx: Any, x: Tensor) -> Tensor:
            ctx._wrapped = BACKWARD_WRAPPERS[-1](backward)
            return forward(ctx, x)

        apply_attributed = make_apply(name, run_attributed, _without_context(backward))

        def run(x: Tensor) -> Tensor:
            if MAYBE_INSIDE:
                refuse_transforms(x)
            if BACKWARD_WRAPPERS and is_grad_enabled() and x.requires_grad:
                return apply_attributed(x)
            return apply(x) if is_grad_enabled() and x.requires_grad else forward(None, x)

        return run

    def autograd_pair(
        self,
        forward: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
        backward: Callable[[Any, Any], Tensor],
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Make a differentiable function with two results; see `Fast.autograd_pair`."""

        def run_forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            ctx.set_materialize_grads(False)
            if BACKWARD_WRAPPERS:
                ctx._wrapped = BACKWARD_WRAPPERS[-1](backward)
            return forward(ctx, x)

        return make_apply(name_of(forward), run_forward, _without_context(backward))

    #: Whether backward runs ready nodes in reverse order of recording.
    backward_in_order = True

    def can_delay_gradient(self, *parameters: Tensor) -> bool:
        """Return whether gradients may be accumulated after backward of a function; see `Fast.can_delay_gradient`."""
        with no_dispatch():
            if not all(map(_IS_LEAF, parameters)) or any(map(_READ, parameters)):
                return False
            if any(map(_HOOKS, parameters)) or any(map(_HOOKS_AFTER, parameters)):
                return False
        if graph_task() in ADDING:
            return True
        # The current node is the function's own backward; its next functions accumulate gradients.
        node = current_node()
        edges = () if node is None else node.next_functions
        if len(edges) != len(parameters):
            return False
        try:
            return all(map(will_execute, map(_NODE, edges)))
        except RuntimeError:
            return False  # torch rejects this query for leaves inside `autograd.grad`, which accumulates nothing

    def add_to_gradients(self, parameters: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> None:
        """Accumulate plain tensors into the gradients of parameters; see `Fast.add_to_gradients`.

        The engine does not see these gradients, so hooks are called here.
        """
        for parameter, cotangent in zip(parameters, cotangents, strict=True):
            if cotangent is not None:
                if hooks := _HOOKS(parameter):
                    cotangent = _hooked(hooks, cotangent)
                gradient: Any = parameter.grad
                if gradient is None:
                    parameter.grad = cotangent
                else:
                    gradient.add_(cotangent)
                if hooks := _HOOKS_AFTER(parameter):
                    _call(hooks, parameter)

    def tell_gradient(self, x: Tensor, call: Callable[[], None]) -> Tensor:
        """Return ``x`` as another tensor, and call ``call`` when its cotangent is complete."""
        y: Any = x.view_as(x)
        y._backward_hooks = OrderedDict({0: lambda cotangent: call()})
        y.grad_fn._register_hook_dict(y)
        y._backward_hooks = None  # see `in_place_step`
        return y

    #: Functions that move parameters into one tensor, and find that tensor.
    move_to_one_storage: Any = staticmethod(move_to_flat)
    in_one_storage: Any = staticmethod(find_flat)

    def pack_rows(self, xs: Sequence[Tensor], size: int) -> Tensor | None:
        """Pack tensors into rows of equal chunks; see `Fast.pack_rows`."""
        if not all(map(Tensor.is_contiguous, xs)):
            xs = [x.contiguous() for x in xs]
        return chunk_cat(xs, 0, size)

    def cut(self, shapes: Sequence[tuple[int, ...]]) -> Callable[[Tensor], list[Tensor]]:
        """Return a function that splits a 1-D tensor by strides, in half the time of `narrow` and `view`."""
        places, start = [], 0
        for shape in shapes:
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            places.append((tuple(shape), tuple(strides), start))
            start += math.prod(shape)
        return lambda x: [x.as_strided(*place) for place in places]

    #: Staging buffer for an all-gather; see `Fast.gathered_rows`.
    gathered_rows: Any = GatheredRows

    def run_soon(self, x: Tensor) -> None:
        """Let backward run the function that returned ``x`` as soon as it can. Torch's engine picks the ready node with
        the highest sequence number."""
        set_order(x.grad_fn, 1 << 62)

    def linear_view(
        self,
        convert: TensorFunction,
        record: TensorFunction,
        key: Any,
        otherwise: TensorFunction,
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function ``view(x, weight)`` that does the same as the result of `gradient_view`, in less time: all
        views share one table of hooks, and the function reads the cache itself."""
        hooks = OrderedDict({0: hook_of(convert, record)})

        def view(x: Tensor, weight: Tensor) -> Tensor:
            if MAYBE_INSIDE:
                refuse_transforms(x)
            if not (is_grad_enabled() and x.requires_grad):
                return x
            cache = x.__dict__.get("_cached")
            if cache:
                # Inlined `Platform.read_cache`, for the weak references that are written below.
                entry = cache.get(key)
                if entry is not None and entry[1] == x._version and (found := entry[0]()) is not None:
                    data = entry[2]
                    if (
                        found.is_set_to(x)
                        if data is SAME_AS_VIEW
                        else data is NOTHING or data == (address_of(x), shape_of(x), stride_of(x))
                    ):
                        return found
            dims = x.dim()
            if dims < 2 or not weight.requires_grad or any_autocast() or saved_tensor_hooks(True) is not None:
                # `F.linear` would save no view: nothing, a copy in the dtype of autocast, or the result of hooks on
                # saved tensors (checkpointing, offloading).
                return otherwise(x)
            # `F.linear` would save a 2-D view of a view with more dimensions, and not that view.
            y: Any = x.view_as(x) if dims == 2 else x.flatten(0, -2)
            y._backward_hooks = hooks
            if BACKWARD_WRAPPERS:
                wrap = BACKWARD_WRAPPERS[-1]
                y._backward_hooks = OrderedDict({0: hook_of(wrap(convert), wrap(record))})
            y.grad_fn._register_hook_dict(y)
            if cache is None:
                cache = x.__dict__["_cached"] = Cache()
            # Weak, see `Platform.write_cache`: the operation keeps the view alive.
            if type(x) is not Tensor:
                compared: Any = NOTHING
            else:
                compared = SAME_AS_VIEW if dims == 2 else (address_of(x), shape_of(x), stride_of(x))
            cache[key] = (weakref.ref(y), x._version, compared)
            return y

        return view

    def in_place_step(
        self,
        write: TensorFunction,
        record: TensorFunction,
    ) -> TensorFunction:
        """Return ``apply(y)``, which writes into ``y`` without a node in the graph; see `Fast.in_place_step`."""
        hooks = OrderedDict({0: hook_of(None, record)})

        def apply(y: Any) -> Tensor:
            if not (is_grad_enabled() and y.requires_grad):
                return write(y)
            data = _detach(y)
            written = write(data)
            if written is not data:
                data.copy_(written)
            y._backward_hooks = hooks
            y.grad_fn._register_hook_dict(y)
            # The graph holds the table now. The tensor must not, or a user's hook would be added to it.
            y._backward_hooks = None
            return y

        return apply

    # ------------------------------------------------------------------------------------------------ overlap
    def linear_with_collective(self, x: Tensor, weight: Tensor, how: LinearCollective) -> Tensor | None:
        """Compute a linear layer overlapped with a collective, in chunks; see `Fast.linear_with_collective`."""
        platform = self.platform
        with no_dispatch():
            reduces = "all_reduce" if how.collective == "all_reduce" else "reduce_scatter"
            if how.chunks < 2 or x.dtype not in platform.moved_dtypes or not platform.supports(reduces, "sum", x):
                return None
            chunks = overlap.chunks_of(x, weight, how)
            if chunks < 2:
                return None
            return overlap.run(x, weight, replace(how, group=platform.native_group(how.group), chunks=chunks))


def _without_context(backward: Callable) -> Callable:
    """Wrap ``backward``, which takes plain cotangents, as a static method of an autograd function."""

    def run(ctx: Any, *cotangents: Any) -> Any:
        call = getattr(ctx, "_wrapped", backward) if BACKWARD_WRAPPERS else backward
        for cotangent in cotangents:
            if type(cotangent) not in _PLAIN:
                with no_dispatch():
                    return call(*map(as_plain, cotangents))
        return call(*cotangents)

    return run
