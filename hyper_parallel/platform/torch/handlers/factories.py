"""Functions of torch that make a tensor from numbers alone, and see no DTensor among them.

Torch reads such a number below Python, where a DTensor is this rank's local tensor: a partial sum would count as the
local summand.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.platform.torch.basics.private import is_dispatch_on
from hyper_parallel.platform.torch.basics.tensor import State, is_dtensor
from hyper_parallel.platform.torch.op_table.binding import number_in

__all__ = ["FACTORIES", "both_handled", "is_factory", "taking_numbers"]

#: Names in torch. Other factories take sizes alone, whose numbers torch reads through ``__index__``.
FACTORIES = ("arange", "eye", "full", "randint", "randperm", "scalar_tensor", "tensor")


def _lists() -> tuple[Any, Any]:
    """Return torch's functions about its two lists of functions by identity: for default devices, and for scripts."""
    devices, scripts = map(importlib.import_module, ("torch.utils._device", "torch.jit._builtins"))
    return getattr(devices, "_device_constructors", None), getattr(scripts, "_register_builtin", None)


def is_factory(original: Any) -> str | None:
    """Return the reason why the original of a `Patch` does not fit, or None."""
    return None if callable(original) and None not in _lists() else "is in lists that are not where they were"


def taking_numbers(name: str, original: Callable) -> Callable:
    """Wrap the factory ``name``, so that a DTensor without dimensions is its number. ``torch.tensor`` takes any full
    tensor."""
    kind = State.tensor_class
    read = (lambda x: x.full_tensor()) if name == "tensor" else number_in
    listed, add_to_scripts = _lists()
    # Torch makes this list once. A default device finds there the original, which torch tells it of.
    listed()

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if (kind in map(type, args) or (kwargs and kind in map(type, kwargs.values()))) and is_dispatch_on():
            args = tuple([read(x) if is_dtensor(x) else x for x in args])
            kwargs = {key: read(x) if is_dtensor(x) and key != "out" else x for key, x in kwargs.items()}
        return original(*args, **kwargs)

    factory.__module__, factory.__qualname__ = "torch", name  # by which it is pickled
    add_to_scripts(factory, f"aten::{name}")
    # Torch's compiler traces the original, as it does where a function was compiled.
    factory._torchdynamo_inline = original  # type: ignore[attr-defined]
    return factory


def both_handled(original: Any) -> Any:
    """Wrap the compiler's table of functions that it treats by themselves, so that it contains the factories and their
    replacements. Torch makes the table once, before or after the factories were replaced."""

    @functools.cache
    def _get_handlers() -> dict:
        handlers = dict(getattr(original, "__func__", original)())
        for name in FACTORIES:
            replacement = getattr(torch, name)
            pair = (replacement, replacement._torchdynamo_inline)
            if found := next((handlers[one] for one in pair if one in handlers), None):
                handlers.update(dict.fromkeys(pair, found))
        return handlers

    return staticmethod(_get_handlers)
