"""Finding out who is missing when a collective of MindSpore fails."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["GRACE", "is_communication_failure", "find_missing_ranks"]

#: Seconds that a rank whose collective has failed waits for the reports of the others. On CPU all have waited for
#: half a minute by then, each since it came to the collective.
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
        store: the ``TCPStore`` at which the ranks have met, served by rank 0; None under msrun, which has none.
        me: this rank.
        group: name of the group.
        ranks: global ranks of the group.
        report: what this rank was doing.
    """
    if store is None:
        return None
    here, anywhere = f"hyper_parallel/fault/{group}/", "hyper_parallel/fault/"
    reports: dict[int, str] = {me: report}
    waiting = [rank for rank in ranks if rank != me]
    deadline = time.monotonic() + GRACE
    try:
        for place in (here, anywhere):
            store.set(f"{place}{me}", report)
            store.add(f"{place}{me}/count", 1)
        while waiting and time.monotonic() < deadline:
            _collect(store, here, waiting, reports)
            waiting = [rank for rank in waiting if rank not in reports]
            time.sleep(0.05)
        _collect(store, anywhere, waiting, reports)
    except RuntimeError:
        # The store does not answer: rank 0, which serves it, has ended, maybe only after it had left its report.
        if 0 not in ranks:
            return None
        return reports, tuple(rank for rank in ranks if rank not in reports) if 0 in reports else (0,)
    return reports, tuple(waiting)


def _collect(store: Any, place: str, ranks: Sequence[int], reports: dict[int, str]) -> None:
    """Add the reports that are there. `get` of what is not there waits for the store's time-out, so count first."""
    for rank in ranks:
        if store.add(f"{place}{rank}/count", 0) > 0:
            text = store.get(f"{place}{rank}")
            reports[rank] = text.decode() if isinstance(text, bytes) else str(text)
