"""Finding out who is missing when a collective of MindSpore fails."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["GRACE", "is_communication_failure", "roll_call"]

#: Seconds that a rank whose collective has failed waits for the reports of the others. On CPU all have waited for
#: half a minute by then, each since it came to the collective.
GRACE = 5.0

_FAILURES = re.compile(
    r"\b(AllReduce|AllGather|Gather|ReduceScatter|AlltoAll\w*|Broadcast|Barrier|Send|Recv)\w* failed|HCCL|hccl|mccl"
)


def is_communication_failure(error: Exception) -> bool:
    """Whether a collective lost a rank, rather than refused what it was given."""
    return _FAILURES.search(str(error)) is not None


def roll_call(store: Any, me: int, ranks: Sequence[int], report: str) -> tuple[dict[int, str], tuple[int, ...]] | None:
    """See `Platform.roll_call`.

    Args:
        store: the ``TCPStore`` at which the ranks have met, served by rank 0; None under msrun, which has none.
        me: this rank.
        ranks: global ranks of the group.
        report: what this rank was doing.
    """
    if store is None:
        return None
    reports: dict[int, str] = {me: report}
    waiting = [rank for rank in ranks if rank != me]
    deadline = time.monotonic() + GRACE
    try:
        store.set(f"hyper_parallel/fault/{me}", report)
        store.add(f"hyper_parallel/faults/{me}", 1)
        while waiting and time.monotonic() < deadline:
            # `get` of what is not there waits for the store's time-out; a counter that is not there is 0.
            for rank in [rank for rank in waiting if store.add(f"hyper_parallel/faults/{rank}", 0) > 0]:
                text = store.get(f"hyper_parallel/fault/{rank}")
                reports[rank] = text.decode() if isinstance(text, bytes) else str(text)
                waiting.remove(rank)
            time.sleep(0.05)
    except RuntimeError:
        # The store does not answer: rank 0, which serves it, has ended, maybe only after it had left its report.
        if 0 not in ranks:
            return None
        return (reports, tuple(waiting)) if 0 in reports else (reports, (0,))
    return reports, tuple(waiting)
