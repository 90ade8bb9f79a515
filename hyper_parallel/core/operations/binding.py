"""From a native call to operands and static arguments, by the signature of the operation: for every backend.

A row of an op table names the operation, and in its text what the native function does otherwise than the signature.
See `core.rules.signature` for the language of both.
"""

from __future__ import annotations

import re
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.rules import OPERATIONS, CanonicalOp
from hyper_parallel.core.rules.signature import FORMS, REQUIRED, Argument, Signature, read_arguments, value_of
from hyper_parallel.platform.arguments import hashable
from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.contract.dispatch import Bind, Bound, Facts, Given, UnboundCallError, Words

__all__ = ["bind_of"]

_FORM = re.compile(r"(?:(\w+):(?=\s|$))?(.*)", re.DOTALL)


def bind_of(op: NativeOp) -> Bind:
    """``bind(func, args, kwargs)`` of a row.

    Raises (from ``bind``):
        UnboundCallError: for arguments that the row does not cover: missing ones, or some that it does not name. In
            place of it TypeError, for one that is missing, where the backend leaves out arguments without a name.
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
    """The arguments as the native function takes them."""
    return read_arguments(text) or (*(x._replace(mark="") for x in signature.operands), *signature.static)


def _places(arguments: tuple[Argument, ...], words: Words) -> dict[str, int]:
    """The number of each argument, by each of its spellings."""
    found: dict[str, int] = {}
    for i, argument in enumerate(arguments):
        for name in (*argument.spellings, *words.spellings.get(argument.name, "").split()):
            found.setdefault(name, i)
    return found


# ------------------------------------------------------------------------------------------- by the signature
def _unpacker(arguments: tuple[Argument, ...], words: Words) -> Any:
    """``unpack(args, kwargs)``, which returns the values of ``arguments``, in order; those that are fixed come last."""
    taken = [x for x in arguments if not x.fixed]
    names, places, drops = [x.name for x in taken], _places(tuple(taken), words), words.drops
    starred = len(taken) - 1 if taken and taken[-1].mark == "*" else None
    defaults = [x.default for x in taken]
    if starred is not None and defaults[starred] is REQUIRED:
        defaults[starred] = ()
    conversions = [(i, f) for i, name in enumerate(names) if (f := value_of(name, words.conversions)) is not None]
    fixed = [x.default for x in arguments if x.fixed]
    total, needed = len(taken), sum(value is REQUIRED for value in defaults)

    def unpack(args: tuple, kwargs: dict) -> list[Any]:
        if starred is not None and len(args) > starred:
            args = (*args[:starred], args[starred:])
        given = len(args)
        if given > total and not drops:
            raise UnboundCallError(f"{given} arguments")
        values = [*args[:total], *defaults[given:]]
        for key, value in kwargs.items():
            i = places.get(key, starred if drops else None)
            if i is not None:
                values[i] = value
            elif value is not None and not drops:
                raise UnboundCallError(f"argument {key!r}")
        for name, value in zip(names[given:needed], values[given:needed], strict=True):
            if value is REQUIRED:
                raise (TypeError if drops else UnboundCallError)(f"argument {name!r} is missing")
        for i, convert in conversions:
            values[i] = convert(values[i])
        return values + fixed

    return unpack


def _by_signature(canonical: CanonicalOp, text: str, words: Words) -> Bind:
    signature = canonical.signature
    text, again = (text.removesuffix("..."), True) if text.endswith("...") else (text, False)
    name, text = _FORM.match(text).groups()  # type: ignore[union-attr]
    form = FORMS[name] if name else None
    own = signature if form is None else form.takes
    arguments = _native_order(own, text)
    unpack = _unpacker(arguments, words)
    order = [x.name for x in (*(x for x in arguments if not x.fixed), *(x for x in arguments if x.fixed))]
    # Arguments of the signature that neither the function nor the row has are at their defaults.
    known = [x for x in (*own.operands, *own.static) if x.name not in order and not (x.mark and arguments)]
    order += [x.name for x in known]
    more = [x.default for x in known]
    assert REQUIRED not in more, f"{canonical.name}: {text!r} lacks {[x.name for x in known if x.default is REQUIRED]}"
    sequence = next((order.index(x.name) for x in own.operands if x.mark and x.name in order), None)
    if own.several and sequence is None:
        operands = [i for i, x in enumerate(arguments) if not x.mark and x.name not in {y.name for y in own.static}]
    else:
        operands = [order.index(x.name) for x in own.operands]
    static_args = [order.index(x.name) for x in own.static]
    extra = [order.index(x.name) for x in arguments if x.mark == "+"]

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        values = unpack(args, kwargs) + more
        xs = tuple([values[i] for i in operands]) if sequence is None else tuple(values[sequence])
        static = tuple([values[i] for i in static_args])
        if form is not None:
            made = form.make(tuple([_shape(x) for x in xs]), *static)
            if made is None:
                raise UnboundCallError
            static = made
        if extra:
            static = (*static, *[values[i] for i in extra])
        if again:
            named = tuple((key, hashable(x)) for key, x in kwargs.items() if not any(x is y for y in xs))
            static = (*static, hashable(args[len(xs) :]), named)
        return xs, static

    return bind


def _shape(x: Any) -> Any:
    """Global shape of a distributed or plain tensor, whether dispatch is on or off; None for what is no tensor."""
    layout = getattr(x, "_layout", None)
    if layout is not None:
        return tuple(layout.shape)
    shape = getattr(x, "shape", None)
    return None if shape is None else tuple(shape)


# ------------------------------------------------------------------------------------------- as called
def _elementwise(canonical: CanonicalOp, text: str, words: Words) -> Bind:
    """The operands are the first arguments, or the text ``*``: the tensors, wherever they are. The static arguments are
    the other arguments, and None where there are none."""
    if text == "*":
        anywhere = _as_called(canonical.signature, "", lambda given: (), words)

        def bind_tensors(func: Any, args: tuple, kwargs: dict) -> Bound:
            if not kwargs and all(isinstance(x, words.tensor) for x in args):
                return args, None
            return anywhere(func, args, kwargs)

        return bind_tensors
    arguments = _native_order(canonical.signature, text)
    count, places = len(arguments), _places(arguments, words)

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        if not kwargs:
            return (args, None) if len(args) <= count else (args[:count], (args[count:], ()))
        if kwargs.get("out") is not None:
            raise UnboundCallError  # the backend copies the result there
        values, rest = list(args[:count]), dict(kwargs)
        for key in kwargs:
            i = places.get(key)
            if i is not None:
                values += [None] * (i + 1 - len(values))
                values[i] = rest.pop(key)
        return tuple(values), (args[count:], tuple(rest.items())) if rest or len(args) > count else None

    return bind


def _as_called(signature: Signature, text: str, facts: Facts, words: Words) -> Bind:
    """The operands are the tensors among the arguments: those that the signature names, or any."""
    arguments = read_arguments(text)
    places, names = _places(arguments, words), [x.name for x in arguments]
    if signature.several:
        wanted = {x.name for x in arguments if not x.mark}
        keeps_none, optional = signature.operands[0].default is None, wanted
    else:
        wanted = {x.name for x in signature.operands}
        keeps_none, optional = True, {x.name for x in signature.operands if x.default is None}
    numbers = [i for i, name in enumerate(names) if name in wanted]
    order = [x.name for x in signature.operands]
    if not signature.several:
        numbers.sort(key=lambda i: order.index(names[i]))
    anything = signature.several and not arguments
    counts = {x.name: len(x.dims or ()) for x in arguments}

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        if kwargs.get("out") is not None and not words.drops:
            raise UnboundCallError  # the backend copies the result there
        found: dict[Any, tuple] = {}
        values: dict[str, Any] = {}
        rest, named = list(args), dict(kwargs)
        for place, x in (*enumerate(args), *kwargs.items()):
            own: dict[Any, Any] | list[Any] = rest if isinstance(place, int) else named
            number = place if isinstance(place, int) else places.get(place)
            if isinstance(x, words.tensor) and (anything or number in numbers):
                found[place if anything else number] = (place, x)
                own[place] = None
                continue
            kept = words.kept(x)
            own[place] = kept
            if number is not None and number < len(names):
                values[names[number]] = words.told(kept)
        if anything:
            taken = [(str(i), *of_call) for i, of_call in enumerate(found.values())]
        else:
            taken = [(names[i], *found.get(i, (None, None))) for i in numbers if keeps_none or i in found]
        if not words.drops and any(place is None and name not in optional for name, place, _ in taken):
            raise UnboundCallError
        operands = tuple([x for _, _, x in taken])
        of_call = tuple([place for _, place, _ in taken]), tuple(rest), tuple(named.items())
        shapes = tuple([_shape(x) for x in operands])
        found_names = tuple([name for name, _, _ in taken])
        behind = tuple([counts.get(name, 0) for name in found_names])
        given = Given(func, operands, found_names, values, *of_call, shapes, behind)
        return operands, (*facts(given), *of_call)

    return bind
