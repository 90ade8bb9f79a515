"""Hooks of styles in a form that torch's compiler can trace, and inputs that several modules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hyper_parallel.platform.contract import Conversions
from hyper_parallel.platform.torch.compiled.moves import Moves, shards_of
from hyper_parallel.platform.torch.compiled.placed import Outside, Shared
from hyper_parallel.platform.torch.compiled.tracing import is_tracing

__all__ = ["around_calls", "compiled_hook", "share_inputs"]


def compiled_hook(hook: Callable[..., Any], how: Conversions | None) -> Callable[..., Any]:
    """Return ``hook`` in a form that torch's compiler can trace. See `CompilerRole.compiled_hook`. Hooks with equal
    conversions share the function ``traced``. Compiled frames guard on it, so equivalent modules share their graph."""
    convert = None if how is None else _shared_conversion(how)

    def either(module: Any, *given: Any) -> Any:
        if not is_tracing():
            return hook(module, *given)
        y = None if convert is None else convert(module, *given)
        return Outside.leave(hook, (module, *given), {}) if y is None else y

    either.of_style, either.traced = True, convert  # type: ignore[attr-defined]
    return either


def no_hook(module: nn.Module, *given: Any) -> None:
    """Replace an `EagerHook` in a copy of its module: do nothing."""


def _no_hook() -> Callable[..., None]:
    return no_hook


class EagerHook:
    """A hook of one module that does nothing where a compiler traces it. Compiled frames do not guard on its identity.
    A copied or unpickled module has `no_hook` in its place.

    Args:
        function: called with the arguments of the hook.
    """

    of_style, traced = True, staticmethod(no_hook)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if not is_tracing():
            self._function(module, *given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[[], Any], tuple]:
        return _no_hook, ()


def around_calls(
    module: nn.Module, before: Callable[[nn.Module, Any], None], after: Callable[[nn.Module, Any], None]
) -> Callable[[], None]:
    """Call ``before`` and ``after`` around each call of a module, and return a function that removes both. The module
    keeps its class, which user code may compare. See `Platform.around_calls`."""
    handles = (
        module.register_forward_pre_hook(
            EagerHook(lambda module, args, kwargs: before(module, (args, kwargs))), prepend=True, with_kwargs=True
        ),
        module.register_forward_hook(EagerHook(lambda module, args, output: after(module, output)), always_call=True),
    )

    def take_away() -> None:
        for handle in handles:
            handle.remove()

    return take_away


def _shared_conversion(how: Conversions) -> Callable[..., Any]:
    kept: dict[Any, Any] = vars(how.mesh).setdefault("_compiled_hooks", {})
    if how.key not in kept:
        kept[how.key] = _conversion(how)
    return kept[how.key]


def _conversion(how: Conversions) -> Callable[..., Any]:
    count = how.count
    slots: list[Any] = [(key, Moves(one), one.given, one.takes, shards_of(one.compare)) for key, one in how.programs]

    def one(module: Any, x: Any, moves: Moves, given: int | None, wanted: int | None, shards: Any) -> Any:
        found = moves.take(x, given, module, shards)
        if isinstance(found, str):
            return None
        x, cut = found
        if wanted is not None:
            if not -x.ndim <= wanted < x.ndim:
                return None
            wanted = wanted % x.ndim
        if cut is not None and wanted is None and not moves.local and moves.size > 1:
            return moves.give_gathered(x, cut)
        y = moves.bring(x, cut, wanted)
        return None if y is None else moves.give(y, wanted)

    def inputs(module: Any, args: tuple, kwargs: dict) -> Any:
        if len(args) < count:
            return None
        positional, named = list(args), dict(kwargs)
        for key, *how_one in slots:
            held: Any = positional if isinstance(key, int) else named
            x = positional[key] if isinstance(key, int) else named.get(key)
            if x is None:
                continue
            y = one(module, x, *how_one)
            if y is None:
                return None
            held[key] = y
        return tuple(positional), named

    def outputs(module: Any, args: tuple, output: Any) -> Any:
        several = isinstance(output, (tuple, list))
        found = list(output) if several else [output]
        if len(found) != count:
            return None
        for key, *how_one in slots:
            x = found[key]
            if x is None:
                continue
            y = one(module, x, *how_one)
            if y is None:
                return None
            found[key] = y
        return (tuple(found) if isinstance(output, tuple) else found) if several else found[0]

    return outputs if how.of_outputs else inputs


def share_inputs(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the inputs of a module, with plain tensors turned into `Shared`. Several column-parallel submodules may
    read such a tensor."""
    return tuple([_shared(x) for x in args]), {key: _shared(x) for key, x in kwargs.items()}


def _shared(x: Any) -> Any:
    if type(x) is not Tensor or not x.is_floating_point():
        return x
    y: Any = x.as_subclass(Shared)
    y.read_for_parts = None
    return y
