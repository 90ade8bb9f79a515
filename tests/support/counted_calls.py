"""Counts of calls, for tests of how work grows: they need no clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["calls_of"]


def calls_of(action: Callable[[], Any]) -> int:
    """Return how many functions an action calls, of Python and of C, parts of generators included."""
    called = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal called
        called += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return called
