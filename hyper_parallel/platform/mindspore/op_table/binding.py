"""Rows of MindSpore's op table: primitives, and their arguments where they differ from the operation's signature.

The same primitive arrives in several forms: ``mint.sum(x, 1)`` gives ``SumExt`` with all arguments by position,
``x.sum(dim=1)`` the arguments as the user wrote them. The text of a row unifies these forms. `core.rules.signature`
describes its language.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor, mint

from hyper_parallel.platform.arguments import call_again, call_by_position, call_elementwise, ints, placed
from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.contract.dispatch import Bind, Bound, Call, Words
from hyper_parallel.platform.mindspore.basics.empty_shards import safe_when_empty
from hyper_parallel.platform.mindspore.processes.collectives import is_dense

__all__ = [
    "WORDS",
    "Adjust",
    "Bound",
    "Call",
    "Choose",
    "Function",
    "by_name",
    "elementwise",
    "given_again",
    "instead",
    "number_in",
    "repeated",
    "row",
]

#: Picks the row by (args, kwargs) if one primitive is several operations; None for a call without a rule.
Choose = Callable[[tuple, dict], NativeOp | None]
#: Type of `NativeOp.adjust`.
Adjust = Callable[[Any, tuple, tuple], Bound]


class Function:
    """A function with the ``name`` under which the op table knows it."""

    __slots__ = ("_function", "name")

    def __init__(self, name: str, function: Callable) -> None:
        self.name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operation {self.name}>"


# -------------------------------------------------------------------- values of arguments
#: Numbers of the reductions in generated code and in attributes of primitives.
_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}


@dataclass(frozen=True)
class _Held:
    """Stored values and dtype of a tensor in static arguments, such as sizes or dimensions.

    The tensor is the same on every rank, or a DTensor.
    """

    values: Any
    dtype: Any

    def tensor(self) -> Tensor:
        return Tensor(self.values, self.dtype)


def _told(value: Any) -> Any:
    """Return the numbers in a static argument: a number, or a tuple of numbers."""
    if isinstance(value, _Held):
        value = value.values
    return tuple(map(_told, value)) if isinstance(value, (list, tuple)) else value


def _kept(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_kept, value))
    if isinstance(value, Tensor):
        values = value.asnumpy().tolist()
        return _Held(_told(values), value.dtype)
    return value


def given_again(value: Any) -> Any:
    """Return a static argument with tensors in place of `_Held` objects."""
    if isinstance(value, tuple):
        return tuple(map(given_again, value))
    return value.tensor() if isinstance(value, _Held) else value


def number_in(value: Any) -> Any:
    """Return the number in a tensor without dimensions, any other value unchanged. See `Words.number`."""
    return value.item() if isinstance(value, Tensor) and not value.ndim else value


def _one_dim(dim: Any) -> int | None:
    """Return a dimension, which may be the only element of a tuple."""
    return None if dim is None or dim == () else int(dim[0] if isinstance(dim, (tuple, list)) else dim)


WORDS = Words(
    tensor=Tensor,
    spellings={
        "x": "input inputs self tensor input_x",
        "other": "mat2 tensor2 y",
        "dim": "axis",
        "dim0": "axis0",
        "dim1": "axis1",
        "dims": "dim axis axes",
        "removed": "dim axis axes",
        "eps": "epsilon",
        "p": "ord",
        "keepdim": "keepdims keep_dims",
        "split_size": "split_size_or_sections split_size_int split_size_sections",
    },
    conversions={
        **dict.fromkeys(("start", "length", "chunks", "k", "num_classes", "ignore_index"), int),
        **dict.fromkeys(("eps", "p", "label_smoothing"), float),
        **dict.fromkeys(("dim", "repeated_dim"), _one_dim),
        "split_size": lambda size: ints(size) if isinstance(size, (tuple, list)) else int(size),
        # 0-d tensors that give the dtype.
        **dict.fromkeys(("on", "off"), lambda value: value),
        "reduction": lambda reduction: _REDUCTIONS.get(reduction, reduction),
    },
    drops=True,
    kept=_kept,
    told=_told,
    number=number_in,
)


# -------------------------------------------------------------------- rows
def row(
    name: str,
    takes: str | Bind = "",
    call: Call = call_by_position,
    by_function: bool = False,
    adjust: Adjust | None = None,
) -> NativeOp:
    """Return an op-table row for the canonical operation ``name``.

    Args:
        name: the canonical operation.
        takes: the arguments of the primitive, where they differ from the operation's signature: see `NativeOp`.
        call, adjust: see `NativeOp`.
        by_function: whether ``adjust``, or ``takes``, reads the function.
    """
    return safe_when_empty(NativeOp(name, takes, call, by_function, words=WORDS, adjust=adjust))


def instead(function: Callable) -> Call:
    """Return a ``call`` that runs ``function`` in place of the native one, which may have no CPU kernel."""
    return lambda func, operands, static_args: function(*operands, *static_args)


def repeated(name: str, takes: str, by_function: bool = False, adjust: Adjust | None = None) -> NativeOp:
    """Return an op-table row that repeats the native call with its original arguments, which differ too much from a
    signature."""
    return row(name, f"{takes} ...", call_again, by_function, adjust)


def by_name(table: Mapping[str, Any]) -> dict[str, Any]:
    """Split the keys of a table, in which each key is several names separated by spaces."""
    return {name: value for names, value in table.items() for name in names.split()}


# -------------------------------------------------------------------- element-wise operations
def _call_anywhere(func: Any, operands: tuple, static_args: Any) -> Any:
    if static_args is None:
        return func(*operands)
    args, kwargs = placed(operands, static_args)
    return func(*[given_again(x) for x in args], **{name: given_again(x) for name, x in kwargs.items()})


def _inplace(call: Call) -> Call:
    """Return a ``call`` of a primitive that writes in place. On CPU most such primitives return a new tensor and write
    nothing. The other primitives lose a write to a view."""

    def write(func: Any, operands: tuple, static_args: Any) -> Any:
        target = operands[0]
        if not is_dense(target):
            value = write(func, (mint.add(target, 0), *operands[1:]), static_args)
            Tensor.__setitem__(target, (slice(None),) * target.ndim, value)
            return target
        result = call(func, operands, static_args)
        if result._data_ptr() != target._data_ptr():
            target.copy_(result)
        return target

    return write


def elementwise(name: str, takes: str = "*", flat: bool | tuple[int, ...] = False, inside: float = 9) -> NativeOp:
    """Return an op-table row for an element-wise primitive.

    Args:
        name: the canonical operation.
        takes: the first arguments, which are the operands, tensors or scalars. A star: all tensors are operands,
            wherever they are. Empty: the arguments of the signature.
        flat: whether MindSpore gives the operands no gradient, where other frameworks give zeros; or the indices of
            operands without gradient.
        inside: a number in the domain of the function.
    """
    call: Call = _call_anywhere if takes == "*" else call_again if takes.endswith("...") else call_elementwise
    call = _inplace(call) if name.endswith("_") else call
    return safe_when_empty(NativeOp(name, takes, call, False, words=WORDS), flat, inside)
