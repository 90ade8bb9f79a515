"""Classes of other libraries with the same names as this library's placements, styles and meshes."""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.public_names import HOME_OF

#: Names of placement classes that other libraries also have.
_PLACEMENTS = frozenset({"Partial", "Replicate", "Shard", "_StridedShard"})


def described_placement(value: Any) -> tuple[Any, ...] | None:
    """Return the class name and the arguments of a placement of the framework's DTensors, such as ``("Shard", 0)``.

    Return None for any other value.

    Example:
        >>> described_placement(3) is None
        True
    """
    if type(value).__name__ not in _PLACEMENTS:
        return None
    found: tuple[Any, ...] | None = get_platform().describe_native_placement(value)
    return found


def import_hint(value: Any) -> str:
    """Return the end of a message about a rejected value: the origin of its class, and the right import.

    The result is empty unless the class of ``value``, or a base class, has the name of a class here.

    Example:
        >>> from hyper_parallel.core.lookalikes import import_hint
        >>> import_hint(3)
        ''
    """
    cls = value if isinstance(value, type) else type(value)
    for base in cls.__mro__:
        name, home = base.__name__, base.__module__
        if name in HOME_OF and home.partition(".")[0] != "hyper_parallel":
            return f"; this is {name} of {home}, which is not this library's: write `from hyper_parallel import {name}`"
    return ""
