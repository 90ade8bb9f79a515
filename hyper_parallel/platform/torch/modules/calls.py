"""Calls of modules of torch.nn that skip `torch.nn.Module.__call__`, and replaced forwards.

`Module.__call__` checks everything that may surround a forward: hooks of ten kinds, tracers, compilation. In a small
layer, these checks take more time than the style. So each parallelised module gets a class derived from its class, with
the same name. Its ``__call__`` runs the hooks before and after forward that styles register. For anything else, it
calls `Module.__call__`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, update_wrapper
from itertools import count
from typing import Any

from torch import nn

from hyper_parallel.platform.contract import Program
from hyper_parallel.platform.module_text import text_of_plan
from hyper_parallel.platform.torch.basics.private import (
    calls_quickly,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
    tracer,
)
from hyper_parallel.platform.torch.compiled.comparisons import NUMBER
from hyper_parallel.platform.torch.compiled.forwards import make_run, run_forward
from hyper_parallel.platform.torch.compiled.hooks import share_inputs
from hyper_parallel.platform.torch.compiled.tracing import is_tracing
from hyper_parallel.platform.torch.modules.module_copies import copying_methods

_NUMBERS = count()

__all__ = ["call_quickly", "replace_forward", "set_compiled_forward", "share_compiled_inputs"]


def replace_forward(module: nn.Module, make: Callable[[Callable], Callable], mixin: type | None = None) -> None:
    """Let calls of ``module`` run ``make(forward)``.

    The forward is stored unbound, and gets the called module as its first argument. So it also works in a copy of the
    module.
    """
    cls: Any = type(module)
    replaced = module.__dict__.get("_replaced_forward")
    module.__dict__.pop("_compiled_run", None)  # a new forward replaces the compiled one too
    module.__dict__["_replaced_forward"] = make(_own_forward(module) or replaced or cls.forward)
    if replaced is None or mixin is not None:
        module.__class__ = _with_replaced_forward(cls, mixin)


def _own_forward(module: nn.Module) -> Callable | None:
    """Remove a forward that another library has set as an attribute of ``module``. Return this forward as a function
    whose first argument is the module. Return None if there is no such attribute."""
    own = module.__dict__.pop("forward", None)
    if own is None:
        return None
    if getattr(own, "__self__", None) is module:
        function: Callable = own.__func__
        return function
    return lambda self, *args, **kwargs: own(*args, **kwargs)


def share_compiled_inputs(module: nn.Module) -> None:
    """Let compiled code share one collective for gradients of an input of ``module``."""
    cls: Any = type(module)
    if not getattr(cls, "_shares", False):
        module.__class__ = _with_shared_inputs(cls)


@cache
def _with_shared_inputs(cls: Any) -> type:
    return _derive(cls, {"_shares": True})


def set_compiled_forward(module: nn.Module, how: Program | None) -> None:
    """Set the forward that torch's compiler traces in place of the styled one; see `Platform.set_compiled_forward`."""
    module.__dict__["_compiled_run"] = make_run(module, how)
    module.__dict__[NUMBER] = str(next(_NUMBERS))


def call_quickly(module: nn.Module) -> None:
    """Give ``module`` a class with a quick ``__call__``."""
    cls: Any = type(module)
    module.__dict__.setdefault(NUMBER, str(next(_NUMBERS)))
    if "_quick" not in cls.__dict__:
        module.__class__ = _with_quick_call(cls)


@cache
def _with_replaced_forward(cls: Any, mixin: type | None) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return run_forward(self, args, kwargs)
        return self._replaced_forward(self, *args, **kwargs)

    # Other libraries read the names of the arguments, with `inspect.signature`.
    update_wrapper(forward, cls.forward, assigned=("__doc__",), updated=())

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._moving():
            return cls._apply(self, *args, **kwargs)

    return _derive(cls, {"forward": forward, **({"_apply": _apply} if hasattr(mixin, "_moving") else {})}, mixin)


@cache
def _with_quick_call(cls: Any) -> type:
    return _derive(cls, {})


def _derive(cls: Any, methods: dict[str, Any], base: type | None = None) -> type:
    """Make a class with the name of ``cls``, these methods and the base class ``base``. Its ``__call__`` does the same
    as `torch.nn.Module.__call__`."""
    shares = "_shares" in methods

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__
        if is_tracing():
            if shares:
                args, kwargs = share_inputs(args, kwargs)
            return cls.__call__(self, *args, **kwargs)
        if (
            state["_backward_pre_hooks"]
            or state["_backward_hooks"]
            or "forward" in state
            or "_compiled_call_impl" in state
            or global_forward_pre_hooks
            or global_forward_hooks
            or global_backward_pre_hooks
            or global_backward_hooks
            or tracer() is not None
        ):
            return cls.__call__(self, *args, **kwargs)
        before, after = state["_forward_pre_hooks"], state["_forward_hooks"]
        if not (before or after):
            replaced = state.get("_replaced_forward")
            if replaced is None:
                return self.forward(*args, **kwargs)
            # Python passes a single argument faster than a tuple of one.
            return replaced(self, *args, **kwargs) if kwargs or len(args) != 1 else replaced(self, args[0])
        if (
            len(before) != len(state["_forward_pre_hooks_with_kwargs"])
            or state["_forward_hooks_with_kwargs"]
            or state["_forward_hooks_always_called"]
        ):
            return cls.__call__(self, *args, **kwargs)
        for hook in tuple(before.values()):
            result = hook(self, args, kwargs)
            if result is not None:
                if not (isinstance(result, tuple) and len(result) == 2):
                    raise RuntimeError(
                        "forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got "
                        f"{type(result).__name__} from {hook!r}"
                    )
                args, kwargs = result
        y = self.forward(*args, **kwargs)
        for hook in tuple(after.values()):
            result = hook(self, args, y)
            if result is not None:
                y = result
        return y

    def extra_repr(self: Any) -> str:
        usual = cls.extra_repr(self)
        # The text of `cls` describes the plan already.
        return usual if getattr(cls, "_quick", False) else text_of_plan(self, self._parameters, usual)

    methods = {"extra_repr": extra_repr, **methods}
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_quick": True}
    if calls_quickly and (cls.__call__ is nn.Module.__call__ or getattr(cls, "_quick", False)):
        methods = {**methods, "__call__": call}
    bases = (cls,) if base is None else (base, cls)
    return type(cls.__name__, bases, {**names, **copying_methods(cls), **methods})
