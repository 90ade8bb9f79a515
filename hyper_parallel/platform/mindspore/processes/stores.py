"""Stores through which ranks meet, and the orderly end of these ranks.

mccl acknowledges a message after it has given the message to the collective. The acknowledgement contains the message,
and waits in a buffer to be sent. If the receiver ends, or closes its connections, the acknowledgement is lost. The
sender then fails after its time-out, although nothing was wrong. So ranks leave only when all have returned from their
last collective.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import mindspore as ms
import numpy as np
from mindspore.mint import distributed as dist

__all__ = [
    "SECONDS",
    "connect_until_the_end",
    "listen_for_ends",
    "make_store",
    "meet",
    "seconds_in_collectives",
    "set_seconds_in_collectives",
    "store_of_msrun",
    "wait_for_ends",
    "wait_for_leaving",
]

#: Default seconds that mccl's collectives wait for the other ranks, and the variable that changes them. MindSpore reads
#: it once.
SECONDS, _VARIABLE = 30.0, "MS_CPU_COMM_OP_TIMEOUT"
#: Keys of the counters of ranks that have met, and of ranks that leave; key of the port of `listen_for_ends`.
_MET, _LEAVING, _END = "hyper_parallel/met", "hyper_parallel/leaving", "hyper_parallel/end"
#: Seconds to wait for a connection to that port.
_CONNECTING = 5.0
#: Number of ports to try, if other processes take them first.
_PORTS = 9
#: All stores of this process, until it ends: about one in ten clients ends the process with a segmentation fault when
#: MindSpore destroys it while the server exists.
_stores: list[Any] = []
#: Connections of `connect_until_the_end`.
_connections: list[socket.socket] = []


def set_seconds_in_collectives(seconds: float) -> None:
    """Set how long mccl's collectives wait for the other ranks, unless MindSpore's variable is set."""
    os.environ.setdefault(_VARIABLE, str(math.ceil(seconds)))


def seconds_in_collectives() -> float:
    """Return how long mccl's collectives wait for the other ranks."""
    seconds = float(os.environ.get(_VARIABLE) or SECONDS)
    return math.inf if seconds < 0 else seconds


def make_store(address: str, port: int, size: int, serve: bool, timeout: timedelta, wait: bool = True) -> Any:
    """Make a store that lives until the process ends.

    Args:
        address, port: address and port of the store; the address is numeric.
        size: number of ranks.
        serve: whether this process serves the store.
        timeout: maximum time to connect to the store.
        wait: whether the serving process waits here for all others.
    """
    store = dist.TCPStore(address, port, world_size=size, is_master=serve, timeout=timeout, wait_for_workers=wait)
    _stores.append(store)
    return store


def store_of_msrun(
    rank: int, size: int, group: str | None, timeout: timedelta, environ: Mapping[str, str] = os.environ
) -> Any:
    """Make a store for ranks that have met at msrun's scheduler.

    All these ranks make the call. Rank 0 serves the store, and broadcasts its address to the other ranks.

    Args:
        rank: this rank.
        size: number of ranks.
        group: name of the group of all ranks.
        timeout: how long to try to reach the store.
        environ: the environment, which has the address of msrun's scheduler.
    """
    where, store = np.zeros(5, np.int32), None
    if rank == 0:
        address = _address_towards(environ["MS_SCHED_HOST"], int(environ["MS_SCHED_PORT"]))
        port, store = _serve(address, size, timeout)
        where[:] = *map(int, address.split(".")), port
    told = ms.Tensor(where)
    dist.broadcast(told, 0, group)
    if rank != 0:
        *numbers, port = told.asnumpy().tolist()
        store = make_store(".".join(map(str, numbers)), port, size, False, timeout)
    return store


def _address_towards(host: str, port: int) -> str:
    """Return the address of this machine in the network of a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def _serve(address: str, size: int, timeout: timedelta) -> tuple[int, Any]:
    """Make a store on a free port, and return both. A store accepts a port number, but no socket. So another process
    may take the port first."""
    left = _PORTS
    while True:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        try:
            return port, make_store(address, port, size, True, timeout, wait=False)
        except RuntimeError:
            left -= 1
            if not left:
                raise


def meet(store: Any, size: int, seconds: float) -> None:
    """Wait until all ranks have called this.

    Raises:
        RuntimeError: when some ranks have not called it within ``seconds``.
    """
    came = _count(store, _MET, size, seconds)
    if came is not None and came < size:
        raise RuntimeError(
            f"{came} of {size} ranks arrived within {seconds:g} s: the other ranks were not started, have ended, or "
            "hang"
        )


def wait_for_leaving(store: Any, size: int, seconds: float) -> None:
    """Wait until all ranks have called this, or for ``seconds``, because a rank may be lost."""
    _count(store, _LEAVING, size, seconds)


def listen_for_ends(store: Any, address: str, size: int) -> socket.socket | None:
    """Return the socket on rank 0 to which `connect_until_the_end` connects.

    ``store`` gets the port of the socket. Nothing is ever sent. The operating system closes the connection of a rank
    when the rank's process has ended.
    """
    with suppress(OSError):
        listener = socket.socket()
        listener.bind((address, 0))
        listener.listen(size)
        store.add(_END, int(listener.getsockname()[1]))
        return listener
    return None


def connect_until_the_end(store: Any, address: str) -> None:
    """Connect this rank to the socket of `listen_for_ends`, until the process ends.

    Call it after all ranks have met.
    """
    with suppress(OSError, RuntimeError):  # then rank 0 waits in vain
        if port := int(store.add(_END, 0)):
            _connections.append(socket.create_connection((address, port), _CONNECTING))


def wait_for_ends(listener: socket.socket, count: int, seconds: float) -> None:
    """Wait until the processes of ``count`` other ranks have ended, or for ``seconds``.

    MindSpore's RPC server lives in rank 0. When a program ends, every rank closes its connection to the server. If the
    server closes the connection at that moment, a thread of MindSpore calls a function in freed memory. The process
    then ends with a segmentation fault: in 3 of 3 programs whose rank 1 ended as soon as rank 0 had ended.
    """
    deadline = time.monotonic() + seconds
    with suppress(OSError):  # the time is over
        connections = list[socket.socket]()
        while len(connections) < count:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            connections.append(listener.accept()[0])
        for connection in connections:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.recv(1)


def _count(store: Any, place: str, size: int, seconds: float) -> int | None:
    """Count this rank, wait until ``size`` ranks are counted, and return how many came in time.

    The result is None if the store is gone. The store is served by rank 0, which ends after it has seen all ranks, or
    when it is lost.
    """
    deadline = time.monotonic() + seconds
    try:
        came = int(store.add(place, 1))
        while came < size and time.monotonic() < deadline:
            time.sleep(0.01)
            came = int(store.add(place, 0))
    except RuntimeError:
        return None
    return came
