"""Conversion of a native call into operands and static arguments, by the signature of the operation. All backends share
it.

An entry of an op table names the operation. Its text lists only the differences of the native function from the
signature. `core.rules.signature` defines the language of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from operator import itemgetter
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.rules import OPERATIONS, CanonicalOp
from hyper_parallel.core.rules.signature import FORMS, REQUIRED, Argument, Signature, read_arguments, value_of
from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.contract.dispatch import Bind, Bound, Facts, Given, UnboundCallError, Words

__all__ = ["bind_of"]

_FORM = re.compile(r"(?:(\w+):(?=\s|$))?(.*)", re.DOTALL)


def bind_of(op: NativeOp) -> Bind:
    """Return the function ``bind(func, args, kwargs)`` of an entry of the op table.

    Raises (from ``bind``):
        UnboundCallError: for missing arguments, and for arguments that the entry does not name. A missing argument
            raises TypeError instead if the backend drops unnamed arguments.
    """
    return _BINDS[op]


def _make(op: NativeOp) -> Bind:
    if callable(op.takes):
        return op.takes
    canonical, words, adjust = OPERATIONS[op.name], op.words or Words(), op.adjust
    if op.facts is not None:
        return _as_called(canonical.signature, op.takes, op.facts, words)
    bind = (_elementwise if canonical.elementwise else _by_signature)(canonical, op.takes, words)
    return bind if adjust is None else lambda func, args, kwargs: adjust(func, *bind(func, args, kwargs))


_BINDS: Table = Table(_make, 1 << 16)


def _native_order(signature: Signature, text: str) -> tuple[Argument, ...]:
    """Return the arguments in the order of the native function."""
    return read_arguments(text) or (*(x._replace(mark="") for x in signature.operands), *signature.static)


def _places(arguments: tuple[Argument, ...], words: Words) -> dict[str, int]:
    """Return the index of each argument, by each of its spellings."""
    found: dict[str, int] = {}
    for i, argument in enumerate(arguments):
        for name in (*argument.spellings, *words.spellings.get(argument.name, "").split()):
            found.setdefault(name, i)
    return found


# ------------------------------------------------------------------------------------------- binding by the signature
def _numbers(words: Words) -> Callable[[Any], Any]:
    """Return a function that applies `Words.number` to an argument, and to each item of a list or tuple."""
    number = words.number

    def numbers(value: Any) -> Any:
        return tuple(map(numbers, value)) if isinstance(value, (list, tuple)) else number(value)

    return numbers


def _unpacker(taken: list[Argument], constants: list[Any], words: Words, static: Container[str]) -> Any:
    """Return ``unpack(args, kwargs)``, which returns the values of ``taken``, in order, followed by ``constants``.

    ``static`` has the names of the arguments that are not operands. Tensors there become numbers, unless the argument
    has a conversion of its own.
    """
    names, places, drops = [x.name for x in taken], _places(tuple(taken), words), words.drops
    starred = len(taken) - 1 if taken and taken[-1].mark == "*" else None
    defaults = [x.default for x in taken]
    if starred is not None and defaults[starred] is REQUIRED:
        defaults[starred] = ()
    numbers = _numbers(words)
    own = [value_of(name, words.conversions) or (numbers if name in static else None) for name in names]
    conversions = [(i, f) for i, f in enumerate(own) if f is not None]
    total, needed = len(taken), sum(value is REQUIRED for value in defaults)
    defaults += constants

    def unpack(args: tuple, kwargs: dict) -> list[Any]:
        if starred is not None and len(args) > starred:
            args = (*args[:starred], args[starred:])
        given = len(args)
        if given > total:
            if not drops:
                raise UnboundCallError(f"{given} arguments")
            args, given = args[:total], total
        values = [*args, *defaults[given:]]
        for key, value in kwargs.items():
            i = places.get(key, starred if drops else None)
            if i is not None:
                values[i] = value
            elif value is not None and not drops:
                raise UnboundCallError(f"argument {key!r}")
        if given < needed:
            for name, value in zip(names[given:needed], values[given:needed], strict=True):
                if value is REQUIRED:
                    raise (TypeError if drops else UnboundCallError)(f"argument {name!r} is missing")
        for i, convert in conversions:
            values[i] = convert(values[i])
        return values

    return unpack


def _picker(places: list[int]) -> Callable[[list[Any]], tuple]:
    """Return a function that selects the values at the indices ``places``."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda values: (values[places[0]],)) if places else (lambda values: ())


def _by_signature(canonical: CanonicalOp, text: str, words: Words) -> Bind:
    signature = canonical.signature
    text, again = (text.removesuffix("..."), True) if text.endswith("...") else (text, False)
    name, text = _FORM.match(text).groups()  # type: ignore[union-attr]
    form = FORMS[name] if name else None
    own = signature if form is None else form.takes
    arguments = _native_order(own, text)
    taken, fixed = [x for x in arguments if not x.fixed], [x for x in arguments if x.fixed]
    there = {x.name for x in arguments}
    # Arguments of the signature that neither the function nor the entry has get their defaults.
    fixed += [x for x in (*own.operands, *own.static) if x.name not in there and not x.mark]
    lacking = [x.name for x in fixed if x.default is REQUIRED]
    assert not lacking, f"{canonical.name}: {text!r} lacks {lacking}"
    order = [x.name for x in (*taken, *fixed)]
    static = [x.name for x in own.static]
    unpack = _unpacker(taken, [x.default for x in fixed], words, {*static, *(x.name for x in taken if x.mark == "+")})
    numbers = _numbers(words)
    sequence = next((order.index(x.name) for x in own.operands if x.mark and x.name in order), None)
    if own.several and sequence is None:
        operands = [i for i, x in enumerate(taken) if not x.mark and x.name not in static]
    else:
        operands = [order.index(x.name) for x in own.operands]
    pick_operands = _picker(operands) if sequence is None else lambda values: tuple(values[sequence])
    pick_static = _picker([order.index(name) for name in static])
    pick_extra = _picker([order.index(x.name) for x in taken if x.mark == "+"])

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        values = unpack(args, kwargs)
        return pick_operands(values), pick_static(values)

    def bind_all(func: Any, args: tuple, kwargs: dict) -> Bound:
        values = unpack(args, kwargs)
        xs, static = pick_operands(values), pick_static(values)
        if form is not None:
            made = form.make(tuple([_shape(x) for x in xs]), *static)
            if made is None:
                raise UnboundCallError
            static = made
        static = (*static, *pick_extra(values))
        if again:
            named = tuple([(k, numbers(x)) for k, x in kwargs.items() if not any(x is y for y in xs)]) if kwargs else ()
            static = (*static, numbers(args[len(xs) :]), named)
        return xs, static

    return bind_all if form or again or any(x.mark == "+" for x in taken) else bind


def _shape(x: Any) -> Any:
    """Return the global shape of a distributed or plain tensor, whether dispatch is on or off; None for other
    values."""
    layout = getattr(x, "_layout", None)
    if layout is not None:
        return layout.shape
    shape = getattr(x, "shape", None)
    return None if shape is None else tuple(shape)


# ------------------------------------------------------------ binding in the order of the call
def _elementwise(canonical: CanonicalOp, text: str, words: Words) -> Bind:
    """Return ``bind`` for an element-wise operation.

    The operands are the first arguments, or with the text ``*`` all tensors among the arguments. The static arguments
    are the other arguments, or None if there are no others.
    """
    if text == "*":
        anywhere = _as_called(canonical.signature, "", lambda given: (), words)

        def bind_tensors(func: Any, args: tuple, kwargs: dict) -> Bound:
            if not kwargs and all(isinstance(x, words.tensor) for x in args):
                return args, None
            return anywhere(func, args, kwargs)

        return bind_tensors
    arguments = _native_order(canonical.signature, text)
    count, places, numbers = len(arguments), _places(arguments, words), _numbers(words)

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        if not kwargs:
            return (args, None) if len(args) <= count else (args[:count], (numbers(args[count:]), ()))
        if kwargs.get("out") is not None:
            raise UnboundCallError  # the backend copies the result there
        values, rest = list(args[:count]), dict(kwargs)
        for key in kwargs:
            i = places.get(key)
            if i is not None:
                values += [None] * (i + 1 - len(values))
                values[i] = rest.pop(key)
        if not rest and len(args) <= count:
            return tuple(values), None
        return tuple(values), (numbers(args[count:]), tuple([(key, numbers(x)) for key, x in rest.items()]))

    return bind


def _as_called(signature: Signature, text: str, facts: Facts, words: Words) -> Bind:
    """Return ``bind`` for an operation that is called again with its original arguments.

    Its operands are the tensors among the arguments: those that the signature names, or all.
    """
    arguments = read_arguments(text)
    places, names = _places(arguments, words), [x.name for x in arguments]
    if signature.several:
        operands = [i for i, x in enumerate(arguments) if not x.mark]
        may_lack = set(operands)
    else:
        operands = [names.index(x.name) for x in signature.operands if x.name in names]
        may_lack = {i for i in operands if any(x.name == names[i] and x.default is None for x in signature.operands)}
    keeps_none = not signature.several or signature.operands[0].default is None
    anything = signature.several and not arguments
    slots = {number: i for i, number in enumerate(operands)}
    needed = [] if words.drops else [slots[i] for i in operands if i not in may_lack]
    behind = tuple(len(arguments[i].dims or ()) for i in operands)
    tensor, kept, told = words.tensor, words.kept, words.told

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        if kwargs and not words.drops and kwargs.get("out") is not None:
            raise UnboundCallError  # the backend copies the result there
        xs: list[Any] = [None] * len(operands)
        where: list[Any] = [None] * len(operands)
        values: dict[str, Any] = {}

        def take(x: Any, place: Any, number: int | None) -> Any:
            if isinstance(x, tensor):
                if anything:
                    xs.append(x)
                    where.append(place)
                    return None
                slot = slots.get(number)  # type: ignore[arg-type]
                if slot is not None:
                    xs[slot], where[slot] = x, place
                    return None
            x = kept(x)
            if number is not None and number < len(names):
                values[names[number]] = told(x)
            return x

        rest = tuple([take(x, i, i) for i, x in enumerate(args)])
        named = tuple([(key, take(x, key, places.get(key))) for key, x in kwargs.items()]) if kwargs else ()
        for slot in needed:
            if where[slot] is None:
                raise UnboundCallError
        own = behind
        if not keeps_none and None in where:
            there = [i for i, place in enumerate(where) if place is not None]
            xs, where, own = [xs[i] for i in there], [where[i] for i in there], tuple([own[i] for i in there])
        found = tuple(xs)
        given = Given(func, found, values, tuple(where), rest, named, tuple([_shape(x) for x in xs]), own)
        return found, (*facts(given), given.places, rest, named)

    return bind
