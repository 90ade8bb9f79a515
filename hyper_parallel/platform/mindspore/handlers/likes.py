"""Functions that make a tensor like a given DTensor: ``ops.randn_like(x)``, ``x.new_zeros(size)`` and others.

MindSpore's functions read the global shape, and make a plain tensor of that shape. Their replacements
(`platform.mindspore.patches`) give the result the layout of the DTensor, and change nothing for plain tensors. Random
numbers are the same as on a single device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, ops
from mindspore.ops.function import array_func

from hyper_parallel.platform.arguments import ints
from hyper_parallel.platform.mindspore.op_table import OPS
from hyper_parallel.platform.mindspore.op_table.binding import Function, number_in
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, is_dispatching

__all__ = ["DRAWS", "NEW_METHODS", "draw_like", "full_like"]

#: Functions whose numbers can be drawn by counter.
_KINDS = {"rand": "uniform", "randn": "normal"}
#: Functions of ``mindspore.ops.function.random_func``.
DRAWS = tuple(f"{name}_like{ext}" for name in ("rand", "randn", "randint") for ext in ("", "_ext"))


def draw_like(plain: Callable, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a function of `DRAWS`. Every rank draws the full tensor and keeps its shard. On request, each rank draws
    uniform and normal numbers for its shard alone."""
    if not isinstance(input, InterceptedTensor) or not is_dispatching():
        return plain(input, *args, **kwargs)
    layout = input._layout.cotangent
    platform = layout.mesh.platform
    with platform.no_dispatch():
        kind, dtype = _KINDS.get(plain.__name__.partition("_")[0]), kwargs.get("dtype")
        # With its own seed, the function draws the same numbers each time.
        seeded = bool(args) or kwargs.get("seed") is not None
        by_counter = None if kind is None or seeded else lambda numbers: numbers(kind, dtype)
        drawn = input._core.draw(lambda whole: plain(whole, *args, **kwargs), input, layout, by_counter=by_counter)
        return platform.wrap(drawn, layout)


def full_like(plain: Callable, input: Any, fill_value: Any, *, dtype: Any = None) -> Any:
    """Replace `ops.full_like` for DTensors."""
    if not isinstance(input, InterceptedTensor) or not is_dispatching():
        return plain(input, fill_value, dtype=dtype)
    if isinstance(fill_value, Tensor):
        fill_value = fill_value.item()
    return type(input)._dispatch(OPS["FullLike"], _FULL_LIKE, (input, fill_value), {"dtype": dtype})


_FULL_LIKE = Function("FullLike", array_func.full_like)

#: method -> the number that it fills a new tensor with; None for an argument
_LIKE: dict[str, float | None] = {"new_zeros": 0, "new_ones": 1, "new_empty": 0, "new_full": None}


def _method(name: str) -> Callable:
    plain, number = getattr(Tensor, name), _LIKE[name]

    def new(self: Any, size: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if not is_dispatching():
            return plain(self, size, *args, dtype=dtype, **kwargs)
        if number is None:
            fill = args[0] if args else kwargs["fill_value"]
        else:
            fill, dtype = number, args[0] if args else dtype
        fill, size = number_in(fill), ints(size)
        layout = self._layout
        if size == tuple(layout.shape):
            return ops.full_like(self, fill, dtype=self.dtype if dtype is None else dtype)
        # A shape other than that of the model: replicated.
        platform = layout.mesh.platform
        with platform.no_dispatch():
            made = platform.factory("full", size, fill, self.dtype if dtype is None else dtype)
            return self._core.replicated(made, layout.mesh)

    new.__name__, new.__doc__ = (
        name,
        f"``Tensor.{name}``: laid out like the tensor when it has its shape, else replicated.",
    )
    return new


#: Methods of DTensors.
NEW_METHODS = {name: _method(name) for name in _LIKE}
