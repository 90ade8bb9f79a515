"""Processes that were forked from a rank: they have its process groups, and no connection to the other ranks.

The connections belong to threads of the rank, which a child has not: it would wait without end. A rank itself pays
nothing for the question. This module imports no framework.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.registry import worlds

if TYPE_CHECKING:
    from hyper_parallel.platform.contract import Platform

__all__ = ["check_not_forked"]

#: The default groups that this process has from the one that it was forked from.
_INHERITED: list[Any] = []


def check_not_forked(platform: Platform, what: str) -> None:
    """Raise RuntimeError where this process was forked from a rank, whose group it would use for ``what``.

    Args:
        platform: of the group.
        what: is to be done, for the message.
    """
    world = platform.world()
    if any(world is inherited for inherited in _INHERITED):
        raise RuntimeError(
            f"{what}: this process was forked from rank {platform.rank()}, and is no rank itself: it would wait for "
            "the others without end. Let the rank do it, or start processes by multiprocessing's 'spawn', which join a "
            "group of their own"
        )


def _remember() -> None:
    _INHERITED[:] = worlds()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember)
