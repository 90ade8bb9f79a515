"""Running a compiled graph, whose inputs are DTensors, on local tensors.

AOT autograd runs a graph inside of an autograd function. That function may be given DTensors: autograd sees the local
tensors that they are below Python, and gradients come straight to parameters. What is inside, forward and all that is
kept for backward, gets other objects for them. Views around the function would do too, and backward would run through
each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.tensor import State

__all__ = ["localize", "running"]

#: Where the function of a graph, a class, keeps what computes it.
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
        if compare is not None:
            compare()
            compare = None
        if takes_dtensors:
            with no_dispatch():
                return compiled(*args)
        results = compiled(*_views(args, held))
        takes_dtensors = any(map(_is_from_aot, results if isinstance(results, (tuple, list)) else ()))
        return results

    return run


def _views(args: Any, held: list[int]) -> list[Any]:
    new, differentiable = list(args), torch.is_grad_enabled()
    with no_dispatch():
        for i in held:
            # The quickest ways.
            new[i] = new[i][...] if differentiable else _detach(new[i])
    return new


def _is_from_aot(y: Any) -> bool:
    """Whether a tensor comes from a function that `localize` knows."""
    function = getattr(getattr(y, "grad_fn", None), "_forward_cls", None)
    return function is not None and getattr(vars(function).get(_COMPUTES), "_boxed_call", False)


def localize(function: Any) -> None:
    """Of an autograd function that is about to be given DTensors: if a graph is inside, let local tensors come there.

    The tensors share the versions of the parameters, so that backward notices where one has been written to meanwhile.
    """
    compute = vars(function).get(_COMPUTES)
    if compute is None or getattr(compute, "takes_dtensors", False):
        return

    cls = State.tensor_class

    def localized(args: list[Any]) -> Any:
        with no_dispatch():
            for i, x in enumerate(args):
                if type(x) is cls:
                    args[i] = _detach(x)
        return compute(args)

    localized.takes_dtensors = localized._boxed_call = True  # type: ignore[attr-defined]
    function.compiled_fw = localized
