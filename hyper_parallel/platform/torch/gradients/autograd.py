"""Differentiable functions, and values that are cached on tensors. The caches keep no tensor alive."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.autograd import BACKWARD_WRAPPERS, TensorFunction
from hyper_parallel.platform.torch.basics.private import bare_apply, graph_task, queue_callback, will_execute
from hyper_parallel.platform.torch.basics.transforms import MAYBE_INSIDE, refuse_transforms
from hyper_parallel.platform.torch.gradients.failures import tell_of_failure
from hyper_parallel.platform.torch.gradients.graphs import nodes_below

__all__ = [
    *("ADDING", "NOTHING", "SAME_AS_VIEW", "AutogradVerbs", "Cache"),
    *("address_of", "as_plain", "hook_of", "make_apply", "name_of", "shape_of", "stride_of", "telling_engine"),
]

# Methods of `Tensor`: those of DTensors first check whether they are intercepted.
_view_as, _detach = Tensor.view_as, Tensor.detach
shape_of, stride_of, address_of = Tensor.shape.__get__, Tensor.stride, Tensor.data_ptr
is_grad_enabled = torch.is_grad_enabled
_PLAIN = frozenset({Tensor, type(None)})

#: Facts of a `Cache` entry to compare besides the version, which ``x.data = y`` does not change. `SAME_AS_VIEW`:
#: whether the cached view still has the data of ``x``. `NOTHING`: assigning data to a DTensor clears its cache. Any
#: other entry has the address, the shape and the strides.
SAME_AS_VIEW, NOTHING = None, ()


class Cache(dict):
    """``key -> (value or weak reference, version of the holder, data to compare)``, in the holder's ``_cached``.

    All values share the memory of the holder. So while a value lives, no other data can have its address. A copied or
    loaded tensor starts with an empty cache.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict) -> Cache:
        return Cache()

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # A class that torch.load(weights_only=True) accepts.
        return (collections.OrderedDict, ())


class _NoContext:
    """The context of a function that autograd does not record."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save nothing."""


class AutogradVerbs(Platform):
    """Autograd verbs of `Platform`."""

    accumulates_gradients = True

    def in_backward(self) -> bool:
        """Return whether a backward pass is running on this thread."""
        return graph_task() != -1

    #: Function that returns whether the running backward is itself recorded.
    backward_is_recorded: Any = staticmethod(is_grad_enabled)

    def backward_pass(self) -> Any:
        """Return an object that identifies the running backward pass, or None; see `Platform.backward_pass`."""
        task = graph_task()
        return None if task == -1 else task

    #: Context manager that enables the recording of gradients.
    with_grad: Any = staticmethod(torch.enable_grad)

    def after_backward(self, callback: Callable[[], None], failed: Callable[[], None] = lambda: None) -> None:
        """Register callbacks for the end of the running backward pass; see `Platform.after_backward`."""
        queue_callback(callback)
        _FAILED.setdefault(graph_task(), []).append(failed)

    tells_beginning = True

    def before_backward(self, callback: Callable[[Callable[[Any], bool], Callable[[Any], bool]], None]) -> None:
        """Register a callback for the start of each backward pass; see `Platform.before_backward`."""
        _WATCHERS.append(weakref.WeakMethod(callback))

    def autograd_function(
        self, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """Make a differentiable function with one differentiable operand; see `Platform.autograd_function`."""

        def run_forward(ctx: Any, x: Tensor, *static: Any) -> Tensor:
            ctx.static_count = len(static)
            if BACKWARD_WRAPPERS:
                ctx._wrapped = BACKWARD_WRAPPERS[-1](backward)
            with no_dispatch():
                y = forward(ctx, x, *static)
                # A result that is a view of ``x`` could not be changed in place.
                return y.detach() if y is x or y._is_view() else y

        def run_backward(ctx: Any, cotangent: Tensor) -> Any:
            call = getattr(ctx, "_wrapped", backward) if BACKWARD_WRAPPERS else backward
            with no_dispatch():
                gradient = call(ctx, as_plain(cotangent))
            return (gradient, *(None,) * ctx.static_count) if ctx.static_count else gradient

        apply = make_apply(name_of(forward), run_forward, run_backward)

        def run(x: Tensor, *static: Any) -> Tensor:
            if MAYBE_INSIDE:
                refuse_transforms(x)
            if is_grad_enabled() and x.requires_grad:
                return apply(x, *static)
            with no_dispatch():
                return forward(_NoContext(), x, *static)

        return run

    tells_unused = True

    def joint_function(
        self, forward: Callable[..., Sequence[Tensor]], backward: Callable[..., Sequence[Tensor]]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """Make a differentiable function with several operands and results; see `Platform.joint_function`."""

        def run_forward(ctx: Any, static: Any, *xs: Tensor) -> tuple[Tensor, ...]:
            ctx.set_materialize_grads(False)
            if BACKWARD_WRAPPERS:
                ctx._wrapped = BACKWARD_WRAPPERS[-1](backward)
            with no_dispatch():
                return tuple(map(_detach, forward(ctx, static, *xs)))

        def run_backward(ctx: Any, *cotangents: Tensor) -> Any:
            call = getattr(ctx, "_wrapped", backward) if BACKWARD_WRAPPERS else backward
            with no_dispatch():
                given = cotangents if _PLAIN.issuperset(map(type, cotangents)) else map(as_plain, cotangents)
                return (None, *call(ctx, *given))

        apply = make_apply(name_of(forward), run_forward, run_backward)

        def run(static: Any, *xs: Tensor) -> tuple[Tensor, ...]:
            if MAYBE_INSIDE:
                refuse_transforms(xs[0])
            # The first operand mostly decides.
            if is_grad_enabled() and (xs[0].requires_grad or any(x.requires_grad for x in xs)):
                return apply(static, *xs)
            with no_dispatch():
                return tuple(forward(_NoContext(), static, *xs))

        return run

    def gradient_view(self, convert: Callable[[Tensor, Tensor], Tensor], key: Any) -> TensorFunction:
        """Return ``view(x)``, whose gradient is converted in backward. The view has a hook; an autograd function would
        cost several times as much."""
        read = self.read_cache

        def view(x: Tensor) -> Tensor:
            if MAYBE_INSIDE:
                refuse_transforms(x)
            if not (is_grad_enabled() and x.requires_grad):
                return x
            cache = x.__dict__.get("_cached")
            if cache and (found := read(x, key)) is not None:
                return found
            y: Any = _view_as(x, x)
            of_x: Any = partial(convert, x)
            if BACKWARD_WRAPPERS:
                of_x = BACKWARD_WRAPPERS[-1](of_x)
            y._backward_hooks = {0: hook_of(of_x, of_x)}
            y.grad_fn._register_hook_dict(y)
            if cache is None:
                cache = x.__dict__["_cached"] = Cache()
            # Weak, see `write_cache`: the operation keeps the view alive.
            cache[key] = (weakref.ref(y), x._version, SAME_AS_VIEW if type(x) is Tensor else NOTHING)
            return y

        return view

    def requires_grad(self, x: Tensor) -> bool:
        """Return whether an operation on ``x`` now would be recorded for backward."""
        return is_grad_enabled() and x.requires_grad

    def is_made_with(self, x: Tensor, parameter: Any) -> bool | None:
        """Return whether the recorded graph of ``x`` leads back to ``parameter``; see `Platform.is_made_with`."""
        if not x.requires_grad:
            return None
        any_of = parameter if isinstance(parameter, type) else ()
        todo, seen, wanted = [x.grad_fn], {None}, None if any_of else parameter.grad_fn
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if node is wanted or leaf is parameter or isinstance(leaf, any_of):
                return True
            todo += [below for below, _ in node.next_functions]
        return False

    def detach(self, x: Tensor) -> Tensor:
        """Return a plain tensor with the data of ``x`` and without gradient."""
        if MAYBE_INSIDE:
            refuse_transforms(x)
        if type(x) is Tensor:
            return x.detach()
        with no_dispatch():
            return _detach(x)

    def for_training(self) -> Any:
        """Return a context manager that leaves inference mode, whose tensors autograd refuses later."""
        return torch.inference_mode(False)

    def counted_apart(self, x: Tensor) -> Tensor:
        """Return a tensor with the memory of ``x`` that counts its own writes; see `Platform.counted_apart`."""
        return x.data

    def alias(self, x: Tensor) -> Tensor:
        """Return a new tensor object with the data of ``x``."""
        with no_dispatch():
            return _view_as(x, x)

    def same_memory(self, x: Tensor, y: Tensor) -> bool:
        """Return whether ``y`` shares the storage of ``x``."""
        return x.untyped_storage()._cdata == y.untyped_storage()._cdata

    #: Context manager that disables the recording of gradients.
    no_grad: Any = staticmethod(torch.no_grad)

    def read_cache(self, holder: Tensor, key: Any) -> Tensor | None:
        """Return the tensor cached on ``holder`` under ``key``, or None if it is stale; see `Platform.read_cache`."""
        cache = holder.__dict__.get("_cached")
        if not cache or not is_grad_enabled():
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
        if data is SAME_AS_VIEW:
            return value if value.is_set_to(holder) else None
        same = data is NOTHING or data == (address_of(holder), shape_of(holder), stride_of(holder))
        return value if same else None

    def write_cache(self, holder: Tensor, key: Any, value: Tensor) -> None:
        """Store ``value`` on ``holder`` for `read_cache`; see `Platform.write_cache`.

        A strong reference from a leaf to a value computed from it would be a cycle: the value references the leaf's
        gradient accumulator. A strong reference to a view of the holder would be a cycle through the view's base. Both
        cycles run through C++, invisible to the garbage collector. In these cases the reference is weak, and the value
        lives as long as the graph that uses it.
        """
        if not is_grad_enabled() or holder.is_inference():
            return
        weak = holder.is_leaf or value is holder or value._base is holder
        kept = weakref.ref(value) if weak else value
        plain = type(holder) is Tensor
        data = (address_of(holder), shape_of(holder), stride_of(holder)) if plain else NOTHING
        entry = (kept, holder._version, data)
        cache = holder.__dict__.get("_cached")
        if cache is None:
            cache = holder.__dict__["_cached"] = Cache()
        cache[key] = entry

    def clear_cache(self, holder: Tensor) -> None:
        """Discard all tensors cached on ``holder``."""
        holder.__dict__.pop("_cached", None)


#: Callbacks for the start of a backward pass.
_WATCHERS: list[weakref.WeakMethod] = []
#: Callbacks for the failure of the running passes, by `graph_task`.
_FAILED: dict[int, list[Callable[[], None]]] = {}
#: The running passes, by `graph_task`, that accumulate into the gradient of each leaf they reach: ``backward`` without
#: ``inputs``.
ADDING: set[int] = set()


def telling_engine(run: Callable) -> Callable:
    """Wrap the function that runs torch's engine, for `Platform.before_backward`. The hook on the first root runs
    before the rest of the graph. If the engine fails, the other ranks are notified."""

    @functools.wraps(run)
    def telling(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not _WATCHERS:
            try:
                return run(t_outputs, *args, **kwargs)
            except Exception as error:
                tell_of_failure(error, t_outputs)
                raise
        told: list[int] = []
        adds = kwargs.get("accumulate_grad", False) and not (args[3] if len(args) > 3 else kwargs.get("inputs", True))

        def runs(node: Any) -> bool:
            # Torch does not count the first node of a backward among those of its graph.
            try:
                return will_execute(node) or any(node is root for root in roots)
            except RuntimeError:
                return True  # torch does not answer for a leaf whose gradient is asked for

        def leads(node: Any) -> bool:
            if not graph:
                graph.update(nodes_below(roots))
            return node in graph

        def begin(cotangent: Any) -> None:
            if told:
                return
            told.append(graph_task())
            if adds:
                ADDING.add(told[0])
            for watcher in tuple(_WATCHERS):
                callback = watcher()
                if callback is None:
                    _WATCHERS.remove(watcher)
                else:
                    callback(runs, leads)

        handles, roots = [], []
        graph: set[Any] = set()
        with no_dispatch():
            for root in t_outputs:
                if not isinstance(root, Tensor):  # an edge of the graph
                    roots.append(root.node)
                    handles.append(root.node.register_prehook(begin))
                elif root.requires_grad:
                    roots.append(root.grad_fn)
                    handles.append(root.register_hook(begin))
        complete = False
        try:
            result = run(t_outputs, *args, **kwargs)
            complete = True
            return result
        except Exception as error:
            tell_of_failure(error, t_outputs)
            raise
        finally:
            ADDING.difference_update(told)
            for handle in handles:
                handle.remove()
            for callback in [x for task in told for x in _FAILED.pop(task, ())]:
                if not complete:
                    callback()

    return telling


def name_of(forward: Callable) -> str:
    """Return the name of a function in the graph and in the profiler."""
    return getattr(forward, "__name__", "Function").strip("_")


def make_apply(name: str, forward: Callable, backward: Callable) -> Callable:
    """Return `apply` of an autograd function with these methods."""
    function = type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    return bare_apply(function)


def as_plain(cotangent: Any) -> Any:
    """Return a cotangent as a plain tensor, even if the user started backward with a DTensor. Interception is off."""
    return cotangent if cotangent is None or type(cotangent) is Tensor else cotangent.as_subclass(Tensor)


def hook_of(convert: Callable[[Tensor], Any] | None, record: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a hook that applies ``convert`` to a cotangent; None leaves the cotangent unchanged.

    If the cotangent itself requires a gradient, the hook applies ``record``, which is differentiable. Both functions
    get plain tensors.
    """

    def hook(cotangent: Tensor) -> Any:
        change = record if is_grad_enabled() and cotangent.requires_grad else convert
        if change is None:
            return None
        if type(cotangent) is Tensor:
            return change(cotangent)
        with no_dispatch():
            return change(as_plain(cotangent))

    return hook
