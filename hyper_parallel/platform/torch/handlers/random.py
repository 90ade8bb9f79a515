"""Random numbers and initialisation: a shard gets the numbers that a single device would draw for its elements.

The global tensor is drawn from the default generator, whose state is the same on all ranks, and each rank keeps its
part. That costs memory of the global size for a moment and keeps the generators in step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.core.dtensor.layouts.memory_order import ones_like_whole
from hyper_parallel.core.dtensor.operations.random import synchronize, take_part
from hyper_parallel.core.dtensor.operations.views import after_write, before_write
from hyper_parallel.platform.torch.handlers.unknown import run_unknown
from hyper_parallel.platform.torch.op_table.binding import words
from hyper_parallel.platform.torch.tensor import handles, is_dtensor, layout_of, wrap

__all__: list[str] = []

T: Any = torch.Tensor

#: The initialisers that torch lets a tensor override; the others are written with methods, which are handled below.
_INITIALISERS = words("uniform_ normal_ constant_ kaiming_uniform_ kaiming_normal_")


@handles(*(getattr(nn.init, name, None) for name in _INITIALISERS))
def initialise(func: Any, args: tuple, kwargs: dict) -> Any:
    """`torch.nn.init`: fans are those of the global shape."""
    rest = {k: v for k, v in kwargs.items() if k != "tensor"}
    x = args[0] if args else kwargs["tensor"]
    with torch.no_grad():
        return _fill_from_global(x, func, args[1:], rest)


@handles(torch.eye)
def fill_with_identity(func: Any, args: tuple, kwargs: dict) -> Any:
    """``torch.eye(n, m, out=x)``, as `torch.nn.init.eye_` calls it."""
    x = kwargs["out"]
    return x.copy_(torch.eye(*args, dtype=x.dtype, device=x.device))


@handles(T.uniform_, T.normal_, T.random_, T.bernoulli_, T.exponential_, T.geometric_, T.cauchy_, T.log_normal_)
def draw_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """``x.normal_()`` and its relatives."""
    if any(isinstance(a, T) for a in (*args[1:], *kwargs.values())):
        return run_unknown(func, args, kwargs)  # probabilities in a tensor: gathered with x
    return _fill_from_global(args[0], func, args[1:], kwargs)


def _fill_from_global(x: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    layout = x._layout
    if layout.cotangent is not layout:
        raise TypeError(f"{func.__name__} cannot fill a partial sum ({list(layout.placements)}): redistribute it first")
    before_write(x)
    with no_dispatch():
        if x.is_meta:
            return x
        if kwargs.get("generator") is None:
            synchronize(layout.mesh)
        whole = ones_like_whole(x, layout)
        func(whole, *args, **kwargs)
        # The program itself answers for a generator of its own, and constants are the same on all ranks anyway.
        x.copy_(take_part(whole, layout, kwargs.get("generator") is None and func is not nn.init.constant_))
    after_write(x)
    return x


@handles(torch.rand_like, torch.randn_like, torch.randint_like)
def draw_like(func: Any, args: tuple, kwargs: dict) -> Any:
    """``torch.randn_like(x)``, laid out like ``x``."""
    x = args[0] if args else kwargs["input"]
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "requires_grad")}
    layout = layout_of(x).cotangent
    synchronize(layout.mesh)
    with no_dispatch():
        local = take_part(func(ones_like_whole(x, layout), *args[1:], **rest), layout, rest.get("generator") is None)
        local.requires_grad_(kwargs.get("requires_grad", False))
    assert not is_dtensor(local)
    return wrap(local, layout)
