"""Names of operands in messages, such as ``weight of 'layers.0.norm'``, and of the module whose forward is running.

The search runs only when an error is raised. Models are registered when a plan or a unit is created for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from hyper_parallel.core.program_places import place_in_program
from hyper_parallel.platform import Platform

__all__ = ["owner_of", "remember_model", "running_module"]

#: Weak references to the modules of `parallelize_module`, `fully_shard` and `replicate`, oldest first.
_MODELS: list[weakref.ref[Any]] = []


def remember_model(module: Any) -> None:
    """Register a module whose tensors `owner_of` can name. The reference is weak."""
    alive = [reference for reference in _MODELS if (model := reference()) is not None and model is not module]
    _MODELS[:] = [*alive, weakref.ref(module)]


def owner_of(x: Any, platform: Platform) -> str | None:
    """Return the name and the longest known path of a parameter or buffer; None for other tensors."""
    found = [
        (path, name)
        for reference in _MODELS
        if (model := reference()) is not None
        for path, module in platform.named_modules(model)
        for name, held in _held(module, platform)
        if held is x
    ]
    if not found:
        return None
    path, name = max(found, key=lambda entry: len(entry[0]))
    return f"{name} of {path!r}" if path else name


def running_module(platform: Platform) -> str:
    """Return the path of the innermost registered module whose forward is running, or ""."""
    paths: dict[int, str] = {}
    for reference in _MODELS:
        if (model := reference()) is not None:
            for path, module in platform.named_modules(model):
                paths[id(module)] = max(paths.get(id(module), ""), path, key=len)
    return place_in_program(paths, platform.Tensor)[1]


def _held(module: Any, platform: Platform) -> Iterator[tuple[str, Any]]:
    yield from platform.named_parameters(module)
    yield from platform.named_buffers(module)
    yield from list(vars(module).items())  # unsharded parameters, while a unit runs
