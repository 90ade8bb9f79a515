"""Running a compiled graph, whose inputs are DTensors, on local tensors.

AOT autograd runs a graph inside of an autograd function, which accepts DTensors. Autograd sees the local tensors below
the Python class, so gradients go straight to the parameters. Inside forward and backward no dispatch happens, so code
there sees local tensors too. Views outside the function, or detached tensors inside, would also work, but are slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as no_dispatch

__all__ = ["localize", "running"]

#: Attribute of a graph's autograd function, a class, that holds its compiled forward.
_COMPUTES = "compiled_fw"
#: Bypasses the method of the same name that DTensors have.
_detach = torch.Tensor.detach


def running(compiled: Callable[..., Any], held: list[int], compare: Callable[[], None] | None) -> Callable[..., Any]:
    """Return a function that runs a graph on DTensors, and compares plain shards in its first run.

    Args:
        compiled: the graph.
        held: indices of the inputs that are DTensors.
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
    """Return ``args`` with local views of DTensors. Call it only inside ``no_dispatch``."""
    new, differentiable = list(args), torch.is_grad_enabled()
    for i in held:
        # These are the fastest calls that return a new local tensor.
        new[i] = new[i][...] if differentiable else _detach(new[i])
    return new


def _is_from_aot(y: Any) -> bool:
    """Return whether a tensor was computed by an autograd function of a compiled graph, one that `localize` accepts."""
    function = getattr(getattr(y, "grad_fn", None), "_forward_cls", None)
    return function is not None and getattr(vars(function).get(_COMPUTES), "_boxed_call", False)


def localize(function: Any) -> None:
    """Let the backward of an autograd function also work on local tensors, if the function holds a compiled graph.

    The function is about to get DTensors. It saves the parameters themselves for backward, as hand-written code does.
    """
    if not hasattr(function, _COMPUTES) or getattr(function, "takes_dtensors", False):
        return
    backward = function.backward

    def localized(ctx: Any, *cotangents: Any) -> Any:
        with no_dispatch():
            return backward(ctx, *cotangents)

    function.backward, function.takes_dtensors = staticmethod(localized), True
