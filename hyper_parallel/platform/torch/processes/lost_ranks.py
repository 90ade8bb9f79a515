"""Finding out who is missing when a collective of torch.distributed fails."""

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

#: Seconds that a rank whose collective has failed waits for the reports of the others; more on a busy machine.
GRACE = 3.0
#: The same for a rank whose local computation has failed, until the others fail in the same way.
ALIKE = 4.0
_TAG = 0x4E0
#: Texts in gloo's errors when a connection is lost; the second comes from every later use of the group.
_GLOO = ("gloo/transport/", "Application timeout caused pair closure")


def timeout_of(group: Any, device_type: str) -> timedelta | None:
    """How long collectives of a group wait on a device, None when its backend does not say."""
    try:
        return group._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):  # torch's fake group has no options
        return None


def is_communication_failure(error: Exception) -> bool:
    """Return whether a backend lost a rank, rather than refused its arguments."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _GLOO)


def find_missing_ranks(group: Any, ranks: Sequence[int], report: str) -> tuple[dict[int, str], tuple[int, ...]] | None:
    """See `Platform.find_missing_ranks`. The reports lie in the store at which the ranks have met.

    Args:
        group: a ``ProcessGroup``; None when it was destroyed.
    """
    if group is None or not dist.is_initialized():
        return None
    _fail_waiting_ranks(group)
    served_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent keeps it
    return exchange_reports(default_store(), dist.get_rank(), group.group_name, ranks, report, GRACE, served_by_rank_0)


def exchange_texts(ranks: Sequence[int], place: str, text: str, device_type: str) -> dict[int, str] | None:
    """Exchange ``text`` with ``ranks`` through the store, without a collective; see `Platform.exchange_texts`."""
    if dist.get_backend() == "fake":  # torch's group of ranks that are not there
        return None
    wait = timeout_of(dist.group.WORLD, device_type)
    seconds = (wait or timedelta(minutes=30)).total_seconds()
    return fault_reports.exchange_texts(default_store(), dist.get_rank(), ranks, place, text, seconds)


def tell_of_failure(groups: Sequence[Any], ranks: Sequence[int], report: str) -> None:
    """See `Platform.tell_of_failure`. The ranks that have failed are counted in the store, failure by failure.

    Args:
        groups: ``ProcessGroup`` each; None for one that was destroyed.
    """
    if None in groups or not dist.is_initialized():
        return
    store, members = default_store(), "_".join(map(str, ranks))
    # The number of the failure lies in the store as well, so that it starts anew with other process groups.
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
        return  # the store has ended, and with it the ranks that would read this


def _fail_waiting_ranks(group: Any) -> None:
    """Fail the collectives of the ranks that wait in ``group`` for the rank that is missing.

    When a process dies, gloo fails at once on its neighbours only; the others would wait for the time-out. A receive
    that times out closes gloo's connections to all ranks, which fails them too. (``abort`` leaves them waiting.)
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
