"""Tools for the op table: bring a native call into canonical form, and run the canonical form natively.

The same primitive arrives in several shapes: ``mint.sum(x, 1)`` gives ``SumExt`` with all arguments by position,
``x.sum(dim=1)`` the arguments as the user wrote them. `arguments` evens that out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mindspore import Tensor, mint

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.empty_shards import guarded

__all__ = [
    "Function",
    "Table",
    "arguments",
    "dims_of",
    "elementwise",
    "hashable",
    "ints",
    "row",
]

#: Names that MindSpore's functions use for one and the same argument.
_ALIASES = {
    "axis": "dim",
    "axes": "dims",
    "keep_dims": "keepdim",
    "keepdims": "keepdim",
    "input": "x",
    "self": "x",
    "tensor": "x",
    "input_x": "x",
    "dtype": "dtype",
    "size": "shape",
    "split_size_or_sections": "split_size",
    "split_size_int": "split_size",
    "split_size_sections": "split_size",
}


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


def arguments(names: Sequence[str], defaults: Sequence[Any], args: tuple, kwargs: dict) -> list:
    """The arguments by position, in the order of ``names``; ``defaults`` belong to the last names.

    Arguments beyond ``names`` are dropped: they are attributes that do not change what is computed.
    """
    values = list(args[: len(names)])
    if len(values) == len(names) and not kwargs:
        return values
    given = {_ALIASES.get(key, key): value for key, value in kwargs.items()}
    first_default = len(names) - len(defaults)
    for i in range(len(values), len(names)):
        if names[i] in given:
            values.append(given[names[i]])
        elif i >= first_default:
            values.append(defaults[i - first_default])
        else:
            raise TypeError(f"argument {names[i]!r} is missing")
    return values


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


def hashable(value: Any) -> Any:
    """``value`` with lists turned into tuples."""
    return tuple(hashable(v) for v in value) if isinstance(value, (list, tuple)) else value


def row(
    name: str,
    bind: Callable[[tuple, dict], tuple[tuple, tuple]],
    call: Callable[[Any, tuple, Any], Any] | None = None,
) -> NativeOp:
    """A row whose ``bind`` does not look at the function. Without ``call``: operands, then statics, by position."""
    return guarded(NativeOp(name, lambda func, args, kwargs: bind(args, kwargs), call or _call_by_position, False))


class Table(dict[str, NativeOp]):
    """Name of a primitive -> its row. Several names are given as words."""

    def add(self, names: str, op: NativeOp) -> None:
        """One row under several names."""
        self.update(dict.fromkeys(names.split(), op))

    def row(self, names: str, canonical: str, bind: Callable, call: Callable) -> None:
        """A new row, see `row`, under several names."""
        self.add(names, row(canonical, bind, call))


def _call_by_position(func: Any, operands: tuple, statics: tuple) -> Any:
    return func(*operands, *statics)


# -------------------------------------------------------------------- element-wise operations
class _Template:
    """Where the operands of an element-wise call go among its other arguments."""

    __slots__ = ("args", "kwargs", "places")

    def __init__(self, args: tuple, kwargs: dict, places: tuple) -> None:
        self.args = args
        self.kwargs = kwargs
        self.places = places


def _call_elementwise(func: Any, operands: tuple, statics: Any) -> Any:
    if statics is None or (template := statics[-1]) is None:
        return func(*operands)
    args = list(template.args)
    kwargs = dict(template.kwargs)
    for place, operand in zip(template.places, operands, strict=True):
        if isinstance(place, int):
            args[place] = operand
        else:
            kwargs[place] = operand
    return func(*args, **kwargs)


def _call_inplace(func: Any, operands: tuple, statics: Any) -> Any:
    """On CPU most primitives that should write in place return a new tensor and write nothing, and those that write
    lose what is written to a view."""
    target = operands[0]
    if not _is_whole(target):
        value = _call_inplace(func, (mint.add(target, 0), *operands[1:]), statics)
        Tensor.__setitem__(target, (slice(None),) * target.ndim, value)
        return target
    result = _call_elementwise(func, operands, statics)
    if result._data_ptr() != target._data_ptr():
        target.copy_(result)
    return target


def _is_whole(x: Tensor) -> bool:
    """Whether ``x`` is all of its memory, in order, so that it is as good as no view."""
    return x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes


def elementwise(
    name: str, count: int | None = None, mode: Callable[[tuple, dict], Any] | None = None, flat: bool = False
) -> NativeOp:
    """A row for an element-wise primitive.

    Args:
        name: the canonical operation.
        count: how many arguments, counted by position, are operands, be they tensors or scalars. None: the tensors
            are, wherever they stand.
        mode: for ``div``: gives the rounding mode.
        flat: whether MindSpore leads no gradient back, where others would give zeros.
    """

    def bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple | None]:
        head = () if mode is None else (mode(args, kwargs),)
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
        return operands, (*head, _Template(args, kwargs, places))

    op = NativeOp(name, bind, _call_elementwise, False)
    return guarded(replace(op, call=_call_inplace) if op.in_place else op, flat)


_OPERAND_KEYWORDS = ("input", "other", "x", "y", "exponent", "mask", "value", "tensor")
