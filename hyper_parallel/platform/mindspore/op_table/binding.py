"""Rows of the op table: how a native call is brought into canonical form, and how the canonical form runs natively.

The same primitive arrives in several shapes: ``mint.sum(x, 1)`` gives ``SumExt`` with all arguments by position,
``x.sum(dim=1)`` the arguments as the user wrote them. A row says what arguments there are and what becomes of them in
one text, and `arguments` evens the shapes out:

    "x dims=None dtype=None keepdim=False -> x | dims keepdim dtype"

On the left are the names in the native order with their defaults; on the right the operands, and after the bar the
static arguments, as the canonical operation wants them; both may be constants. Without a right side the first is the
operand and the others are static. A last argument ``*sizes`` takes all that are left, numbers or a tuple of them.
What is computed from the arguments is a function decorated with `binds`.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspore import Tensor, mint

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.collectives import is_dense
from hyper_parallel.platform.mindspore.empty_shards import safe_when_empty

__all__ = [
    "Bind",
    "Call",
    "Choose",
    "Function",
    "arguments",
    "binds",
    "by_name",
    "dims_of",
    "elementwise",
    "instead",
    "ints",
    "repeated",
    "row",
    "signature",
]

Bind = Callable[[Any, tuple, dict], tuple[tuple, tuple]]
Call = Callable[[Any, tuple, Any], Any]
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
def ints(values: Sequence[Any]) -> tuple[int, ...]:
    """Sizes or dims given as ``f(2, 3)`` or ``f((2, 3))``, numbers or 0-d tensors, as a tuple of ints."""
    if len(values) == 1 and isinstance(values[0], (tuple, list, Tensor)):
        values = values[0].tolist() if isinstance(values[0], Tensor) else values[0]
    return tuple(int(v) for v in values)


def dims_of(dim: Any) -> tuple[int, ...] | None:
    """A reduction's dims: None or an empty tuple (MindSpore's old way) for all."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return None
    if isinstance(dim, Tensor):
        dim = dim.tolist()
    return (int(dim),) if not isinstance(dim, (tuple, list)) else tuple(int(d) for d in dim)


def _int_or_none(dim: Any) -> int | None:
    return None if dim is None else int(dim)


def _int_or_ints(size: Any) -> int | tuple[int, ...]:
    return ints((size,)) if isinstance(size, (tuple, list)) else int(size)


#: How generated code and the attributes of primitives count them.
_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}

#: What the value of an argument becomes, by its name; others stay as they are. ``dim`` is one dimension, ``dims`` are
#: several, or None for all.
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("start", "length", "chunks", "k", "depth", "ignore_index"), int),
    **dict.fromkeys(("eps", "p", "label_smoothing"), float),
    **dict.fromkeys(("keepdim", "training", "transpose_a", "transpose_b"), bool),
    "dim": _int_or_none,
    "dims": dims_of,
    "sizes": ints,
    "split_size": _int_or_ints,
    "reduction": lambda reduction: _REDUCTIONS.get(reduction, reduction),
}

#: Other names under which MindSpore's functions take an argument.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "x": ("input", "inputs", "self", "tensor", "input_x"),
    "other": ("mat2", "tensor2"),
    "dim": ("axis",),
    "dim0": ("axis0",),
    "dim1": ("axis1",),
    "dims": ("dim", "axis", "axes"),
    "eps": ("epsilon",),
    "p": ("ord",),
    "keepdim": ("keepdims", "keep_dims"),
    "split_size": ("split_size_or_sections", "split_size_int", "split_size_sections"),
}


def signature(text: str) -> Callable[[tuple, dict], list[Any]]:
    """Make ``unpack(args, kwargs)`` that returns the values of the arguments that ``text`` names, in order.

    Arguments beyond those are dropped: they are attributes that do not change what is computed.

    Raises (from ``unpack``):
        TypeError: when an argument without a default is missing.
    """
    names = _names_in(text)
    partitioned = [item.partition("=") for item in text.split()]
    defaults = {name: literal_eval(value) for name, equals, value in partitioned if equals}
    spellings = [(name, *_SPELLINGS.get(name, ())) for name in names]
    conversions = [(i, _CONVERSIONS[name]) for i, name in enumerate(names) if name in _CONVERSIONS]
    starred = len(names) - 1 if "*" in text else None

    def unpack(args: tuple, kwargs: dict) -> list[Any]:
        if starred is not None:
            args = (*args[:starred], args[starred:] or tuple(kwargs.values()))
        values = list(args[: len(names)])
        for i in range(len(values), len(names)):
            key = next((spelling for spelling in spellings[i] if spelling in kwargs), None) if kwargs else None
            if key is None and names[i] not in defaults:
                raise TypeError(f"argument {names[i]!r} is missing")
            values.append(defaults[names[i]] if key is None else kwargs[key])
        for i, convert in conversions:
            values[i] = convert(values[i])
        return values

    return unpack


def _names_in(text: str) -> list[str]:
    return [item.partition("=")[0].lstrip("*") for item in text.split()]


def binds(text: str) -> Callable[[Callable[..., tuple[tuple, tuple]]], Bind]:
    """Make a ``bind`` of the decorated function of the arguments that ``text`` names, by position."""
    unpack = signature(text)
    return lambda arrange: lambda func, args, kwargs: arrange(*unpack(args, kwargs))


def arguments(text: str) -> Bind:
    """Make the ``bind`` that a text declares: see the top of this module."""
    taken, arrow, made = text.partition("->")
    unpack, names = signature(taken), _names_in(taken)
    heads, tails = (part.split() for part in made.partition("|")[::2]) if arrow else (names[:1], names[1:])
    constants = [item for item in (*heads, *tails) if item not in names]
    places = [*names, *constants]
    operands, static_args = [places.index(item) for item in heads], [places.index(item) for item in tails]
    fixed = [literal_eval(item) for item in constants]

    def bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
        values = unpack(args, kwargs) + fixed
        return tuple([values[i] for i in operands]), tuple([values[i] for i in static_args])

    return bind


# -------------------------------------------------------------------- rows
def row(name: str, bind: str | Bind, call: Call | None = None, by_function: bool = False) -> NativeOp:
    """A row of the canonical operation ``name``.

    Args:
        name: the canonical operation.
        bind: as a text, or see `NativeOp`.
        call: see `NativeOp`; None: the native function with the operands, then the static arguments, by position.
        by_function: whether ``bind`` looks at the function.
    """
    made = arguments(bind) if isinstance(bind, str) else bind
    return safe_when_empty(NativeOp(name, made, call or _call_by_position, by_function))


def _call_by_position(func: Any, operands: tuple, static_args: tuple) -> Any:
    return func(*operands, *static_args)


def instead(function: Callable) -> Call:
    """A ``call`` that runs ``function`` in place of the native one: that has no kernel on CPU, or takes its arguments
    otherwise."""
    return lambda func, operands, static_args: function(*operands, *static_args)


def repeated(name: str, bind: str | Bind, by_function: bool = False) -> NativeOp:
    """A row whose native call is repeated as it came: which arguments it takes differs too much. The static arguments
    are those of ``bind``, then all that came with the one operand."""
    made = arguments(bind) if isinstance(bind, str) else bind

    def bind_all(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
        return args[:1], (*made(func, args, kwargs)[1], _hashable(args[1:]), tuple(kwargs.items()))

    return row(name, bind_all, _repeat, by_function=by_function)


def _repeat(func: Any, operands: tuple, static_args: tuple) -> Any:
    return func(operands[0], *static_args[-2], **dict(static_args[-1]))


def _hashable(value: Any) -> Any:
    """``value`` with lists turned into tuples."""
    return tuple(_hashable(v) for v in value) if isinstance(value, (list, tuple)) else value


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
    """On CPU most primitives that should write in place return a new tensor and write nothing, and those that write
    lose what is written to a view."""
    target = operands[0]
    if not is_dense(target):
        value = _call_inplace(func, (mint.add(target, 0), *operands[1:]), static_args)
        Tensor.__setitem__(target, (slice(None),) * target.ndim, value)
        return target
    result = _call_elementwise(func, operands, static_args)
    if result._data_ptr() != target._data_ptr():
        target.copy_(result)
    return target


def elementwise(name: str, count: int | None = None, flat: bool = False) -> NativeOp:
    """A row for an element-wise primitive.

    Args:
        name: the canonical operation. The static arguments of a division begin with the rounding mode.
        count: how many arguments, counted by position, are operands, be they tensors or scalars. None: the tensors
            are, wherever they stand.
        flat: whether MindSpore gives the operands no gradient, where other frameworks give zeros.
    """
    divides = name in ("div", "div_")

    def bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple | None]:
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
    return safe_when_empty(NativeOp(name, bind, call, False), flat)


_OPERAND_KEYWORDS = ("input", "other", "x", "y", "exponent", "mask", "value", "tensor")
