"""Text that describes the arguments of an operation: the operands and, after a bar, the static arguments.

    "x(*,in) weight(out,in) bias(out)=None"
    "x index | dim how='replace'"
    "*xs | dim=0"

A word is the name of an argument. Its dimensions may follow in parentheses, and the default after an equals sign. A
star before an operand means any number of tensors. Native functions take the arguments in this order, unless the entry
of the op table has a text with another order. That text may also contain the following words:

* ``name/other`` adds another spelling of the argument;
* ``name:=value`` is not an argument of the native function, and has this value;
* ``*name``, the last one, takes the rest of ``f(x, 2, 3)`` or of ``f(x, (2, 3))``;
* ``+name`` is passed to the native call, after the static arguments of the signature;
* ``-name`` is not an operand, in the text of an operation with any number of operands;
* ``...`` at the end repeats the native call with its original arguments and other operands;
* ``form: ...`` at the start names the entry of `FORMS` for the static arguments of the function.
"""

from __future__ import annotations

import functools
import re
from ast import literal_eval
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel.platform.arguments import dims_of, ints

__all__ = ["FORMS", "MEANINGS", "REQUIRED", "Argument", "Form", "Signature", "form", "read_arguments", "value_of"]

#: The default of a required argument.
REQUIRED: Any = object()
_WORD = re.compile(r"(?P<mark>[*+-]?)(?P<names>[\w/]+)(?P<dims>\([\w,*]*\))?(?P<equals>:?=)?(?P<value>.*)")


class Argument(NamedTuple):
    """One argument of an operation.

    Attributes:
        name: name of the argument.
        spellings: all names of the argument.
        default: the default value, or `REQUIRED`.
        dims: names of the dimensions, or None; the first may be ``*``, for any number.
        mark: one of ``*+-``, or an empty string.
        fixed: whether the native function does not take it.
    """

    name: str
    spellings: tuple[str, ...]
    default: Any
    dims: tuple[str, ...] | None
    mark: str
    fixed: bool

    def __str__(self) -> str:
        dims = "" if self.dims is None else f"({','.join(self.dims)})"
        default = "" if self.default is REQUIRED else f"{':=' if self.fixed else '='}{self.default!r}"
        return f"{self.mark}{self.name}{dims}{default}"


def read_arguments(text: str) -> tuple[Argument, ...]:
    """Return the arguments in a text, in order."""
    return tuple(map(_read, text.split()))


def _read(word: str) -> Argument:
    found = _WORD.fullmatch(word)
    assert found is not None, f"{word!r} is no argument"
    mark, names, dims, equals, value = found.groups()
    spellings = tuple(names.split("/"))
    default = literal_eval(value) if equals else REQUIRED
    return Argument(
        spellings[0], spellings, default, tuple(dims[1:-1].split(",")) if dims else None, mark, equals == ":="
    )


@dataclass(frozen=True)
class Signature:
    """The arguments of a canonical operation.

    Attributes:
        text: the text of the signature.
        operands, static: operands and static arguments.
    """

    text: str
    operands: tuple[Argument, ...]
    static: tuple[Argument, ...]

    @staticmethod
    @functools.cache
    def of(text: str) -> Signature:
        """Return the signature of ``text``."""
        return Signature(text, *map(read_arguments, text.partition("|")[::2]))

    @property
    def several(self) -> bool:
        """Return whether the number of operands is arbitrary."""
        return any(operand.mark for operand in self.operands)


# ------------------------------------------------------------------------------------------- values of arguments
def value_of(name: str, more: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], Any] | None:
    """Return the function that converts the value of the argument ``name``, from ``more`` or from the common
    conversions."""
    return more.get(name) or _CONVERSIONS.get(name)


def _shape_of(x: Any) -> tuple[int, ...]:
    layout = getattr(x, "_layout", None)
    return tuple(x.shape if layout is None else layout.shape)


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("keepdim", "is_causal", "training", "transpose_a", "transpose_b"), bool),
    **dict.fromkeys(("dims", "removed"), dims_of),
    "like": _shape_of,
    "normalized": lambda shape: 1 if isinstance(shape, int) else len(shape),
    **dict.fromkeys(("order", "sizes", "tiles"), ints),
}

#: Descriptions of static arguments, for the documentation.
MEANINGS: dict[str, str] = {
    "bins": "number of bins",
    "channels": "whether entire channels are dropped",
    "counts": "`batched`: for each operand the number of dimensions behind its batch; `unique`: whether to count",
    "dim": "a dimension, counted from the end where it is negative",
    "dims": "dimensions as a tuple; None or an empty tuple for all",
    "dtype": "dtype to convert x to first, for losses that of the result; None for its own",
    "fixed": "which of batch and heads must be unsharded",
    "groups": "number of groups of channels, 0 where there are none",
    "how": "`add`, `replace` or another word",
    "index": "the index as `encode_index` gives it",
    "keep": "probability to keep an element",
    "nans": "`whole` where NaNs share the gradient",
    "normalized": "number of normalised dimensions, the last ones",
    "order": "for each dimension of the result that of x",
    "pairs": "(before, after) for each dimension",
    "per_batch": "whether something holds an entry for each batch element",
    "places": "whether to tell places",
    "removed": "dimensions of size 1 that go, as a tuple; None for all",
    "results": "number of results; `batched` and `labelled`: their shapes, of `batched` behind the batch",
    "seed": "seed of the noise, or None",
    "shape": "shape of the result, None for that of x",
    "signature": "letters of the dimensions of operands and results",
    "sizes": "shape of the result; -1 for the size that is left, of `expand` for one that is kept",
    "split_size": "one size or a tuple of sizes",
    "statistic": "size of a statistic",
    "statistics": "number of statistics returned besides",
    "stream": "a stream of numbers of its own, or None",
    "tiles": "number of copies along each dimension",
    "tokens_first": "whether statistics of tokens have the tokens first",
    "whole": "whether sequences must be unsharded",
}


# ------------------------------------------------------------ other forms of static arguments
@dataclass(frozen=True)
class Form:
    """An alternative form of the static arguments of an operation. For example, ``flatten`` takes the first and the
    last dimension to join, and ``reshape`` takes the shape.

    Attributes:
        takes: the arguments of this form.
        make: ``make(shapes, *static)`` returns the static arguments of the operation, from the global shapes of the
            operands, or None for unsupported values.
    """

    takes: Signature
    make: Callable[..., tuple | None]


FORMS: dict[str, Form] = {}


def form(name: str, takes: str) -> Callable[[Callable[..., tuple | None]], Callable[..., tuple | None]]:
    """Register the decorated function as `Form.make` of the form ``name``."""

    def register(make: Callable[..., tuple | None]) -> Callable[..., tuple | None]:
        assert name not in FORMS, f"{name} is there twice"
        FORMS[name] = Form(Signature.of(takes), make)
        return make

    return register
