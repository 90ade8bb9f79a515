"""Functions of `torch.nn.functional` that are composed of other operations of torch: their Python code runs on
DTensors.

Each function first checks whether an argument intercepts functions, and then calls this handler. The handler runs the
same code with the check disabled. Each operation in the code runs by its own rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType

import torch.nn.functional as F

from hyper_parallel.platform.torch.basics.tensor import handles

__all__ = ["body_of"]

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def body_of(function: Callable) -> Callable:
    """Return the Python function as it runs on plain tensors, without the check for interception."""
    names = {**function.__globals__, **dict.fromkeys(_QUESTIONS, lambda *_: False)}
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    return partial(body, **(function.__kwdefaults__ or {}))


def _run_body(function: Callable) -> None:
    body = body_of(function)
    handles(function)(lambda func, args, kwargs: body(*args, **kwargs))


for _function in (
    *(F.batch_norm, F.instance_norm, F.gumbel_softmax, F.multilabel_soft_margin_loss),
    *(F.triplet_margin_with_distance_loss,),
):
    _run_body(_function)
