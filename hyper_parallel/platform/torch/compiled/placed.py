"""Stand-ins for DTensors inside a compiled frame: plain local tensors of a class that knows their placement.

To torch's compiler a `Placed` is the local tensor. The compiled forwards of styled modules know the class and read the
placement. Any other code that computes on a `Placed` leaves the compiled code, and gets the DTensor of eager mode. A
`Placed` that leaves the frame becomes a DTensor when it is first used. There is a class for each mesh and cut. So a
`Placed` needs no attributes, which compiled code would have to carry along.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State
from hyper_parallel.platform.torch.compiled.functions import read_for_parts
from hyper_parallel.platform.torch.compiled.tracing import is_tracing

__all__ = [
    *("Outside", "Part", "Shared", "gathered_class", "held_class", "kept_on_mesh", "part_class", "placed_class"),
    *("plain", "settle"),
]


def kept_on_mesh(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``make(mesh, *key)`` with its results cached on the mesh, and freed with it."""

    @wraps(make)
    def find(mesh: Any, *key: Any) -> Any:
        kept, at = vars(mesh).setdefault("_compiled_classes", {}), (make, *key)
        if at not in kept:
            kept[at] = make(mesh, *key)
        return kept[at]

    return find


def plain(x: Any) -> Tensor:
    """Return the local tensor of a `Placed` or a DTensor."""
    with no_dispatch():
        return x.view_as(x)


class Part(Tensor):
    """A plain tensor with this rank's shard of the positions, inside a module that computes each position separately.

    The module computes partial gradients of its replicated parameters. See `part_class`.
    """


def settle(x: Any) -> Any:
    """Return ``x``, or the contents of a tuple, list or dict, with each `Placed` changed into a DTensor."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(settle, x)) if type(x) in (tuple, list) else x
    if type(x) is dict:
        return {key: settle(value) for key, value in x.items()}
    cls = type(x)
    if getattr(cls, "is_placed_class", False):
        layout = x._layout
        x.__class__ = State.tensor_class
        x._layout = layout
        wanted = cls.gathered_layout(x, layout)
        return x if wanted is layout else x.redistribute(placements=wanted.placements)
    if issubclass(cls, Shared):
        return plain(x)
    return x


class Outside:
    """Functions that run outside of compiled code. The module `outside` sets them when torch's compiler is imported."""

    #: ``leave(call, args, kwargs)``: make a call with DTensors in place of each `Placed`.
    leave: Any = None
    #: ``run(module, args, kwargs, why)``: call the eager forward of a styled module, with DTensors.
    run: Any = None
    #: ``unit(module, args, kwargs)``: call the forward of a unit of data parallelism; frames inside it are compiled.
    unit: Any = None
    #: ``trace(func, args, kwargs)``: return the result of an operation on a `Placed`, or None for an untraced one.
    trace: Any = None
    #: ``say(what)``: warn of code that leaves a frame that is being traced.
    say: Any = None


def _leave(call: Any, args: tuple, kwargs: dict) -> Any:
    if is_tracing():
        Outside.say("an operation on a DTensor")
    return Outside.leave(call, args, kwargs)


def _torch_function(cls: type, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    for other in types:
        if issubclass(other, Part):
            return NotImplemented  # `Part` handles parameters itself
    y = Outside.trace(func, args, kwargs or {})
    return _leave(func, args, kwargs or {}) if y is None else y


@kept_on_mesh
def placed_class(mesh: Any, size: int, cut: int | None) -> type:
    """Return the class of tensors that are sharded evenly along ``cut`` over the 1-D ``mesh``; None for replicated."""

    def layout(self: Any) -> Any:
        with no_dispatch():
            shape = list(Tensor.shape.__get__(self))
        if cut is not None:
            shape[cut] *= size
        return State.core.layout_of_cut(mesh, cut, tuple(shape))

    def shape(self: Any) -> Any:
        own = plain(self).shape
        if cut is None:
            return own
        at = cut % len(own)
        return torch.Size((*own[:at], own[at] * size, *own[at + 1 :]))

    fixed = {"is_placed_class": True, "gathered_layout": staticmethod(lambda x, layout: layout)}
    return _derive({"_layout": property(layout), "shape": property(shape), **fixed}, mesh, cut)


@kept_on_mesh
def gathered_class(mesh: Any, size: int, cut: int) -> type:
    """Return the class for a replicated DTensor that is still held as shards along ``cut``.

    Each module that reads it gathers the shards itself, so that backward takes the step that this module needs.
    ``read_for_parts`` of an instance is None until a module that returns a partial cotangent reads it. Then it is a
    pair: whether gradients were enabled, and the gathered tensor.
    """
    shards = placed_class(mesh, size, cut)
    get_shape: Any = vars(shards)["shape"].fget

    def gathered(x: Any, layout: Any) -> Any:
        return State.core.layout_of_cut(mesh, None, layout.shape)

    methods = {
        "_layout": vars(shards)["_layout"],
        "shape": property(lambda self: get_shape(self)),
        "is_placed_class": True,
        "gathered_layout": staticmethod(gathered),
        "gathers": property(lambda self: cut),
    }
    return _derive(methods, mesh, None)


class Shared(Tensor):
    """A plain tensor that several column-parallel modules read.

    These modules share the all-reduce of its gradient. Instances have ``read_for_parts``, see `gathered_class`. Other
    code uses it as a plain tensor.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        with no_dispatch():
            return func(*args, **(kwargs or {}))


@cache
def part_class(group: str) -> type:
    """Return the class of a `Part` in a module whose parameters are replicated over the ranks of ``group``."""

    def read(x: Any) -> Any:
        if isinstance(x, Part):
            return plain(x)
        if isinstance(x, State.tensor_class.__bases__[0]):
            return read_for_parts(plain(x), group)
        return x

    def torch_function(cls: Any, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        y = func(*[read(x) for x in args], **{key: read(x) for key, x in (kwargs or {}).items()})
        return y.as_subclass(own) if isinstance(y, Tensor) else y

    own = type("Part", (Part,), {"__torch_function__": classmethod(torch_function)})
    return own


def held_class(layout: Any, mesh: Any, cut: int | None) -> type:
    """Return the class that stands for DTensors of ``layout`` that enter a frame. The attribute ``mesh`` of the class
    is None if no `placed_class` describes such shards."""
    found: type = _held_class(layout.mesh, layout, mesh, cut)
    return found


@kept_on_mesh
def _held_class(_: Any, layout: Any, mesh: Any, cut: int | None) -> type:
    return _derive({"_layout": property(lambda self: layout), "shape": property(lambda self: layout.shape)}, mesh, cut)


def _derive(methods: dict[str, Any], mesh: Any, cut: int | None) -> type:
    def same(name: str) -> property:
        return property(lambda self: getattr(plain(self), name))

    def to_local(self: Any, *, grad_placements: Any = None) -> Any:
        if grad_placements is None:
            return plain(self)
        return _leave(State.tensor_class.to_local, (self,), {"grad_placements": grad_placements})

    def through(name: str) -> Any:
        method = getattr(mixin, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _leave(method, (self, *args), kwargs)

        return call

    mixin, base = State.tensor_class.__bases__
    namespace = {
        "__doc__": "A DTensor inside a compiled frame.",
        "__torch_function__": classmethod(_torch_function),
        "gathers": property(lambda self: None),
        "placed_on": property(lambda self: mesh),
        "placed_cut": property(lambda self: cut),
        "to_local": to_local,
        **{name: same(name) for name in ("dtype", "device", "ndim")},
        **{name: through(name) for name in ("redistribute", "full_tensor")},
        **methods,
    }
    return type(mixin)("Placed", (mixin, base), namespace)
