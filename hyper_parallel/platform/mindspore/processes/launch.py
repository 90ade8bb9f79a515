"""Process groups: the launchers' environments, the default group, subgroups.

Without msrun, ranks meet through a `TCPStore`, for which torchrun's four environment variables are enough. Under msrun,
ranks meet at msrun's scheduler, and then make a store.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import mindspore as ms
from mindspore import communication, ops
from mindspore.mint import distributed as dist

from hyper_parallel.platform.contract import NativeGroup
from hyper_parallel.platform.fault_reports import exchange_texts
from hyper_parallel.platform.launch_variables import number_in, rank_and_size
from hyper_parallel.platform.mindspore.basics.private import GlobalComm
from hyper_parallel.platform.mindspore.processes import lost_ranks
from hyper_parallel.platform.mindspore.processes.stores import (
    SECONDS,
    connect_until_the_end,
    listen_for_ends,
    make_store,
    meet,
    seconds_in_collectives,
    set_seconds_in_collectives,
    store_of_msrun,
    wait_for_ends,
    wait_for_leaving,
)
from hyper_parallel.platform.timeout import timeout_seconds

__all__ = ["GroupVerbs", "World", "device_target", "wait_for_group"]

#: Seconds to wait if the program gives no time-out.
_TIMEOUT = 300.0
#: Seconds that a rank waits for the others before it destroys its groups, after a collective has failed.
_AFTER_FAILURE = 5.0
#: Seconds to wait if the ranks have no store, because the program gave MindSpore its own.
_MOMENT = 1.0
#: Seconds that rank 0 waits at its end for the ends of the other ranks.
_END = 5.0

_known_target: str | None = None


def device_target() -> str:
    """Return ``"CPU"`` or ``"Ascend"`` from MindSpore's context. MindSpore takes 20 us to answer. So the answer is
    cached once process groups exist: from then on it cannot change."""
    global _known_target
    if _known_target is not None:
        return _known_target
    target = str(ms.get_context("device_target"))
    if GlobalComm.INITED:
        _known_target = target
    return target


def wait_for_group(group: str) -> None:
    """Wait until all ranks of the group have called this."""
    if device_target() == "CPU":
        dist.all_reduce(ops.ones((1,), ms.float32), "sum", group)  # mccl's barrier supports the world only
    else:
        dist.barrier(group)


@dataclass(eq=False)
class World:
    """One initialised default group.

    Attributes:
        group: name of the group; None for a single rank.
        store: the store through which the ranks met.
    """

    rank: int
    size: int
    group: str | None
    store: Any = None
    subgroups: dict[tuple[int, ...], str] = field(default_factory=dict)
    with_options: int = 0
    #: Whether a collective has failed on this rank.
    failed: bool = False
    lost: lost_ranks.Lost = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)
    #: Whether this rank has left.
    left: bool = False
    #: Socket on rank 0 that tells it when the other ranks have ended. None on other ranks, and under msrun.
    listener: socket.socket | None = None

    def leave(self) -> None:
        """Wait until every other rank leaves or is lost. Until then, that rank may need messages of this rank."""
        self.left = True
        if self.store is None and not self.failed and "MS_SCHED_HOST" in os.environ:
            with suppress(RuntimeError):  # a rank is lost
                self.store = store_of_msrun(self.rank, self.size, self.group, timedelta(seconds=_TIMEOUT))
        if self.store is None:  # the ranks have no store, and mccl sends its messages within a moment
            time.sleep(_MOMENT)
        else:
            wait_for_leaving(self.store, self.size, _AFTER_FAILURE if self.failed else seconds_in_collectives())

    def leave_at_the_end(self) -> None:
        """Leave when the program ends, unless this rank has left before. Rank 0 ends last."""
        atexit.register(self._end)

    def _end(self) -> None:
        # A forked process is no rank. If an exception ends the program, the others lose this rank anyway.
        if os.getpid() != self.process or getattr(sys, "last_value", None) is not None:
            return
        if not self.left:
            self.leave()
        if self.listener is not None:
            wait_for_ends(self.listener, self.size - 1, _END)


class GroupVerbs:
    """MindSpore's implementation of `GroupRole`."""

    comm_backend: ClassVar[str] = "mccl"
    _world: World | None = None
    _destroyed = False

    def world(self) -> World | None:
        if self._world is None and GlobalComm.INITED:
            self._world = _adopt()
        return self._world

    def init_process_group(self, timeout: float | None = None) -> None:
        seconds = timeout_seconds(timeout)
        if self.world() is not None:
            return
        if ms.get_context("mode") == ms.GRAPH_MODE:
            raise RuntimeError(
                "MindSpore is in graph mode, but process groups can be made in PyNative mode alone: call "
                "mindspore.set_context(mode=mindspore.PYNATIVE_MODE) first, and set graph mode afterwards"
            )
        if self._destroyed:
            raise RuntimeError(
                "MindSpore cannot initialise process groups again after they were destroyed: start new processes"
            )
        on_cpu = device_target() == "CPU"
        if on_cpu:
            # Errors are raised where they arise, and on few cores it is many times faster.
            ms.runtime.launch_blocking()
        environment = os.environ
        with_msrun = "MS_ROLE" in environment or "MS_WORKER_NUM" in environment
        if on_cpu and seconds is not None:
            # msrun's ranks may reach the first collective seconds apart.
            set_seconds_in_collectives(max(seconds, SECONDS) if with_msrun else seconds)
        meeting = timedelta(seconds=seconds or _TIMEOUT)
        if with_msrun:
            communication.init(self.comm_backend)
            self._world = world = _adopt()
            if on_cpu and world.size > 1:
                world.store = store_of_msrun(world.rank, world.size, world.group, meeting)
                meet(world.store, world.size, meeting.total_seconds())  # see `_meet`
        elif number_in(environment, "WORLD_SIZE", 1, least=1) > 1:
            if not on_cpu:
                _select_device(environment)
            self._world = _meet(self.comm_backend, environment, meeting)
        else:
            self._world = World(0, 1, None)
        if on_cpu and self._world.store is not None:
            self._world.leave_at_the_end()

    def destroy_process_group(self) -> None:
        world, self._world = self._world, None
        if world is None or world.group is None:
            return
        if device_target() == "CPU":
            world.leave()
        dist.destroy_process_group()  # also destroys the subgroups
        GlobalComm.INITED = False
        self._destroyed = True

    def rank(self) -> int:
        return self._need_world().rank

    def world_size(self) -> int:
        return self._need_world().size

    def new_group(
        self, rank_lists: Sequence[Sequence[int]], backend: str | None = None, options: Any = None
    ) -> str | None:
        world = self._need_world()
        if backend not in (None, self.comm_backend):
            raise ValueError(
                f"MindSpore has only the communication backend {self.comm_backend!r} on this device, got "
                f"{backend!r}: leave the backend out of backend_override"
            )
        mine = next((tuple(ranks) for ranks in rank_lists if world.rank in ranks), None)
        if options is not None:
            world.with_options += 1  # on all ranks, so that they give the groups the same names
        if mine is None:
            return None
        if options is not None and len(mine) > 1:
            name = f"hp_{world.with_options}_" + "_".join(map(str, mine))
            communication.create_group(name, list(mine), options)
            return name
        if len(mine) == world.size and list(mine) == sorted(mine):
            return world.group
        if len(mine) == 1:
            return _self_group(world.rank)
        if mine not in world.subgroups:
            # Only members make a group here: with `new_group` on all ranks several groups deadlock.
            name = "hp_" + "_".join(map(str, mine))
            communication.create_group(name, list(mine))
            world.subgroups[mine] = name
        return world.subgroups[mine]

    def describe_group(self, native: Any) -> NativeGroup:
        """Describe a process group, which is identified by its name."""
        world = self._need_world()
        if not isinstance(native, str):
            raise TypeError(f"from_group takes the name of a group of MindSpore, got {type(native).__name__}")
        if native == _self_group(world.rank):
            return NativeGroup((world.rank,), native, native)
        ranks = tuple(range(world.size)) if native == world.group else tuple(dist.get_process_group_ranks(native))
        return NativeGroup(ranks, native, native)

    def native_group(self, group: str | None) -> str | None:
        """Return the name of a group. The first request for the name of a one-rank group makes that group."""
        world = self._need_world()
        if world.group is not None and group == _self_group(world.rank) and group not in world.subgroups.values():
            communication.create_group(group, [world.rank])
            world.subgroups[world.rank,] = group
        return group

    is_communication_failure: Any = staticmethod(lost_ranks.is_communication_failure)

    def check_group(self, group: Any) -> None:
        """Raise RuntimeError if a rank of the group was missing in a previous collective."""
        world = self._world
        if world is not None and world.lost:
            lost_ranks.check_group(group, world.lost)

    def find_missing_ranks(
        self, group: Any, ranks: Sequence[int], report: str
    ) -> tuple[dict[int, str], tuple[int, ...]] | None:
        world = self.world()
        if world is None:
            return None
        world.failed = True
        groups: dict[str, Sequence[int]] = {name: members for members, name in world.subgroups.items()}
        if world.group is not None:
            groups[world.group] = range(world.size)
        return lost_ranks.find_missing_ranks(world.store, world.rank, group, ranks, report, groups, world.lost)

    def exchange_texts(self, ranks: Sequence[int], place: str, text: str) -> dict[int, str] | None:
        world = self._need_world()
        if world.store is None:
            return None
        return exchange_texts(world.store, world.rank, ranks, place, text, seconds_in_collectives())

    def _need_world(self) -> World:
        world = self.world()
        if world is None:
            raise RuntimeError("the process group is not initialised: make a device mesh, or call init_process_group")
        return world


def _self_group(rank: int) -> str:
    """Return the name of the group of one rank. The group needs no communicator, because core calls no collectives on
    it."""
    return f"hp_{rank}"


def _adopt() -> World:
    """Return the default group that `mindspore.communication.init` made."""
    group = GlobalComm.WORLD_COMM_GROUP
    return World(communication.get_rank(), communication.get_group_size(), group)


def _select_device(environment: Any) -> None:
    """Select the device that ``LOCAL_RANK`` of torchrun names, unless the program has chosen one.

    Otherwise MindSpore would use device 0 on every rank. Under msrun MindSpore selects the device itself.
    """
    if int(ms.get_context("device_id")) == 0 and "LOCAL_RANK" in environment:
        ms.set_device("Ascend", number_in(environment, "LOCAL_RANK"))


def _meet(backend: str, environment: Any, timeout: timedelta) -> World:
    """Initialise the default group from torchrun's variables."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise RuntimeError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']} but {', '.join(missing)} is not set: start the processes with "
            "msrun or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process"
        )
    rank, size = rank_and_size(environment, "RANK", "WORLD_SIZE")
    port = number_in(environment, "MASTER_PORT")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun has its own store on the port
    address = socket.gethostbyname(environment["MASTER_ADDR"])  # the store takes numeric addresses only
    store = make_store(address, port, size, rank == 0, timeout)
    communication.management._init_with_store(
        backend=backend, timeout=timeout, world_size=size, rank=rank, store=store, group_name=""
    )
    group = f"{backend}_world_group"
    # Rank 0 serves the store. If it ended before all have met, the others would hang. They are counted, since the
    # time-out of a collective may be too short for ranks that are still connecting.
    listener = listen_for_ends(store, address, size) if rank == 0 else None
    meet(store, size, timeout.total_seconds())
    if rank != 0:
        connect_until_the_end(store, address)
    return World(rank, size, group, store, listener=listener)
