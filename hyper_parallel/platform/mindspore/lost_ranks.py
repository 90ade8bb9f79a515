"""Finding out who is missing when a collective of MindSpore fails."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hyper_parallel.platform.fault_reports import exchange_reports

__all__ = ["GRACE", "is_communication_failure", "find_missing_ranks"]

#: Seconds that a rank whose collective has failed waits for the reports of the others. On CPU all have waited for the
#: time-out by then, each since it came to the collective.
GRACE = 5.0

_FAILURES = re.compile(
    r"\b(AllReduce|AllGather|Gather|ReduceScatter|AlltoAll\w*|Broadcast|Barrier|Send|Recv)\w* failed|HCCL|hccl|mccl"
)


def is_communication_failure(error: Exception) -> bool:
    """Whether a collective lost a rank, rather than refused what it was given."""
    return _FAILURES.search(str(error)) is not None


def find_missing_ranks(
    store: Any, me: int, group: str, ranks: Sequence[int], report: str
) -> tuple[dict[int, str], tuple[int, ...]] | None:
    """See `Platform.find_missing_ranks`.

    Args:
        store: a ``TCPStore`` of all ranks, served by rank 0; None where they have none.
        me: this rank.
        group: name of the group.
        ranks: global ranks of the group.
        report: what this rank was doing.
    """
    if store is None:
        return None
    return exchange_reports(store, me, group, ranks, report, GRACE)
