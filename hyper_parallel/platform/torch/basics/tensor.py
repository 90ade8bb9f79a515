"""DTensors of torch: construction, type checks, and handlers for calls other than operations.

A DTensor is the local tensor itself with another class (``t.__class__ = DTensor``): no wrapper, no node in the autograd
graph. `dtensor_class` makes the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import Core
from hyper_parallel.platform.torch.basics.transforms import MAYBE_INSIDE, refuse_transforms

__all__ = [
    "HANDLERS",
    "Handler",
    "State",
    "dispatch",
    "handles",
    "is_dtensor",
    "is_local_class",
    "layout_of",
    "replaces",
    "stand_for",
    "wrap",
]

Handler = Callable[[Any, tuple, dict], Any]

#: torch function -> handler(func, args, kwargs). It has precedence over the op table.
HANDLERS: dict[Any, Handler] = {}


class State:
    """State that all torch devices share: the DTensor class, and the services of core."""

    #: Services of core for torch, available once the class is made.
    core: ClassVar[Core]
    #: The DTensor class, or None before it is made.
    tensor_class: Any = None
    #: function -> its handler for DTensors.
    table: ClassVar[dict[Any, Handler]] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Register the decorated function in `HANDLERS`; None is skipped, for a function that this version of torch
    lacks."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update({f: handler for f in functions if f is not None})
        return handler

    return register


def replaces(*functions: Any) -> Callable[[Callable], Callable]:
    """Register the decorated function to replace functions of torch with the same arguments on DTensors."""

    def register(replacement: Callable) -> Callable:
        handles(*functions)(lambda func, args, kwargs: replacement(*args, **kwargs))
        return replacement

    return register


def dispatch(native_op: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` through core's dispatch."""
    return State.core.dispatch(native_op, func, args, kwargs)


def is_dtensor(x: Any) -> bool:
    """Return whether ``x`` is a DTensor."""
    return type(x) is State.tensor_class


def stand_for(replacement: Any, original: Any) -> None:
    """Register the handler of ``original`` for ``replacement``, by which a patch replaces ``original``."""
    if original in State.table:
        State.table[replacement] = State.table[original]


def is_local_class(cls: type) -> bool:
    """Return whether ``cls`` is the ``base`` of `make_dtensor_class`; its tensors have ``__torch_dispatch__``."""
    made = State.tensor_class
    return made is not None and made.__bases__[-1] is not Tensor and issubclass(cls, made.__bases__[-1])


def layout_of(x: Any) -> Any:
    """Return the layout of a DTensor, None for anything else."""
    return x._layout if type(x) is State.tensor_class else None


def wrap(local: Any, layout: Any) -> Any:
    """Turn ``local``, which no other code references, into a DTensor by a change of its class.

    Some operations return their operand, such as ``contiguous()`` and in-place operations. So ``local`` may already be
    a DTensor. If it has the same layout, it is the result. With another layout, the result is a new view, since an
    object has one layout.
    """
    if MAYBE_INSIDE:
        refuse_transforms()
    cls = State.tensor_class
    if type(local) is cls:
        if local._layout is layout:
            return local
        with no_dispatch():
            local = local.view_as(local)
    local.__class__ = cls
    local._layout = layout
    return local
