"""Autograd functions that inputs and results of a module under data parallelism pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.trees import map_tensors
from hyper_parallel.platform.contract import NOTHING_FASTER
from hyper_parallel.platform.contract.autograd import named

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.call import Call

__all__ = ["Guard", "cast", "through", "watched"]


def cast(tree: Any, dtype: Any, platform: Any) -> Any:
    """Return ``tree`` with its floating point tensors converted to ``dtype``."""

    def convert(x: Any) -> Any:
        return platform.to_dtype(x, dtype) if platform.is_floating_point(x) and x.dtype != dtype else x

    return map_tensors(tree, convert, platform, lambda x: x)


def through(platform: Any, function: Callable[..., Sequence[Any]], call: Any, xs: Sequence[Any]) -> dict[int, Any]:
    """Pass tensors through a joint function, and return its results by the ids of its operands.

    Args:
        platform: whose tensors they are.
        function: takes ``call`` and operands, and returns a result of the same shape for each. Operands of one dtype
            share one autograd node, which backward reaches from any of its results.
        call: of the module.
        xs: plain tensors and DTensors.
    """
    new: dict[int, Any] = {}
    with platform.no_dispatch():
        for same in _by_dtype(xs):
            for x, y in zip(same, function(call, *same), strict=True):
                layout = getattr(x, "_layout", None)
                new[id(x)] = y if layout is None else platform.wrap(y, layout)
    return new


def _by_dtype(xs: Sequence[Any]) -> list[list[Any]]:
    """Return the tensors, each once, in one list for each dtype."""
    lists: dict[Any, dict[int, Any]] = {}
    for x in xs:
        lists.setdefault(x.dtype, {})[id(x)] = x
    return [list(same.values()) for same in lists.values()]


def watched(
    args: tuple, kwargs: dict, inputs: Sequence[Any], platform: Any, told: Callable[[], None]
) -> tuple[tuple, dict]:
    """Return the arguments of a call, changed so that backward calls ``told`` when the cotangent of the input is there.

    Unless exactly one input requires gradients, and it is no DTensor, the arguments stay as they are.

    Args:
        args, kwargs: the arguments of the unit's call.
        inputs: the tensors among them.
        platform: whose tensors they are.
        told: takes no arguments.
    """
    found = [x for x in inputs if platform.requires_grad(x)]
    if len(found) != 1 or getattr(found[0], "_layout", None) is not None:
        return args, kwargs
    with platform.no_dispatch():
        view = (platform.fast or NOTHING_FASTER).tell_gradient(found[0], told)
    if args and args[0] is found[0]:
        return (view, *args[1:]), kwargs
    changed: tuple[tuple, dict] = map_tensors(
        (args, kwargs), lambda x: view if x is found[0] else x, platform, lambda x: x
    )
    return changed


class Guard:
    """Check when backward reaches the inputs of a call, where a platform does not tell when backward begins.

    Backward may have read frozen parameters on the way, and these have no cotangents at which to check.

    Args:
        check: takes the call.
    """

    def __init__(self, platform: Any, check: Callable[[Call], None]) -> None:
        self._platform, self._check = platform, check
        self._function = platform.joint_function(named("FullyShardInput", self._forward), self._backward)

    def arguments(self, args: tuple, kwargs: dict, inputs: Sequence[Any], call: Call) -> tuple[tuple, dict]:
        """Return the arguments for the call of the module.

        Args:
            args, kwargs: the arguments of the unit's call.
            inputs: the tensors among them.
            call: the call to check.
        """
        platform = self._platform
        new = through(platform, self._function, call, [x for x in inputs if platform.requires_grad(x)])
        found: tuple[tuple, dict] = map_tensors((args, kwargs), lambda x: new.get(id(x), x), platform, lambda x: x)
        return found

    def _forward(self, ctx: Any, call: Call, *xs: Any) -> Sequence[Any]:
        ctx.call = call
        return [self._platform.detach(x) for x in xs]

    def _backward(self, ctx: Any, *cotangents: Any) -> Sequence[Any]:
        self._check(ctx.call)
        return cotangents
