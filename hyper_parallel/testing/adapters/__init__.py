"""Adapters, through which the conformance suite calls frameworks. `get_adapter` returns the adapter of the tested
backend.

An adapter has the framework's own operations and modules under common names, conversions from and to NumPy, and
gradients. `hyper_parallel.testing.adapters.protocol.Adapter` lists these names. An adapter contains no code for
distributed tensors: the suite calls the same functions on plain tensors, as the reference, and on DTensors.
"""

from __future__ import annotations

import functools
import importlib
import os
from importlib.metadata import entry_points
from typing import Any, cast

from hyper_parallel.testing.adapters.protocol import Adapter, missing_names

__all__ = [
    "ENTRY_POINT_GROUP",
    "ENVIRONMENT_VARIABLE",
    "Adapter",
    "AdapterError",
    "get_adapter",
    "adapter_of",
    "load_adapter",
]

#: Environment variable with the module of the adapter. It overrides the backend's adapter, and workers inherit it.
ENVIRONMENT_VARIABLE = "HYPER_PARALLEL_ADAPTER"
#: Group of entry points for packages that provide a backend: name of the backend = module of its adapter.
ENTRY_POINT_GROUP = "hyper_parallel.test_adapters"

_BUILT_IN = {
    "torch-cpu": "hyper_parallel.testing.adapters.torch_adapter",
    "torch-cuda": "hyper_parallel.testing.adapters.torch_adapter",
    "torch-npu": "hyper_parallel.testing.adapters.torch_adapter",
    "mindspore": "hyper_parallel.testing.adapters.mindspore_adapter",
}


class AdapterError(RuntimeError):
    """Raised for a backend without an adapter, or with an incomplete adapter. The message has the remedy."""


def adapter_of(backend: str) -> str:
    """Return the module name of the adapter of ``backend``. The module is not imported.

    Args:
        backend: registered name of the backend; case does not matter.

    Raises:
        AdapterError: if neither the environment, nor an entry point, nor this package names an adapter.
    """
    key = backend.strip().lower().replace("_", "-")
    if given := os.environ.get(ENVIRONMENT_VARIABLE, "").strip():
        return given
    if key in _BUILT_IN:
        return _BUILT_IN[key]
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name.strip().lower().replace("_", "-") == key:
            return entry.value
    raise AdapterError(
        f"the backend {backend!r} has no adapter, the module through which the checks call its framework: give "
        f"one with --adapter package.module, or name it in the package of the backend by an entry point {key!r} in the "
        f"group {ENTRY_POINT_GROUP!r}. A backend on torch can name hyper_parallel.testing.adapters.torch_adapter."
    )


@functools.cache
def load_adapter(module: str) -> Adapter:
    """Import an adapter and check that it is complete.

    Raises:
        AdapterError: if it cannot be imported or lacks names; the message lists the names.
    """
    try:
        adapter = importlib.import_module(module)
    except ImportError as error:
        raise AdapterError(f"the adapter {module!r} cannot be imported: {error}") from error
    if missing := missing_names(adapter):
        raise AdapterError(
            f"the adapter {module!r} lacks {', '.join(missing)}; hyper_parallel.testing.adapters.protocol.Adapter "
            "describes them"
        )
    return cast(Adapter, adapter)


def get_adapter() -> Any:
    """Return the adapter of the backend named by ``HYPER_PARALLEL_PLATFORM``."""
    return load_adapter(adapter_of(os.environ["HYPER_PARALLEL_PLATFORM"]))
