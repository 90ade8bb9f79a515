"""The DTensor class of torch: a tensor that carries a layout, and whose operations are intercepted.

A DTensor is the local tensor itself with another class (``t.__class__ = DTensor``): no wrapper, no node in the autograd
graph. So whatever torch does below Python sees an ordinary tensor of the local shape, and whatever it does in Python
arrives at ``__torch_function__``, which looks the function up once:

* `HANDLERS` holds what torch needs from a tensor besides computing: metadata, ``.grad``, backward, hooks, optimizers'
  kernels, random initialisation (the modules of `platform.torch.handlers`);
* `op_table.OP_TABLE` holds the operations, which go to core's dispatch with their row;
* everything else goes to core's dispatch without a row, which gathers the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import Dispatch
from hyper_parallel.platform.torch.functional import calls_in_place, direct_calls
from hyper_parallel.platform.torch.levels import SEEN, refuse_levels
from hyper_parallel.platform.torch.op_table import OP_TABLE
from hyper_parallel.platform.torch.operators import make_methods, make_operators
from hyper_parallel.platform.torch.private import is_dispatch_on
from hyper_parallel.platform.unpatched import Unpatched

__all__ = [
    "HANDLERS",
    "Handler",
    "allow_dtensors",
    "dispatch",
    "handles",
    "is_dtensor",
    "is_local_class",
    "layout_of",
    "made_class",
    "make_dtensor_class",
    "replicated",
    "stand_for",
    "wrap",
]

T: Any = torch.Tensor
Handler = Callable[[Any, tuple, dict], Any]

#: torch function -> handler(func, args, kwargs). Looked up before the op table.
HANDLERS: dict[Any, Handler] = {}

_NO_KWARGS: dict[str, Any] = {}
_local_shape = T.shape.__get__


class _State:
    """What core handed over in `make_dtensor_class`: one DTensor class serves every torch device."""

    tensor_class: Any = None
    dispatch: Dispatch | None = None
    #: The same class, while torch is patched.
    wrapping: Any = Unpatched("torch")
    #: function -> what serves it on DTensors.
    table: ClassVar[dict[Any, Handler]] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Register the decorated function in `HANDLERS`; entries that are None are skipped (torch versions differ)."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update({f: handler for f in functions if f is not None})
        return handler

    return register


def refuse_part_of_classes(count: int) -> None:
    """See `Dispatch.refuse_part_of_classes`."""
    if _State.dispatch is not None:
        _State.dispatch.refuse_part_of_classes(count)


def dispatch(native_op: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Core's dispatch: run ``func`` distributed."""
    assert _State.dispatch is not None, "the DTensor class has not been made yet"
    return _State.dispatch(native_op, func, args, kwargs)


def is_dtensor(x: Any) -> bool:
    """Whether ``x`` is distributed."""
    return type(x) is _State.tensor_class


def made_class() -> Any:
    """The DTensor class, None before it is made."""
    return _State.tensor_class


def allow_dtensors(allowed: bool) -> None:
    """Whether DTensors may be made: while torch is patched."""
    _State.wrapping = _State.tensor_class if allowed else Unpatched("torch")


def stand_for(replacement: Any, original: Any) -> None:
    """Let ``replacement`` be served as ``original`` is, whose place in torch it takes."""
    if original in _State.table:
        _State.table[replacement] = _State.table[original]


def is_local_class(cls: type) -> bool:
    """Whether the tensors of ``cls``, which compute by ``__torch_dispatch__``, are what DTensors are made of."""
    made = _State.tensor_class
    return made is not None and made.__bases__[-1] is not T and issubclass(cls, made.__bases__[-1])


def layout_of(x: Any) -> Any:
    """Layout of a DTensor, None for anything else."""
    return x._layout if type(x) is _State.tensor_class else None


def wrap(local: Any, layout: Any) -> Any:
    """Retag ``local``, which nobody else holds, as a DTensor.

    An operation may return the DTensor that it was given (``contiguous()``, in-place operations): with the same
    layout that is the result, otherwise a new view of it is, since an object has one layout.
    """
    if SEEN:
        refuse_levels()
    cls = _State.wrapping
    if type(local) is cls:
        if local._layout is layout:
            return local
        with no_dispatch():
            local = local.view_as(local)
    local.__class__ = cls
    local._layout = layout
    return local


def replicated(local: torch.Tensor, mesh: Any) -> Any:
    """Retag a new tensor that is the same on every rank of ``mesh``."""
    # Core imports this package, so not at the top.
    from hyper_parallel.core.dtensor.layouts.layout import get_layout
    from hyper_parallel.core.dtensor.placement_types import Replicate

    return wrap(local, get_layout(mesh, (Replicate(),) * mesh.ndim, tuple(_local_shape(local))))


def _local_property(name: str, base: Any) -> property:
    """A property that the local tensor answers, without the way through ``__torch_function__``."""
    read = getattr(base, name).__get__

    def get(self: Any) -> Any:
        if not is_dispatch_on():
            return read(self)
        with no_dispatch():
            return read(self)

    return property(get, doc=getattr(T, name).__doc__)


def _complex_part(name: str) -> property:
    """``x.real`` and ``x.imag``, which torch lets nobody intercept when they are set."""
    read = getattr(T, name).__get__

    def set_part(self: Any, value: Any) -> None:
        read(self).copy_(value)

    return property(read, set_part, doc=getattr(T, name).__doc__)


def make_dtensor_class(mixin: type, core_dispatch: Dispatch, base: type = torch.Tensor) -> type:
    """See `Platform.make_dtensor_class`. All torch platforms share the class; the first call makes it.

    ``base`` is the class of local tensors. It is another one where torch's own tensors are a subclass that computes by
    ``__torch_dispatch__``, which retagging must not take away: the tests with fake tensors give ``FakeTensor``.
    """
    if _State.tensor_class is not None:
        if not issubclass(_State.tensor_class, mixin):
            raise RuntimeError(f"the DTensor class has been made already, with {_State.tensor_class.__mro__[1]}")
        return _State.tensor_class
    # Imported here, because the handlers register themselves in this module.
    from hyper_parallel.platform.torch import checkpoints, handlers, patches, wrappers

    computing: dict[Any, Handler] = {func: core_dispatch.bind(row) for func, row in OP_TABLE.items()}
    computing.update(calls_in_place(OP_TABLE, computing))
    table = _State.table = {**computing, **direct_calls(computing), **HANDLERS}
    look_up = table.get
    unknown, recover = handlers.run_unknown, handlers.recover

    def torch_function(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        try:
            return look_up(func, unknown)(func, args, kwargs or _NO_KWARGS)
        except RuntimeError as error:
            return recover(error, func, args, kwargs or _NO_KWARGS)

    def shape(self: Any) -> Any:
        """Global shape; of the local tensor where dispatch is off."""
        return self._layout.shape if is_dispatch_on() else _local_shape(self)

    namespace = {
        **{name: _local_property(name, base) for name in ("dtype", "device", "ndim")},
        **{name: _complex_part(name) for name in ("real", "imag")},
        "__doc__": mixin.__doc__,
        "__module__": mixin.__module__,
        "__torch_function__": classmethod(torch_function),
        "shape": property(shape),
        "__deepcopy__": handlers.deepcopy_dtensor,
        "__reduce_ex__": handlers.reduce_dtensor,
        "set_": handlers.composite.set_method,
        "_is_flat_param": wrappers.refuse_flat_parameter,
        **checkpoints.REFUSALS,
        **make_methods({f: handler for f, handler in computing.items() if f not in HANDLERS}, recover),
        **make_operators(table, recover),
    }
    _State.tensor_class = type(mixin)("DTensor", (mixin, base), namespace)
    _State.dispatch = core_dispatch
    try:
        patches.PATCHES.install()
    except RuntimeError:
        _State.tensor_class = None  # every attempt is to say so
        raise
    return _State.tensor_class
