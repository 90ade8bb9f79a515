"""The DTensor class of torch: a tensor with a layout, whose operations are intercepted.

Below Python, torch sees an ordinary tensor of the local shape. Functions called in Python arrive at
``__torch_function__``, which looks up the function once:

* `tensor.HANDLERS` holds handlers for calls other than operations: metadata, ``.grad``, backward, hooks. This table
also holds optimizers' kernels and random initialisation (the modules of `platform.torch.handlers`). *
`op_table.OP_TABLE` holds the operations, which go to core's dispatch with their row. * Everything else goes to core's
dispatch without a row, which gathers the operands.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import Core
from hyper_parallel.platform.imports import when_imported
from hyper_parallel.platform.torch import handlers, patches
from hyper_parallel.platform.torch.basics import wrappers
from hyper_parallel.platform.torch.basics.private import is_dispatch_on
from hyper_parallel.platform.torch.basics.tensor import HANDLERS, Handler, State
from hyper_parallel.platform.torch.compiled.losses import trace_losses
from hyper_parallel.platform.torch.functional import calls_in_place, direct_calls
from hyper_parallel.platform.torch.native import checkpoints
from hyper_parallel.platform.torch.op_table import OP_TABLE
from hyper_parallel.platform.torch.operators import make_methods, make_operators

__all__ = ["make_dtensor_class"]


_NO_KWARGS: dict[str, Any] = {}
_local_shape = Tensor.shape.__get__


def _local_property(name: str, base: Any) -> property:
    """Return a property that reads the local tensor directly, without ``__torch_function__``."""
    read = getattr(base, name).__get__

    def get(self: Any) -> Any:
        if not is_dispatch_on():
            return read(self)
        with no_dispatch():
            return read(self)

    return property(get, doc=getattr(Tensor, name).__doc__)


def _complex_part(name: str) -> property:
    """Return the property ``x.real`` or ``x.imag``. Torch cannot intercept writes to such properties."""
    read = getattr(Tensor, name).__get__

    def set_part(self: Any, value: Any) -> None:
        read(self).copy_(value)

    return property(read, set_part, doc=getattr(Tensor, name).__doc__)


def make_dtensor_class(mixin: type, core: Core, base: type = Tensor) -> type:
    """Make the DTensor class of this platform. All torch platforms share the class; the first call makes it.

    ``base`` is the class of local tensors. Another base is needed for local tensors that compute by
    ``__torch_dispatch__``: a change of ``__class__`` must keep this method. For instance, tests with fake tensors pass
    ``FakeTensor``.
    """
    if State.tensor_class is not None:
        if not issubclass(State.tensor_class, mixin):
            raise RuntimeError(f"the DTensor class has been made already, with {State.tensor_class.__mro__[1]}")
        return State.tensor_class
    bind = core.dispatch.bind
    computing: dict[Any, Handler] = {func: bind(row) for func, row in OP_TABLE.items()}
    computing.update(calls_in_place(OP_TABLE, computing))
    table = State.table = {**computing, **direct_calls(computing), **HANDLERS}
    look_up = table.get
    unknown, recover = handlers.run_unknown, handlers.recover

    def torch_function(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        try:
            return look_up(func, unknown)(func, args, kwargs or _NO_KWARGS)
        except RuntimeError as error:
            return recover(error, func, args, kwargs or _NO_KWARGS)

    def shape(self: Any) -> Any:
        """Return the global shape, or the local shape if dispatch is off."""
        return self._layout.shape if is_dispatch_on() else _local_shape(self)

    namespace = {
        **{name: _local_property(name, base) for name in ("dtype", "device", "ndim")},
        **{name: _complex_part(name) for name in ("real", "imag")},
        "__doc__": mixin.__doc__,
        "__module__": mixin.__module__,
        "__torch_function__": classmethod(torch_function),
        "shape": property(shape),
        "__copy__": handlers.copy_dtensor,
        "__deepcopy__": handlers.deepcopy_dtensor,
        "__reduce_ex__": handlers.reduce_dtensor,
        "set_": handlers.composite.set_method,
        #: Whether torch reads the gradient of a parameter in backward, so that it must be complete there.
        "_read_in_backward": False,
        "_is_flat_param": wrappers.refuse_flat_parameter,
        **checkpoints.PROTOCOL,
        **make_methods({f: handler for f, handler in computing.items() if f not in HANDLERS}, recover),
        **make_operators(table, recover),
    }
    State.tensor_class = type(mixin)("DTensor", (mixin, base), namespace)
    State.core = core
    try:
        patches.PATCHES.install()
    except RuntimeError:
        State.tensor_class = None  # every later attempt must raise too
        raise
    when_imported("torch._dynamo", trace_losses)
    return State.tensor_class
