"""Classes of other libraries that have the name of one of this library's: their placements, styles and meshes."""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.public_names import HOME_OF

#: Names of the classes of placements that other libraries have too.
_PLACEMENTS = frozenset({"Partial", "Replicate", "Shard", "_StridedShard"})


def described_placement(value: Any) -> tuple[Any, ...] | None:
    """The name of this library's class and its arguments, such as ``("Shard", 0)``. For a placement of the framework's
    own DTensors. None for everything else.

    Example:
        >>> described_placement(3) is None
        True
    """
    if type(value).__name__ not in _PLACEMENTS:
        return None
    found: tuple[Any, ...] | None = get_platform().describe_native_placement(value)
    return found


def import_hint(value: Any) -> str:
    """The end of a message about a refused value: the library of its class, and the import that gives this library's.

    Empty unless the class of ``value``, or one of its bases, has the name of a public class here.

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
