"""Processes forked from a rank: they inherit the rank's process groups, but no connection to the other ranks.

The connections belong to threads of the rank, which a child lacks: a collective would hang in the child. The check
costs a rank itself almost nothing. This module imports no framework.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.registry import worlds

if TYPE_CHECKING:
    from hyper_parallel.platform.contract import Platform

__all__ = ["check_not_forked"]

#: Default groups that this process inherited from its parent by fork.
_INHERITED: list[Any] = []


def check_not_forked(platform: Platform, what: str) -> None:
    """Raise RuntimeError if this process was forked from a rank, and ``what`` would use the rank's group.

    Args:
        platform: platform of the group.
        what: the planned action, for the message.
    """
    world = platform.world()
    if any(world is inherited for inherited in _INHERITED):
        raise RuntimeError(
            f"{what}: this process was forked from rank {platform.rank()}, and is not a rank itself: its collectives "
            "would hang. Call this on the rank, or start processes with multiprocessing's 'spawn' method, and let "
            "them join a new process group"
        )


def _remember() -> None:
    _INHERITED[:] = worlds()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember)
