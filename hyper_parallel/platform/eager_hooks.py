"""Hooks around the calls of a module that only eager calls have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["EagerHook", "no_hook"]


def no_hook(module: Any, *given: Any) -> None:
    """Stand for an `EagerHook` in a copy of its module."""


class EagerHook:
    """A hook of one module object. A copy of the module has `no_hook` in its place, and so has one that was pickled.

    Attributes:
        function: is called with the module, and what the framework gives.
    """

    eager_only = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, module: Any, *given: Any) -> None:
        self.function(module, *given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> str:
        return "no_hook"
