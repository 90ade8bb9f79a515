"""Python operators of the DTensor class, and the methods that compute.

The class defines them, instead of inheriting them from `torch.Tensor`. Operators of `torch.Tensor` enter
``__torch_function__`` more slowly, by a third of the time of a view. Inherited operators also replace the message of
every TypeError by "unsupported operand type(s)".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hyper_parallel.platform.torch.basics.private import function_modes, is_dispatch_on
from hyper_parallel.platform.torch.basics.tensor import Handler
from hyper_parallel.platform.torch.op_table.binding import words

__all__ = ["make_methods", "make_operators"]


_OPERATORS = words(
    """
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__
__floordiv__ __rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__ __matmul__ __rmatmul__
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__
__lshift__ __rlshift__ __ilshift__ __rshift__ __rrshift__ __irshift__
"""
)

#: Operator -> the method that torch itself would pass to ``__torch_function__``, which is faster than the operator.
_METHODS = {
    "__add__": Tensor.add,
    "__radd__": Tensor.add,
    "__iadd__": Tensor.add_,
    "__sub__": Tensor.sub,
    "__isub__": Tensor.sub_,
    "__mul__": Tensor.mul,
    "__rmul__": Tensor.mul,
    "__imul__": Tensor.mul_,
    "__truediv__": Tensor.div,
    "__itruediv__": Tensor.div_,
    "__matmul__": Tensor.matmul,
    "__eq__": Tensor.eq,
    "__ne__": Tensor.ne,
    "__lt__": Tensor.lt,
    "__le__": Tensor.le,
    "__gt__": Tensor.gt,
    "__ge__": Tensor.ge,
}
_OPERANDS = (Tensor, int, float, complex)


def make_operators(handlers: Mapping[Any, Handler], recover: Callable) -> dict[str, Any]:
    """Return the operator methods for the class namespace.

    Args:
        handlers: table of the handlers of intercepted functions.
        recover: see `handlers.unknown`.
    """
    namespace: dict[str, Any] = {"__hash__": Tensor.__hash__}
    for name in _OPERATORS:
        native = getattr(Tensor, name)
        func = _METHODS.get(name, native)
        namespace[name] = _make_operator(name, native, func, handlers[func], recover)
    return namespace


def make_methods(handlers: Mapping[Any, Handler], recover: Callable) -> dict[str, Any]:
    """Return the methods of `torch.Tensor` for which ``handlers`` has a function; see `make_operators`."""
    natives = {name: getattr(Tensor, name) for name in dir(Tensor) if not name.startswith("_")}
    return {
        name: _make_method(native, handlers[native], recover)
        for name, native in natives.items()
        if inspect.isroutine(native) and native in handlers
    }


def _make_method(native: Any, handler: Handler, recover: Callable) -> Any:
    @functools.wraps(native)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_dispatch_on() or function_modes():
            return native(self, *args, **kwargs)
        try:
            return handler(native, (self, *args), kwargs)
        except RuntimeError as error:
            return recover(error, native, (self, *args), kwargs)

    return method


def _make_operator(name: str, native: Any, func: Any, handler: Handler, recover: Callable) -> Any:
    no_kwargs: dict[str, Any] = {}

    def operator(self: Any, other: Any) -> Any:
        if is_dispatch_on() and isinstance(other, _OPERANDS) and not function_modes():
            try:
                return handler(func, (self, other), no_kwargs)
            except RuntimeError as error:
                return recover(error, func, (self, other), no_kwargs)
        return native(self, other)

    operator.__name__ = name
    operator.__qualname__ = f"DTensor.{name}"
    return operator
