"""One network device of gloo for all process groups of a worker.

Torch makes a device a group, and each device has a thread that wakes a hundred times a second. A worker of the pool
makes a hundred groups in the course of the tests: their threads took two thirds of its processor time.
"""

from __future__ import annotations

import datetime
from typing import Any

__all__ = ["share_one_device"]


def share_one_device() -> None:
    """Let all groups that `torch.distributed` makes in this process from now on share one device and its thread.

    Does nothing where torch has no gloo.
    """
    from torch.distributed import distributed_c10d

    gloo = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if gloo is None:
        return
    make, device = gloo.__init__, gloo.create_default_device()

    def make_on_the_device(
        self: Any, store: Any, rank: int, size: int, timeout: datetime.timedelta, **options: Any
    ) -> None:
        of_group = gloo._Options()
        of_group._devices, of_group._timeout = [device], timeout
        for name, value in options.items():
            setattr(of_group, name, value)
        make(self, store, rank, size, of_group)

    gloo.__init__ = make_on_the_device
