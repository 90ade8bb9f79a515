"""Ranks as processes of one machine or several: a connection between every two, and gathering over them.

Rank 0 listens where ``MASTER_ADDR`` and ``MASTER_PORT`` say. There each rank tells where it listens itself and learns
of the others. A thread for each connection reads incoming messages, so that no sender has to wait for a receiver.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

__all__ = ["Group", "World", "join"]

_KEY = b"numpy-backend"


@dataclass(frozen=True)
class Group:
    """Some of the ranks, in order. ``number`` counts the groups of the program, which all ranks make in the same
    order."""

    ranks: tuple[int, ...]
    number: int


class World:
    """All ranks as one of them sees them.

    Attributes:
        rank, size: of this process, and how many there are.
        seconds: how long to wait for another rank.
    """

    def __init__(self, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size, self.seconds = rank, size, seconds
        self._connections: dict[int, Connection] = {}
        self._arrived: dict[int, queue.SimpleQueue[Any]] = {}
        self._groups = 0

    def connect(self, other: int, connection: Connection) -> None:
        """Use a connection to another rank."""
        self._connections[other], self._arrived[other] = connection, queue.SimpleQueue()
        threading.Thread(target=self._read, args=(other,), daemon=True).start()

    def _read(self, other: int) -> None:
        try:
            while True:
                self._arrived[other].put(self._connections[other].recv())
        except (EOFError, OSError) as error:
            self._arrived[other].put(error)

    def group(self, ranks: Sequence[int]) -> Group:
        """A group of these ranks; to be called on all ranks of the world."""
        self._groups += 1
        return Group(tuple(ranks), self._groups)

    def gather(self, value: Any, group: Group, what: str) -> list[Any]:
        """Gather the value that every rank of the group gives, in the order of its ranks.

        Raises:
            RuntimeError: when a rank does not come, has gone, or gives something else than ``what``.
        """
        others = [other for other in group.ranks if other != self.rank]
        for other in others:
            try:
                self._connections[other].send((group.number, what, value))
            except OSError as error:
                raise RuntimeError(f"{what}: rank {other} is gone: {error}") from None
        found = {self.rank: value}
        for other in others:
            try:
                message = self._arrived[other].get(timeout=self.seconds)
            except queue.Empty:
                raise RuntimeError(f"{what}: rank {other} did not come within {self.seconds:g} s") from None
            if isinstance(message, Exception):
                self._arrived[other].put(message)
                raise RuntimeError(f"{what}: rank {other} is gone: {message!r}")
            if message[:2] != (group.number, what):
                raise RuntimeError(f"{what} on group {group.ranks}: rank {other} is in {message[1]} instead")
            found[other] = message[2]
        return [found[rank] for rank in group.ranks]

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()


def join(seconds: float) -> World:
    """Meet the others, as the launcher's variables say; without a launcher, a world of one rank."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    world = World(rank, size, seconds)
    if size == 1:
        return world
    own = Listener(("127.0.0.1", 0), backlog=size, authkey=_KEY)
    if rank == 0:
        addresses: dict[int, Any] = {0: own.address}
        master = Listener((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), backlog=size, authkey=_KEY)
        waiting = [master.accept() for _ in range(size - 1)]
        for connection in waiting:
            addresses.update([connection.recv()])
        for connection in waiting:
            connection.send(addresses)
        master.close()
    else:
        master_address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        with _patient_client(master_address, seconds) as connection:
            connection.send((rank, own.address))
            addresses = connection.recv()
    for other in range(rank):  # the later rank of two calls the earlier one
        connection = Client(addresses[other], authkey=_KEY)
        connection.send(rank)
        world.connect(other, connection)
    for _ in range(rank + 1, size):
        connection = own.accept()
        world.connect(connection.recv(), connection)
    own.close()
    return world


def _patient_client(address: tuple[str, int], seconds: float) -> Connection:
    """Rank 0 may not listen yet."""
    import time

    until = time.monotonic() + seconds
    while True:
        try:
            return Client(address, authkey=_KEY)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise RuntimeError(f"rank 0 does not listen at {address[0]}:{address[1]}") from None
            time.sleep(0.02)
