"""Initialisation that a process does once, even if several threads start it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hyper_parallel.platform.forks import check_not_forked

if TYPE_CHECKING:
    from hyper_parallel.platform.contract import Platform

__all__ = ["FIRST_USE", "join_world"]

#: Lock for creating a DTensor class, patching its framework and initialising the default process group. It is
#: reentrant, because code that runs meanwhile may need it in the same thread.
FIRST_USE = threading.RLock()


def join_world(platform: Platform) -> None:
    """Initialise the default process group if it does not exist.

    Raises:
        RuntimeError: when the group belongs to the rank from which this process was forked.
    """
    if platform.world() is None:
        with FIRST_USE:
            if platform.world() is None:  # another thread may have done it meanwhile
                platform.init_process_group()
    check_not_forked(platform, "making a device mesh")
