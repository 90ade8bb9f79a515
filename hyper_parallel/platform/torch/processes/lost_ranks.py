"""Search for missing ranks after a collective of torch.distributed failed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform import fault_reports
from hyper_parallel.platform.fault_reports import exchange_reports, leave_report
from hyper_parallel.platform.timeout import slowness
from hyper_parallel.platform.torch.basics.private import default_store

__all__ = [
    "ALIKE",
    "GRACE",
    "exchange_texts",
    "find_missing_ranks",
    "is_communication_failure",
    "tell_of_failure",
    "timeout_of",
]

#: Seconds that a rank waits for the reports of the others after its collective failed; more on a busy machine.
GRACE = 3.0
#: Seconds that a rank waits for the others to fail in the same way after its local computation failed.
ALIKE = 4.0
_TAG = 0x4E0
#: Parts of gloo's errors for a lost connection. The second is the error of every later use of the group.
_GLOO = ("gloo/transport/", "Application timeout caused pair closure")


def timeout_of(group: Any, device_type: str) -> timedelta | None:
    """Return how long collectives of a group wait on a device, None if its backend does not report it."""
    try:
        return group._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):  # torch's fake group has no options
        return None


def is_communication_failure(error: Exception) -> bool:
    """Return whether a collective failed because of a lost rank, not because of its arguments."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _GLOO)


def find_missing_ranks(group: Any, ranks: Sequence[int], report: str) -> tuple[dict[int, str], tuple[int, ...]] | None:
    """Find the missing ranks after a failed collective; see `Platform.find_missing_ranks`. Reports are exchanged
    through the store of the default group.

    Args:
        group: a ``ProcessGroup``; None if it was destroyed.
    """
    if group is None or not dist.is_initialized():
        return None
    _fail_waiting_ranks(group)
    served_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent keeps it
    return exchange_reports(default_store(), dist.get_rank(), group.group_name, ranks, report, GRACE, served_by_rank_0)


def exchange_texts(ranks: Sequence[int], place: str, text: str, device_type: str) -> dict[int, str] | None:
    """Exchange ``text`` with ``ranks`` through the store, without a collective; see `Platform.exchange_texts`."""
    if dist.get_backend() == "fake":  # torch's group of ranks that do not exist
        return None
    wait = timeout_of(dist.group.WORLD, device_type)
    seconds = (wait or timedelta(minutes=30)).total_seconds()
    return fault_reports.exchange_texts(default_store(), dist.get_rank(), ranks, place, text, seconds)


def tell_of_failure(groups: Sequence[Any], ranks: Sequence[int], report: str) -> None:
    """Report to ``ranks`` that this rank failed outside a collective.

    For each failure, a counter in the store shows how many ranks failed in the same way.

    Args:
        groups: process groups; None for a destroyed group.
    """
    if None in groups or not dist.is_initialized():
        return
    store, members = default_store(), "_".join(map(str, ranks))
    # The number of the failure is in the store too, so that it restarts with other process groups.
    mine = f"hyper_parallel/failures/{members}/{dist.get_rank()}"
    deadline = time.monotonic() + ALIKE * slowness()
    try:
        together = f"hyper_parallel/failures/{members}/number {store.add(mine, 1)}"
        store.add(together, 1)
        while store.add(together, 0) < len(ranks):
            if time.monotonic() > deadline:
                leave_report(store, dist.get_rank(), report)
                for group in groups:
                    _fail_waiting_ranks(group)
                return
            time.sleep(0.01)
    except RuntimeError:
        return  # the store has ended, and with it the ranks that would read the report


def _fail_waiting_ranks(group: Any) -> None:
    """Fail the collectives of the ranks that wait in ``group`` for the missing rank.

    When a process dies, gloo fails at once on its neighbours only; the other ranks would wait for the time-out. A
    receive that times out closes gloo's connections to all ranks, so their collectives fail too. (After ``abort`` these
    ranks would still wait.)
    """
    if dist.get_backend(group) != "gloo":
        return
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.empty(1)], peer, _TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
