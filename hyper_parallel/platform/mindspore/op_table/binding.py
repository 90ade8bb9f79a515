"""Rows of the op table: how a native call is brought into canonical form, and how the canonical form runs natively.

The same primitive arrives in several shapes: ``mint.sum(x, 1)`` gives ``SumExt`` with all arguments by position,
``x.sum(dim=1)`` the arguments as the user wrote them. A row names the arguments and their use in one text. The text
evens the shapes out, see `platform.row_text`. A function decorated with `binds` computes further values from the
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspore import Tensor, mint

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.basics.empty_shards import safe_when_empty
from hyper_parallel.platform.mindspore.processes.collectives import is_dense
from hyper_parallel.platform.row_text import Bind, Bound, Call, RowText, call_again, call_by_position, dims_of, ints

__all__ = [
    "Bind",
    "Bound",
    "Call",
    "Choose",
    "Function",
    "arguments",
    "binds",
    "by_name",
    "elementwise",
    "instead",
    "repeated",
    "row",
]

#: Picks the row by (args, kwargs) where one primitive is several operations; None for a call without a rule.
Choose = Callable[[tuple, dict], NativeOp | None]


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
#: How generated code and the attributes of primitives count them.
_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}

_TEXTS = RowText(
    {
        "x": "input inputs self tensor input_x",
        "other": "mat2 tensor2",
        "dim": "axis",
        "dim0": "axis0",
        "dim1": "axis1",
        "dims": "dim axis axes",
        "eps": "epsilon",
        "p": "ord",
        "keepdim": "keepdims keep_dims",
        "split_size": "split_size_or_sections split_size_int split_size_sections",
    },
    #: ``dim`` is one dimension, ``dims`` are several, or None for all.
    {
        **dict.fromkeys(("start", "length", "chunks", "k", "depth", "ignore_index"), int),
        **dict.fromkeys(("eps", "p", "label_smoothing"), float),
        **dict.fromkeys(("keepdim", "training", "transpose_a", "transpose_b"), bool),
        "dim": lambda dim: None if dim is None else int(dim),
        "dims": dims_of,
        "sizes": ints,
        "split_size": lambda size: ints(size) if isinstance(size, (tuple, list)) else int(size),
        "reduction": lambda reduction: _REDUCTIONS.get(reduction, reduction),
    },
    drops=True,
)
arguments, binds = _TEXTS.arguments, _TEXTS.binds


# -------------------------------------------------------------------- rows
def row(name: str, bind: str | Bind, call: Call = call_by_position, by_function: bool = False) -> NativeOp:
    """A row of the canonical operation ``name``.

    Args:
        name: the canonical operation.
        bind: as a text, or see `NativeOp`.
        call: see `NativeOp`.
        by_function: whether ``bind`` looks at the function.
    """
    return safe_when_empty(NativeOp(name, arguments(bind), call, by_function))


def instead(function: Callable) -> Call:
    """A ``call`` that runs ``function`` in place of the native one: that has no kernel on CPU, or takes its arguments
    otherwise."""
    return lambda func, operands, static_args: function(*operands, *static_args)


def repeated(name: str, bind: str | Bind, by_function: bool = False) -> NativeOp:
    """A row of one operand whose native call is made again as it was: which arguments it takes differs too much."""
    return row(name, _TEXTS.repeated(bind), call_again, by_function)


def by_name(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table by single names of one whose keys are several, as words."""
    return {name: value for names, value in table.items() for name in names.split()}


# -------------------------------------------------------------------- element-wise operations
def _call_elementwise(func: Any, operands: tuple, static_args: Any) -> Any:
    if static_args is None or (others := static_args[-1]) is None:
        return func(*operands)
    args, kwargs, places = list(others[0]), dict(others[1]), others[2]
    for place, operand in zip(places, operands, strict=True):
        if isinstance(place, int):
            args[place] = operand
        else:
            kwargs[place] = operand
    return func(*args, **kwargs)


def _call_inplace(func: Any, operands: tuple, static_args: Any) -> Any:
    """Run a primitive that writes in place. On CPU most of these return a new tensor and write nothing. Those that do
    write lose a write to a view."""
    target = operands[0]
    if not is_dense(target):
        value = _call_inplace(func, (mint.add(target, 0), *operands[1:]), static_args)
        Tensor.__setitem__(target, (slice(None),) * target.ndim, value)
        return target
    result = _call_elementwise(func, operands, static_args)
    if result._data_ptr() != target._data_ptr():
        target.copy_(result)
    return target


def elementwise(
    name: str, count: int | None = None, flat: bool | tuple[int, ...] = False, inside: float = 9
) -> NativeOp:
    """A row for an element-wise primitive.

    Args:
        name: the canonical operation. The static arguments of a division begin with the rounding mode.
        count: how many arguments, counted by position, are operands, be they tensors or scalars. None: the tensors
            are, wherever they stand.
        flat: whether MindSpore gives the operands no gradient, where other frameworks give zeros; or the places of
            those to which it gives none.
        inside: a number for which the function is defined.
    """
    divides = name in ("div", "div_")

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        head = (kwargs.get("rounding_mode", args[2] if len(args) > 2 else None),) if divides else ()
        if not kwargs and (len(args) == count or (count is None and all(isinstance(a, Tensor) for a in args))):
            return args, (*head, None) if head else None
        if count is None:
            places: tuple = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor))
            places += tuple(k for k, a in kwargs.items() if isinstance(a, Tensor))
        else:
            by_keyword = [k for k in kwargs if k in _OPERAND_KEYWORDS]
            positional = min(count, len(args))
            places = (*range(positional), *by_keyword[: count - positional])
        operands = tuple(args[p] if isinstance(p, int) else kwargs[p] for p in places)
        # Not the operands themselves: plans of divisions are kept under this.
        others = tuple(None if i in places else a for i, a in enumerate(args))
        named = tuple((k, None if k in places else a) for k, a in kwargs.items())
        return operands, (*head, (others, named, places))

    call = _call_inplace if name.endswith("_") else _call_elementwise
    return safe_when_empty(NativeOp(name, bind, call, False), flat, inside)


_OPERAND_KEYWORDS = ("input", "other", "x", "y", "exponent", "mask", "value", "tensor")
