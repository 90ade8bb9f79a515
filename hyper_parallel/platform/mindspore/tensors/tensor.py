"""The DTensor of MindSpore: a `mindspore.Tensor` whose operations arrive at core's dispatcher.

A DTensor **is** its local tensor: `wrap` changes the class of the tensor that an operation returned. So the object
stays the tensor of the autograd graph. Gradients with respect to a DTensor, and of a DTensor, work as for any tensor.
The change of class costs a tenth of a microsecond. A second tensor object made with ``Tensor._make_subclass`` costs 1.4
us. As a leaf, ``value_and_grad`` would treat it as another tensor.

MindSpore calls ``__fallback__`` for most operations on a subclass. Indexing, iteration, ``stack`` and a few other
operations do not call it. They are overridden here, because they would silently compute on the shard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from math import prod
from operator import index
from typing import Any

from mindspore import Tensor, mint, nn, ops
from mindspore.ops import Primitive

from hyper_parallel.platform.contract import Core, Dispatch
from hyper_parallel.platform.mindspore.basics.private import NoFallbackGuard
from hyper_parallel.platform.mindspore.op_table import COMPOSED, OPS, PASS_THROUGH, RESULTS, VARIANTS
from hyper_parallel.platform.mindspore.op_table.binding import Function
from hyper_parallel.platform.mindspore.op_table.random import DRAWS, drawn_by_first_rank, refuse_draw
from hyper_parallel.platform.mindspore.processes.communication import is_collective, run_collective
from hyper_parallel.platform.mindspore.tensors.gradient_hooks import register_hook

__all__ = [
    "WRITE_FIRST_OPERAND",
    "InterceptedTensor",
    "LegacyFunction",
    "NoDispatch",
    "Unknown",
    "copy_of",
    "distributed_in",
    "is_dispatching",
]

_SHAPE = Tensor.shape.__get__


class _State(threading.local):
    """Number of `NoDispatch` guards that are active in this thread."""

    depth = 0


_STATE = _State()


class NoDispatch:
    """Guard under which operations run on the local tensors, and ``.shape`` of a DTensor is its local shape."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        state = _STATE
        if state.depth:  # the outermost guard of the thread is enough
            self._guard = None
        else:
            self._guard = NoFallbackGuard()
            self._guard.__enter__()
        state.depth += 1

    def __exit__(self, *exc: Any) -> None:
        _STATE.depth -= 1
        if self._guard is not None:
            self._guard.__exit__(*exc)


def is_dispatching() -> bool:
    """Return whether operations on DTensors are intercepted on this thread."""
    return not _STATE.depth


#: Primitives that write to a parameter, their first operand. Their names do not say so.
WRITE_FIRST_OPERAND = frozenset(
    f"Scatter{nd}{what}" for nd in ("", "Nd") for what in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Update")
)


class Unknown(Function):
    """A primitive without a row. Two objects of one name are equal, so that core reports each primitive once. The name
    of a primitive that writes in place gets a trailing underscore, which core rejects for sharded operands."""

    __slots__ = ()

    def __init__(self, func: Any) -> None:
        inplace = func.name.startswith(("Inplace", "Assign", "Apply")) or func.name in WRITE_FIRST_OPERAND
        super().__init__(func.name + "_" if inplace else func.name, func)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class _Named(Function):
    """A function of which MindSpore makes a new object for each call.

    Two objects of one name are equal, so that calls are cached.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class LegacyFunction:
    """A primitive of the old calling convention as a plain function of its operands. Two objects of one primitive are
    equal, so that calls are cached."""

    __slots__ = ("_call", "name", "prim")

    def __init__(self, call: Callable, prim: Primitive, name: str) -> None:
        self._call = call
        self.prim = prim
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.prim, self.name, args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LegacyFunction) and other.prim is self.prim

    def __hash__(self) -> int:
        return id(self.prim)

    def __repr__(self) -> str:
        return f"<primitive {self.name}>"


def _dispatched(name: str, plain: Callable) -> Any:
    """Return a method that dispatches the row of that name, for methods that MindSpore does not intercept."""
    row, function = OPS[name], Function(name, plain)

    def method(self: Any, *args: Any) -> Any:
        if _STATE.depth:
            return plain(self, *args)
        return self._dispatch(row, function, (self, *args), {})

    return method


def _reflected(name: str, plain: Callable[[Any, Any], Any]) -> Any:
    """Return the reflected method of an operator, whose left operand is not distributed."""
    row, function = OPS[name], Function(name, plain)

    def method(self: Any, other: Any) -> Any:
        if _STATE.depth:
            return plain(other, self)
        if not isinstance(other, (Tensor, int, float)):
            return NotImplemented
        return self._dispatch(row, function, (other, self), {})

    return method


def _of_whole(read: Callable[[Any], Any]) -> Any:
    """Return a method that reads values from the full tensor."""
    what = f"{read.__name__}()"
    return lambda self: read(self._whole(what))


class InterceptedTensor(Tensor):
    """Base that makes a tensor class a distributed one. Core's mixin adds the methods that users see.

    `make_dtensor_class` sets `_core` and `_dispatch`, core's dispatcher; `wrap` sets `_layout`.
    """

    _layout: Any = None
    _core: Core = None  # type: ignore[assignment]
    _dispatch: Dispatch

    def __new__(cls, local: Any, *args: Any, **kwargs: Any) -> Any:
        """Make an alias of a DTensor. MindSpore calls this to make parameters; users call `DTensor.from_local`."""
        if not isinstance(local, InterceptedTensor):
            raise TypeError(
                "DTensor cannot be called: make a DTensor with DTensor.from_local, distribute_tensor or a factory"
            )
        new = Tensor._make_subclass(cls, local)
        new._layout = local._layout
        return new

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # the base class would start the tensor anew
        pass

    def __fallback__(self, func: Any, args: Sequence[Any], kwargs: dict | None = None) -> Any:
        name = func.name
        if len(args) == 3 and isinstance(args[0], Primitive):
            func = LegacyFunction(func, args[0], name)
            args = args[2]
        args = tuple(args)
        kwargs = kwargs or {}
        if name in PASS_THROUGH:
            with NoDispatch():
                return func(*args, **kwargs)
        if is_collective(name):
            with NoDispatch():
                return run_collective(name, func, args, kwargs)
        variant = VARIANTS.get(name)
        native = OPS.get(name) if variant is None else variant(args, kwargs)
        if native is None:
            composition = COMPOSED.get(name)
            result = NotImplemented if composition is None else composition(func, args, kwargs)
            return self._without_row(Unknown(func), args, kwargs) if result is NotImplemented else result
        if native.binds_by_function and type(func) is not LegacyFunction:
            func = _Named(name, func)
        result = type(self)._dispatch(native, func, args, kwargs)
        # The primitive itself ran for a plain tensor with marks, and gave all its results.
        return RESULTS[name](result) if name in RESULTS and not isinstance(result, tuple) else result

    def _without_row(self, function: Unknown, args: tuple, kwargs: dict) -> Any:
        draws = function.name.removesuffix("_") in DRAWS
        if draws:
            refuse_draw(function.name, self)
        result = type(self)._dispatch(None, function, args, kwargs)
        return drawn_by_first_rank(result) if draws else result

    # ---------------------------------------------------------------- sizes are global
    @property
    def shape(self) -> tuple[int, ...]:
        layout = self._layout
        return _SHAPE(self) if _STATE.depth or layout is None else layout.shape

    @property
    def ndim(self) -> int:
        return len(_SHAPE(self))

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def dim(self) -> int:
        return len(_SHAPE(self))

    ndimension = dim

    def numel(self) -> int:
        return prod(self.shape)

    nelement = numel

    def is_contiguous(self) -> bool:
        return Tensor.is_contiguous(self) if _STATE.depth or self._layout is None else self._core.is_contiguous(self)

    def stride(self, dim: int | None = None) -> Any:
        if _STATE.depth or self._layout is None:
            return Tensor.stride(self) if dim is None else Tensor.stride(self, dim)
        strides = self._core.strides_of_whole(self)
        return strides if dim is None else strides[dim]

    def __len__(self) -> int:
        shape = self.shape
        if not shape:
            raise TypeError("len() of a 0-d tensor")
        return shape[0]

    # ---------------------------------------------------------------- methods that __fallback__ does not see
    __getitem__ = _dispatched("getitem", Tensor.__getitem__)
    __setitem__ = _dispatched("setitem_", Tensor.__setitem__)
    contiguous = _dispatched("Contiguous", Tensor.contiguous)
    clone = _dispatched("Clone", Tensor.clone)
    copy = _dispatched("Clone", Tensor.copy)

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self))])

    # A subclass's reflected method has precedence, so `plain - distributed` arrives here and not in MindSpore's C++
    # code, which looks for __fallback__ on the left operand only.
    __radd__ = _reflected("Add", ops.add)
    __rsub__ = _reflected("Sub", ops.sub)
    __rmul__ = _reflected("Mul", ops.mul)
    __rtruediv__ = _reflected("Div", ops.div)
    __rpow__ = _reflected("Pow", ops.pow)
    __rfloordiv__ = _reflected("FloorDiv", ops.floor_divide)
    __rmod__ = _reflected("Mod", ops.floor_mod)
    __rmatmul__ = _reflected("MatMulExt", mint.matmul)

    # ---------------------------------------------------------------- values leave the device: the whole tensor's
    asnumpy = numpy = _of_whole(Tensor.asnumpy)
    item = _of_whole(Tensor.item)
    tolist = _of_whole(Tensor.tolist)
    __bool__ = _of_whole(bool)
    __int__ = _of_whole(int)
    __float__ = _of_whole(float)
    __index__ = _of_whole(index)

    def __array__(self, dtype: Any = None) -> Any:
        return self.asnumpy() if dtype is None else self.asnumpy().astype(dtype)

    def _whole(self, what: str) -> Tensor:
        """Return the plain tensor that the method ``what`` reads: the full tensor, or under the guard the local
        tensor."""
        if _STATE.depth or self._layout is None:
            return Tensor._make_subclass(Tensor, self)
        return self._read_whole(what)

    register_hook = register_hook

    # ---------------------------------------------------------------- copies
    def __deepcopy__(self, memo: dict) -> Any:
        layout = self._layout  # waits for the values of a pending collective
        new: Any = copy_of(self)
        new.__class__ = type(self)
        new._layout = layout
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DTensor cannot be pickled: its device mesh belongs to this process. Save x.to_local() or "
            "x.full_tensor() instead"
        )

    def __hash__(self) -> int:
        return id(self)


def distributed_in(tree: Any) -> Iterator[Any]:
    """Yield the DTensors in nested tuples, lists and dicts, and the distributed parameters of cells in them."""
    if isinstance(tree, InterceptedTensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from distributed_in(item)
    elif isinstance(tree, dict):
        yield from distributed_in(tuple(tree.values()))
    elif isinstance(tree, nn.Cell):
        for _, cell in tree.cells_and_names():
            yield from distributed_in(tuple(cell._params.values()))


def copy_of(x: Tensor) -> Tensor:
    """Return a plain leaf tensor with a copy of the local data. MindSpore's own deepcopy shares memory until an
    operation writes. But `copy_` would write to both tensors."""
    with NoDispatch():
        return Tensor(Tensor.asnumpy(Tensor._make_subclass(Tensor, x)), x.dtype)
