"""Hooks of styles as torch's compiler traces them, and inputs that several modules read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hyper_parallel.platform.contract import CompiledInputs
from hyper_parallel.platform.torch.compiled.moves import Moves
from hyper_parallel.platform.torch.compiled.placed import Outside, Shared
from hyper_parallel.platform.torch.compiled.tracing import is_tracing

__all__ = ["compiled_hook", "share_inputs"]


def compiled_hook(hook: Callable[..., Any], how: CompiledInputs | None) -> Callable[..., Any]:
    """See `Platform.compiled_hook`."""
    convert = None if how is None else _conversion(how)

    def either(module: Any, *given: Any) -> Any:
        if not is_tracing():
            return hook(module, *given)
        y = None if convert is None else convert(*given)
        return Outside.leave(hook, (module, *given), {}) if y is None else y

    either.of_style = True  # type: ignore[attr-defined]
    return either


def _conversion(how: CompiledInputs) -> Callable[..., Any]:
    moves, local, count = Moves(how.mesh, how.group, how.size, how.rank, how.local), how.local, how.count

    def one(x: Any, given: int | None, wanted: int | None) -> Any:
        found = moves.take(x, given)
        if found is None:
            return None
        x, cut = found
        if wanted is not None:
            if not -x.ndim <= wanted < x.ndim:
                return None
            wanted = wanted % x.ndim
        if cut is not None and wanted is None and not local and moves.size > 1:
            return moves.give_gathered(x, cut)
        y = moves.move(x, cut, wanted)
        return None if y is None else moves.give(y, wanted)

    def inputs(args: tuple, kwargs: dict) -> Any:
        if len(args) < count:
            return None
        positional, named = list(args), dict(kwargs)
        for slot in how.conversions:
            held: Any = positional if isinstance(slot.key, int) else named
            x = positional[slot.key] if isinstance(slot.key, int) else named.get(slot.key)
            if x is None:
                continue
            y = one(x, slot.given, slot.wanted)
            if y is None:
                return None
            held[slot.key] = y
        return tuple(positional), named

    def outputs(args: tuple, output: Any) -> Any:
        several = isinstance(output, (tuple, list))
        found = list(output) if several else [output]
        if len(found) != count:
            return None
        for slot in how.conversions:
            x = found[slot.key]
            if x is None:
                continue
            y = one(x, slot.given, slot.wanted)
            if y is None:
                return None
            found[slot.key] = y
        return (tuple(found) if isinstance(output, tuple) else found) if several else found[0]

    return outputs if how.of_outputs else inputs


def share_inputs(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The inputs of a module inside of which several column-parallel ones may read them."""
    return tuple([_shared(x) for x in args]), {key: _shared(x) for key, x in kwargs.items()}


def _shared(x: Any) -> Any:
    if type(x) is not Tensor or not x.is_floating_point():
        return x
    y: Any = x.as_subclass(Shared)
    y.read_for_parts = None
    return y
