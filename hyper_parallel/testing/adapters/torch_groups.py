"""One network device of gloo for all process groups of a worker, and a store. Only this machine can reach device and
store.

Torch makes a device for each group, and each device has a thread that wakes a hundred times a second. A worker of the
pool makes a hundred groups in a run of the tests: their threads took two thirds of its processor time.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

__all__ = ["LOOPBACK", "serve_on_loopback", "share_one_device"]

#: Address at which workers listen. They exchange pickles, so no other machine may reach them.
LOOPBACK = "127.0.0.1"


def serve_on_loopback(port: int, size: int) -> Any:
    """Serve the store at which the workers meet. The caller keeps the store alive until all workers have met.

    `torch.distributed` uses it in place of its own store, which would listen on all interfaces.

    Args:
        port: port on which the store listens.
        size: number of workers.
    """
    from torch.distributed import TCPStore

    listening = socket.create_server((LOOPBACK, port), backlog=size)
    return TCPStore(
        LOOPBACK,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def share_one_device() -> None:
    """Let all groups that `torch.distributed` creates in this process from now on share one device and its thread.

    Does nothing where torch has no gloo.
    """
    from torch.distributed import distributed_c10d

    gloo = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if gloo is None:
        return
    make, device = gloo.__init__, gloo.create_device(hostname=LOOPBACK)

    def make_on_the_device(
        self: Any, store: Any, rank: int, size: int, timeout: datetime.timedelta, **options: Any
    ) -> None:
        of_group = gloo._Options()
        of_group._devices, of_group._timeout = [device], timeout
        for name, value in options.items():
            setattr(of_group, name, value)
        make(self, store, rank, size, of_group)

    gloo.__init__ = make_on_the_device
