"""Autograd: differentiable functions, and views that are cached for one gradient recording."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from mindspore import Tensor, nn, ops

from hyper_parallel.platform.contract import cached_view
from hyper_parallel.platform.contract.autograd import BACKWARD_WRAPPERS
from hyper_parallel.platform.mindspore.basics.dtypes import DISCRETE
from hyper_parallel.platform.mindspore.basics.private import (
    AutogradFunction,
    FunctionBase,
    drop_recordings,
    grad_node,
    is_recording,
    no_grad,
    nodes_below,
    untracked,
)
from hyper_parallel.platform.mindspore.gradients.local_gradients import LocalGradients
from hyper_parallel.platform.mindspore.tensors.gradient_hooks import hooked
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, NoDispatch

__all__ = [
    "AutogradVerbs",
    "DelayedGradients",
    "FastAutograd",
    "closed_forward",
    "counted_backward",
    "counted_begin",
    "counted_end",
]


class _Recording:
    """State of the running gradient recording.

    MindSpore starts a recording with ``new_graph`` and ends it with ``end_graph``. Nothing shows which recording a
    tensor belongs to, and ``_version`` does not count most in-place changes. So values cached in a recording are
    discarded when it ends or another recording starts.
    """

    holders: ClassVar[list[weakref.ref]] = []
    #: Numbers of nested forwards that are being recorded, and of backwards that run.
    forwards = 0
    backwards = 0
    #: Number of nested functions that run and whose gradients are asked for.
    functions = 0
    #: Functions to call after each of the running backwards: if it succeeds, and if it fails.
    callbacks: ClassVar[dict[int, list[tuple[Callable[[], None], Callable[[], None]]]]] = {}

    @classmethod
    def forget(cls) -> None:
        """Discard cached values."""
        for ref in cls.holders:
            holder = ref()
            if holder is not None:
                holder.__dict__.pop("_hp_cache", None)
        cls.holders.clear()


def counted_begin(plain: Callable, *args: Any, **kwargs: Any) -> Any:
    """Replace the start of a recording, to count it."""
    _Recording.forwards += 1
    _Recording.forget()
    return plain(*args, **kwargs)


def counted_end(plain: Callable, executor: Any, function: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the end of a recording, to count it and reduce its outputs."""
    if is_recording():
        output = _reduced(output)
    # The first DTensor may have been made inside it, after its uncounted start.
    _Recording.forwards = max(0, _Recording.forwards - 1)
    _Recording.forget()
    return plain(executor, function, output, *args, **kwargs)


def closed_forward(plain: Callable) -> Callable:
    """Wrap the forward of a function or cell whose gradient is asked for.

    After an error of one of its operations MindSpore ends the recording. After any other error, such as an error of
    this library, the recording continues. MindSpore then treats later operations as part of a nested gradient. In such
    nested gradients, some operations run other kernels, and some have no kernel. After an error on one rank alone, its
    later computations would differ from those of the other ranks. So this function ends the recording.
    """

    @functools.wraps(plain)
    def forward(function: Any, *args: Any, **kwargs: Any) -> Any:
        _Recording.functions += 1
        requires_grad = function.requires_grad if isinstance(function, nn.Cell) else None
        try:
            return plain(function, *args, **kwargs)
        except BaseException:
            # Not for an inner function, nor within a backward: a caller may catch the error while the outer function
            # goes on.
            if _Recording.functions == 1 and not _Recording.backwards:
                drop_recordings()
                _Recording.forget()
                _Recording.forwards = 0
            if requires_grad is not None:
                # A cell that considers itself outermost would end the recording of another function.
                function.requires_grad, function.is_top_cell = requires_grad, False
            raise
        finally:
            _Recording.functions -= 1

    return forward


def _reduced(output: Any) -> Any:
    """Return the outputs at which backward starts.

    A partial output that is not a sum is reduced, and backward starts at the reduced tensor. For an average, an extreme
    value or a product, some ranks get no gradient, or a part of it.
    """
    if isinstance(output, (tuple, list)):
        new = [_reduced(y) for y in output]
        return output if all(a is b for a, b in zip(new, output, strict=True)) else type(output)(new)
    layout = getattr(output, "_layout", None)
    if layout is None or all(not p.is_partial() or p.is_partial("sum") for p in layout.placements):
        return output
    return output.redistribute(placements=layout.cotangent.placements)


def counted_backward(plain: Callable) -> Callable:
    """Wrap the function that runs backward, for callbacks after it and marks of its gradients."""

    @functools.wraps(plain)
    def grad(*args: Any, **kwargs: Any) -> Any:
        _Recording.backwards += 1
        complete = False
        try:
            result = plain(*args, **kwargs)
            complete = True
        finally:
            callbacks = _Recording.callbacks.pop(_Recording.backwards, ())
            _Recording.backwards -= 1
            for succeeded, failed in callbacks:
                (succeeded if complete else failed)()
        LocalGradients.mark(result, args[2], args[3])
        if not DelayedGradients.contexts:
            LocalGradients.tell(args[2])
        return result

    return grad


class _Identity(AutogradFunction):
    """Identity whose result is a new tensor with the same data, for any strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return untracked(x)  # with ``x`` itself, or a view of it, gradients of gradients would be zero

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


_identity = _Identity.apply
_bare_apply = FunctionBase.__dict__["apply"]


class DelayedGradients:
    """Gradients of parameters that are delayed inside `coalesce_gradients` while one outermost backward runs.

    After the backward, one collective all-reduces them. Used as a context around `mindspore.grad` or
    `mindspore.value_and_grad`; `complete` adds these gradients to the result.

    Args:
        weights: the tensors whose gradients are asked for.
    """

    #: The open contexts, innermost last.
    _open: ClassVar[list[DelayedGradients]] = []
    #: Number of open contexts, including those outside `coalesce_gradients`.
    contexts: ClassVar[int] = 0

    def __init__(self, weights: Any) -> None:
        self._sums: dict[int, Tensor] = {}
        self._waits = frozenset(map(id, weights if isinstance(weights, (tuple, list)) else (weights,)))
        # A recorded gradient, for gradients of gradients, must contain the collective.
        core = None if is_recording() else InterceptedTensor._core
        self._block: AbstractContextManager | None = None if core is None else core.open_block()

    def __enter__(self) -> DelayedGradients:
        DelayedGradients.contexts += 1
        if self._block is not None:
            self._outside = (_Recording.forwards, _Recording.backwards + 1)
            self._open.append(self)
            self._block.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        DelayedGradients.contexts -= 1
        if self._block is not None:
            try:
                self._block.__exit__(*exc_info)
            finally:
                self._open.remove(self)

    @classmethod
    def take(cls, parameter: Any) -> bool:
        """Return whether the running backward belongs to the innermost context, and that context delays ``parameter``.

        False for a backward that runs inside the differentiated function, which would read an incomplete gradient.
        """
        if not cls._open or is_recording():
            return False
        here = cls._open[-1]
        return id(parameter) in here._waits and here._outside == (_Recording.forwards, _Recording.backwards)

    @classmethod
    def add(cls, parameter: Any, gradient: Tensor) -> None:
        """Accumulate ``gradient`` for `complete`."""
        sums, key = cls._open[-1]._sums, id(parameter)
        sums[key] = sums[key] + gradient if key in sums else gradient

    def complete(self, gradients: Any, sources: Any) -> Any:
        """Return ``gradients`` of ``sources``, nested in the same way, plus the all-reduced gradients."""
        if not self._sums:
            return gradients
        if isinstance(gradients, (tuple, list)):
            sources = sources if isinstance(sources, (tuple, list)) else (sources,)
            return type(gradients)([self.complete(g, s) for g, s in zip(gradients, sources, strict=True)])
        more = self._sums.get(id(sources))
        return gradients if more is None else gradients + more


def _zeros(shape: tuple[int, ...], dtype: Any) -> Tensor:
    return ops.zeros(shape, dtype)


class AutogradVerbs:
    """MindSpore's implementation of `AutogradRole` and `PassRole`."""

    def requires_grad(self, x: Any) -> bool:
        # MindSpore reports it also for a mask of a tensor that requires a gradient, unless the mask is empty.
        return is_recording() and x._requires_grad and x.dtype not in DISCRETE

    def is_made_with(self, x: Any, parameter: Any) -> bool | None:
        """Return whether the recorded graph of ``x`` leads back to ``parameter``; see `Platform.is_made_with`."""
        if isinstance(parameter, type):
            return None
        node = grad_node(parameter)
        return (
            None
            if x._is_leaf or grad_node(x) is None
            else node is not None and node._unique_id() in nodes_below(grad_node(x))
        )

    def in_backward(self) -> bool:
        return _Recording.backwards > 0

    def backward_is_recorded(self) -> bool:
        return is_recording()

    def backward_pass(self) -> Any:
        return _Recording.backwards or None

    def after_backward(self, callback: Callable[[], None], failed: Callable[[], None] = lambda: None) -> None:
        _Recording.callbacks.setdefault(_Recording.backwards, []).append((callback, failed))

    def autograd_function(self, forward: Callable, backward: Callable) -> Callable:
        def run_forward(ctx: Any, x: Any, *static: Any) -> Any:
            ctx.count = len(static)
            if BACKWARD_WRAPPERS:
                ctx.wrapped = BACKWARD_WRAPPERS[-1](backward)
            with NoDispatch():
                y = forward(ctx, x, *static)
            ctx.shape = y.shape
            return y

        def run_backward(ctx: Any, cotangent: Any) -> Any:
            call = getattr(ctx, "wrapped", backward) if BACKWARD_WRAPPERS else backward
            with NoDispatch():
                if len(cotangent.shape) != len(ctx.shape):
                    # The gradient of a product of (1, k) and a matrix has an additional dimension of size 1.
                    cotangent = cotangent.reshape(ctx.shape)
                return (call(ctx, cotangent), *(None,) * ctx.count) if ctx.count else call(ctx, cotangent)

        function: Any = type(
            forward.__name__,
            (AutogradFunction,),
            {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)},
        )
        # `AutogradFunction.apply` without its Python part, which serves another kind of functions.
        return _bare_apply.__get__(None, function)

    def joint_function(self, forward: Callable, backward: Callable) -> Callable:
        def run_forward(ctx: Any, static: Any, *xs: Any) -> tuple:
            if BACKWARD_WRAPPERS:
                ctx.wrapped = BACKWARD_WRAPPERS[-1](backward)
            with NoDispatch():
                ys = tuple(untracked(y) for y in forward(ctx, static, *xs))
                ctx.shapes, ctx.operands = [y.shape for y in ys], [(tuple(x._shape), x.dtype) for x in xs]
            return ys

        def run_backward(ctx: Any, *cotangents: Any) -> tuple:
            call = getattr(ctx, "wrapped", backward) if BACKWARD_WRAPPERS else backward
            with NoDispatch():
                # As in `autograd_function`.
                given = [g.reshape(shape) for g, shape in zip(cotangents, ctx.shapes, strict=True)]
                found = call(ctx, *given)
                return (None, *(_zeros(*x) if g is None else g for g, x in zip(found, ctx.operands, strict=True)))

        members = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
        return _bare_apply.__get__(None, type(forward.__name__, (AutogradFunction,), members))

    detach: Any = staticmethod(untracked)
    no_grad: Any = staticmethod(no_grad)

    def alias(self, x: Any) -> Any:
        if not self.requires_grad(x):
            return untracked(x)
        with NoDispatch():
            # MindSpore computes zero for gradients of gradients of a view of a computed tensor.
            return x.view(tuple(x.shape)) if _Recording.forwards < 2 and x.is_contiguous() else _identity(x)

    def strides(self, x: Any) -> tuple[int, ...]:
        return tuple(x.stride())

    def same_memory(self, x: Any, y: Any) -> bool:
        return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()

    # Outside a recording nothing is cached, because nothing shows whether the holder was written to since.
    def read_cache(self, holder: Any, key: Any) -> Any:
        cache = holder.__dict__.get("_hp_cache")
        return None if cache is None or not is_recording() else cache.get(key)

    def write_cache(self, holder: Any, key: Any, value: Any) -> None:
        if not is_recording():
            return
        cache = holder.__dict__.get("_hp_cache")
        if cache is None:
            holder._hp_cache = cache = {}
            _Recording.holders.append(weakref.ref(holder))
        cache[key] = value

    def clear_cache(self, holder: Any) -> None:
        holder.__dict__.pop("_hp_cache", None)


class FastAutograd:
    """Autograd verbs of `Platform.fast`."""

    platform: Any

    def linear_view(
        self, convert: Callable[[Any], Any], record: Callable[[Any], Any], key: Any, otherwise: Any
    ) -> Callable[[Any, Any], Any]:
        platform = self.platform

        # For linear layers alone, because no other code references the cotangents that they return.
        def backward(ctx: Any, cotangent: Any) -> Any:
            return (record if platform.requires_grad(cotangent) else convert)(cotangent)

        return cached_view(platform, platform.autograd_function(lambda ctx, x: platform.detach(x), backward), key)

    def add_to_gradients(self, parameters: Sequence[Any], cotangents: Sequence[Any]) -> None:
        for parameter, cotangent in zip(parameters, cotangents, strict=True):
            if cotangent is not None:
                DelayedGradients.add(parameter, hooked(parameter, cotangent))

    def can_delay_gradient(self, *parameters: Any) -> bool:
        return all(DelayedGradients.take(parameter) and not parameter.hooks() for parameter in parameters)
