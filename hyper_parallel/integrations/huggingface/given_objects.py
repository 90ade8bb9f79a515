"""Objects of other libraries that get further methods: a check of their class, and the change of their class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["check_known", "give_methods"]


def check_known(given: Any, needed: Sequence[str], caller: str, kind: str, known: str) -> None:
    """Check that an object has the expected class, and the attributes that this library replaces.

    Args:
        given: the object.
        needed: names of the attributes that it must have.
        caller: name of the function that takes it, for messages.
        kind: description of the expected class, for messages, such as "an accelerate.Accelerator".
        known: release that this library was written for.

    Raises:
        TypeError: for an object that lacks most of the names. ValueError: for one that lacks some.
    """
    lacking = [name for name in needed if not hasattr(given, name)]
    if len(lacking) > len(needed) // 2:
        raise TypeError(f"{caller} takes {kind}, got {type(given).__name__}")
    if lacking:
        package, _, name = kind.split()[1].partition(".")
        raise ValueError(
            f"{caller}: {name} of the installed {package} has no {', '.join(lacking)}. The tested release is {known}: "
            f'pip install "{package}~={known}.0"'
        )


def give_methods(given: Any, methods: type) -> None:
    """Let the methods of a class override the methods of an object. The object's class keeps its name."""
    own = type(given)
    given.__class__ = type(own.__name__, (methods, own), {"__module__": own.__module__})
