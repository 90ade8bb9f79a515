"""The frameworks as the conformance suite sees them: `get_lab` gives the one of the backend under test.

A lab has the framework's own operations and modules under common names, conversions from and to NumPy, and gradients:
`hyper_parallel.testing.labs.protocol.Lab` says which. It knows nothing of distributed tensors: the suite calls the same
functions on plain tensors, for the reference, and on DTensors.
"""

from __future__ import annotations

import functools
import importlib
import os
from importlib.metadata import entry_points
from typing import Any, cast

from hyper_parallel.testing.labs.protocol import Lab, missing_names

__all__ = ["ENTRY_POINT_GROUP", "ENVIRONMENT_VARIABLE", "Lab", "LabError", "get_lab", "lab_of", "load_lab"]

#: Names the module of the lab, ahead of what the backend says; workers inherit it.
ENVIRONMENT_VARIABLE = "HYPER_PARALLEL_LAB"
#: Entry points of packages that bring a backend: name of the backend = module of its lab.
ENTRY_POINT_GROUP = "hyper_parallel.labs"

_BUILT_IN = {
    "torch-cpu": "hyper_parallel.testing.labs.torch_lab",
    "torch-cuda": "hyper_parallel.testing.labs.torch_lab",
    "torch-npu": "hyper_parallel.testing.labs.torch_lab",
    "mindspore": "hyper_parallel.testing.labs.mindspore_lab",
}


class LabError(RuntimeError):
    """A backend has no lab, or an incomplete one. The message says how to give one, or which names are missing."""


def lab_of(backend: str) -> str:
    """Name of the module that is the lab of ``backend``, which is not imported.

    Args:
        backend: as registered; case does not matter.

    Raises:
        LabError: when neither the environment, nor an entry point, nor this package names one.
    """
    key = backend.strip().lower().replace("_", "-")
    if given := os.environ.get(ENVIRONMENT_VARIABLE, "").strip():
        return given
    if key in _BUILT_IN:
        return _BUILT_IN[key]
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name.strip().lower().replace("_", "-") == key:
            return entry.value
    raise LabError(
        f"the backend {backend!r} has no lab, the module through which the checks call its framework: give one with "
        f"--lab package.module, or name it in the package of the backend by an entry point {key!r} in the group "
        f"{ENTRY_POINT_GROUP!r}. A backend on torch can name hyper_parallel.testing.labs.torch_lab."
    )


@functools.cache
def load_lab(module: str) -> Lab:
    """Import a lab and see that it is complete.

    Raises:
        LabError: when it cannot be imported or lacks names; the message lists them.
    """
    try:
        lab = importlib.import_module(module)
    except ImportError as error:
        raise LabError(f"the lab {module!r} cannot be imported: {error}") from error
    if missing := missing_names(lab):
        raise LabError(
            f"the lab {module!r} lacks {', '.join(missing)}; hyper_parallel.testing.labs.protocol.Lab says what they do"
        )
    return cast(Lab, lab)


def get_lab() -> Any:
    """The lab of the backend named by ``HYPER_PARALLEL_PLATFORM``."""
    return load_lab(lab_of(os.environ["HYPER_PARALLEL_PLATFORM"]))
