"""Search for missing ranks after a collective of MindSpore failed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.platform.fault_reports import exchange_reports

__all__ = ["GRACE", "Lost", "check_group", "find_missing_ranks", "is_communication_failure"]

#: Seconds that a rank waits for the reports of the others after its collective failed. On CPU all ranks have then
#: waited for the time-out, each since it reached the collective.
GRACE = 5.0

#: Name of a group -> the result of `find_missing_ranks`, for groups with missing ranks. Each further collective of such
#: a group would wait for mccl's time-out again.
Lost = dict[str, tuple[dict[int, str], tuple[int, ...]]]

_FAILURES = re.compile(
    r"\b(AllReduce|AllGather|Gather|ReduceScatter|AlltoAll\w*|Broadcast|Barrier|Send|Recv)\w* failed|HCCL|hccl|mccl"
)


def is_communication_failure(error: Exception) -> bool:
    """Return whether a collective failed because of a lost rank, not because of its arguments."""
    return _FAILURES.search(str(error)) is not None


def check_group(group: Any, lost: Lost) -> None:
    """Raise RuntimeError, a communication failure, for a lost group."""
    if group in lost:
        raise RuntimeError("mccl is not called again, because this group lost ranks: start new processes")


def find_missing_ranks(
    store: Any, me: int, group: str, ranks: Sequence[int], report: str, groups: Mapping[str, Sequence[int]], lost: Lost
) -> tuple[dict[int, str], tuple[int, ...]] | None:
    """Find the missing ranks after a failed collective; see `Platform.find_missing_ranks`. From then on, later
    collectives on groups with missing ranks raise at once.

    Args:
        store: a ``TCPStore`` of all ranks, served by rank 0; None if they have none.
        me: this rank.
        group: name of the group.
        ranks: global ranks of the group.
        report: what this rank was doing.
        groups: name of each group of this rank -> its global ranks.
        lost: the known results by group; this call may add one.
    """
    if store is None or group in lost:
        return lost.get(group)
    found = exchange_reports(store, me, group, ranks, report, GRACE)
    if found is not None and found[1]:
        lost[group] = found
        for other, members in groups.items():
            missing = tuple(rank for rank in members if rank in found[1])
            if missing:
                lost.setdefault(other, ({me: report}, missing))
    return found
