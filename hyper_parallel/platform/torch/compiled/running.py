"""Running a compiled graph, whose inputs are DTensors, on local tensors.

AOT autograd runs a graph inside of an autograd function, which accepts DTensors. Autograd works below the Python class,
on local tensors, so gradients go straight to the parameters. Forward and backward of that function run without
dispatch, so their code works on local tensors too. Views outside the function, or detached tensors inside, would also
work, but are slower.
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
    """Return whether an autograd function of a compiled graph, to which `localize` applies, computed a tensor."""
    function = getattr(getattr(y, "grad_fn", None), "_forward_cls", None)
    return function is not None and getattr(vars(function).get(_COMPUTES), "_boxed_call", False)


def localize(function: Any) -> None:
    """Let backward of an autograd function with a compiled graph also run on local tensors.

    The function is about to get DTensors, and saves the parameters themselves for backward.
    """
    if not hasattr(function, _COMPUTES) or getattr(function, "takes_dtensors", False):
        return
    backward = function.backward

    def localized(ctx: Any, *cotangents: Any) -> Any:
        with no_dispatch():
            return backward(ctx, *cotangents)

    function.backward, function.takes_dtensors = staticmethod(localized), True
