"""First steps of a process, done once where several threads come to them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hyper_parallel.platform.forks import check_not_forked

if TYPE_CHECKING:
    from hyper_parallel.platform.contract import Platform

__all__ = ["FIRST_USE", "join_world"]

#: Held while a DTensor class is made, with the patches of its framework, and while ranks meet. Code that runs then may
#: come here again in the same thread.
FIRST_USE = threading.RLock()


def join_world(platform: Platform) -> None:
    """Initialise the default process group, unless there is one.

    Raises:
        RuntimeError: when it is the group of a rank from which this process was forked.
    """
    if platform.world() is None:
        with FIRST_USE:
            if platform.world() is None:  # another thread may have done it meanwhile
                platform.init_process_group()
    check_not_forked(platform, "making a device mesh")
