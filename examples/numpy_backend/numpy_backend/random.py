"""The generator that everything here draws from, and its state as an array."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from numpy_backend.array import Array

__all__ = ["GENERATOR", "get_state", "seed", "set_state"]

GENERATOR = np.random.Generator(np.random.PCG64(0))


def seed(value: int) -> None:
    """Begin anew."""
    GENERATOR.bit_generator.state = np.random.PCG64(value).state


def get_state() -> Array:
    """The state; equal for equal states."""
    return Array(np.frombuffer(pickle.dumps(GENERATOR.bit_generator.state), np.uint8))


def set_state(state: Any) -> None:
    """Put a state back."""
    GENERATOR.bit_generator.state = pickle.loads(state.value.tobytes())
