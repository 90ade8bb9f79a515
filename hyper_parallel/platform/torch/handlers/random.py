"""Random numbers and initialisation: a shard gets the numbers that a single device would draw for its elements.

The global tensor is drawn from the default generator, whose state is the same on all ranks. Each rank keeps its shard.
So the generators of all ranks keep equal states. But each rank needs memory of the global size for a moment. Where the
program has asked for numbers by counter (`manual_seed`), uniform and normal numbers are drawn for the shard alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State, handles, layout_of, replaces, wrap
from hyper_parallel.platform.torch.handlers.unknown import run_unknown
from hyper_parallel.platform.torch.op_table.binding import find, number_in

__all__: list[str] = []


#: Initialisers that torch lets a tensor override; the others call methods, which are handled below.
_INITIALISERS = "uniform_ normal_ constant_ kaiming_uniform_ kaiming_normal_"


@handles(*find(_INITIALISERS, nn.init))
def initialise(func: Any, args: tuple, kwargs: dict) -> Any:
    """Initialise as `torch.nn.init` does, with fan-in and fan-out of the global shape."""
    rest = {k: v for k, v in kwargs.items() if k != "tensor"}
    x = args[0] if args else kwargs["tensor"]
    with torch.no_grad():
        return _fill_from_global(x, func, (*map(number_in, args[1:]),), {k: number_in(v) for k, v in rest.items()})


@replaces(torch.eye)
def fill_with_identity(*sizes: int, out: Any, **options: Any) -> Any:
    """Write an identity matrix into ``out``, for ``torch.eye(n, m, out=x)`` in `torch.nn.init.eye_`."""
    return out.copy_(torch.eye(*sizes, dtype=out.dtype, device=out.device))


@handles(*find("uniform_ normal_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_", Tensor))
def draw_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """Fill a tensor with random numbers, as ``x.normal_()`` and similar methods do."""
    if any(isinstance(a, Tensor) for a in (*args[1:], *kwargs.values())):
        return run_unknown(func, args, kwargs)  # probabilities in a tensor are gathered together with x
    return _fill_from_global(args[0], func, args[1:], kwargs)


def _uniform(numbers: Callable[..., Tensor], a: float = 0.0, b: float = 1.0, **named: Any) -> Tensor:
    a, b = named.get("from", a), named.get("to", b)
    return numbers("uniform").mul_(b - a).add_(a)


def _normal(numbers: Callable[..., Tensor], mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return numbers("normal").mul_(std).add_(mean)


def _bernoulli(numbers: Callable[..., Tensor], p: float = 0.5, **_: Any) -> Tensor:
    return numbers("uniform", torch.float32) < p


#: Functions whose numbers can be drawn by counter: those that fill a tensor, and those that make one like another.
_IN_PLACE: dict[str, Callable] = {"uniform_": _uniform, "normal_": _normal, "bernoulli_": _bernoulli}
_LIKE: dict[Any, Callable] = {
    torch.rand_like: lambda numbers, dtype: numbers("uniform", dtype),
    torch.randn_like: lambda numbers, dtype: numbers("normal", dtype),
}


def _bound(draw: Callable | None, args: tuple, kwargs: dict) -> Callable[[Callable], Tensor] | None:
    return None if draw is None else lambda numbers: draw(numbers, *args, **kwargs)


def _fill_from_global(x: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    layout = x._layout
    if layout.cotangent is not layout:
        raise TypeError(
            f"{func.__name__} cannot fill a partial tensor ({list(layout.placements)}): redistribute the tensor first"
        )
    core = State.core
    core.before_write(x)
    with no_dispatch():
        if x.is_meta:
            return x
        # A user's own generator is not synchronized, and constants are equal on all ranks anyway.
        shared = kwargs.get("generator") is None and func is not nn.init.constant_
        by_counter = _bound(_IN_PLACE.get(func.__name__), args, kwargs)
        x.copy_(core.draw(lambda whole: func(whole, *args, **kwargs), x, layout, shared, by_counter))
    core.after_write(x)
    return x


@handles(torch.rand_like, torch.randn_like, torch.randint_like)
def draw_like(func: Any, args: tuple, kwargs: dict) -> Any:
    """Draw a tensor with the layout of ``x``, as ``torch.randn_like(x)`` does."""
    x = args[0] if args else kwargs["input"]
    rest = {k: number_in(v) for k, v in kwargs.items() if k not in ("input", "requires_grad")}
    args = (x, *map(number_in, args[1:]))
    layout, shared = layout_of(x).cotangent, rest.get("generator") is None
    with no_dispatch():
        by_counter = _bound(_LIKE.get(func), (), {"dtype": rest.get("dtype")})
        local = State.core.draw(lambda whole: func(whole, *args[1:], **rest), x, layout, shared, by_counter)
    y = wrap(local, layout)
    if not State.core.is_contiguous(x):  # the result has the memory order of x
        options = {name: value for name, value in rest.items() if name not in ("generator", "low", "high")}
        ordered = torch.empty_like(x, **options)
        with no_dispatch():
            ordered.copy_(y)
        y = ordered
    return y.requires_grad_(kwargs.get("requires_grad", False))
