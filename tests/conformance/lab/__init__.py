"""The frameworks as the conformance suite sees them: `get_lab` gives the one of the backend under test.

A lab has the framework's own operations and modules under common names, conversions from and to NumPy, and gradients.
It knows nothing of distributed tensors: the suite calls the same functions on plain tensors, for the reference, and on
DTensors.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def get_lab() -> Any:
    """The lab module of the backend named by ``HYPER_PARALLEL_PLATFORM``."""
    name = os.environ["HYPER_PARALLEL_PLATFORM"]
    return importlib.import_module(f"tests.conformance.lab.{'mindspore' if name == 'mindspore' else 'torch'}_lab")
