"""Running a compiled graph, whose inputs are DTensors, on local tensors.

AOT autograd runs a graph inside of an autograd function. That function may be given DTensors: autograd sees the local
tensors that they are below Python, and gradients come straight to parameters. Inside, forward and backward, nothing is
dispatched, so that they are local tensors there too. Other objects for them, views around the function or detached
tensors inside, would do as well, and take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as no_dispatch

__all__ = ["localize", "running"]

#: Where the function of a graph, a class, keeps its compiled forward.
_COMPUTES = "compiled_fw"
#: Without the way through the method that DTensors have.
_detach = torch.Tensor.detach


def running(compiled: Callable[..., Any], held: list[int], compare: Callable[[], None] | None) -> Callable[..., Any]:
    """A graph that compares plain shards in its first run, and is given DTensors.

    Args:
        compiled: the graph.
        held: which inputs are DTensors.
        compare: see `comparisons`; None where there is nothing to compare.
    """
    takes_dtensors = False

    def run(*args: Any) -> Any:
        nonlocal compare, takes_dtensors
        if takes_dtensors:
            with no_dispatch():
                return compiled(*args)
        if compare is not None:
            compare()
            compare = None
        with no_dispatch():
            results = compiled(*_views(args, held))
        takes_dtensors = any(map(_is_from_aot, results if isinstance(results, (tuple, list)) else ()))
        return results

    return run


def _views(args: Any, held: list[int]) -> list[Any]:
    """To be called where nothing is dispatched."""
    new, differentiable = list(args), torch.is_grad_enabled()
    for i in held:
        # The quickest ways.
        new[i] = new[i][...] if differentiable else _detach(new[i])
    return new


def _is_from_aot(y: Any) -> bool:
    """Return whether a tensor comes from a function that `localize` knows."""
    function = getattr(getattr(y, "grad_fn", None), "_forward_cls", None)
    return function is not None and getattr(vars(function).get(_COMPUTES), "_boxed_call", False)


def localize(function: Any) -> None:
    """Let the backward of an autograd function work on local tensors too, if a graph is inside. The function is
    about to be given DTensors. It keeps the parameters themselves for backward, as in hand-written code."""
    if not hasattr(function, _COMPUTES) or getattr(function, "takes_dtensors", False):
        return
    backward = function.backward

    def localized(ctx: Any, *cotangents: Any) -> Any:
        with no_dispatch():
            return backward(ctx, *cotangents)

    function.backward, function.takes_dtensors = staticmethod(localized), True
