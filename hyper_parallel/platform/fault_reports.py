"""Reports that ranks exchange through their common store when a collective fails. For any backend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hyper_parallel.platform.timeout import slowness

__all__ = ["exchange_reports", "exchange_texts", "leave_report"]

#: Prefix of the keys of reports from any group. The reports of one group have a longer prefix.
_ANYWHERE = "hyper_parallel/fault/"
#: Seconds after which a rank that waits for texts leaves a report.
_SOON = 1.0


def leave_report(store: Any, rank: int, report: str, place: str = _ANYWHERE) -> None:
    """Write a report to the store, for `exchange_reports` on the other ranks."""
    store.set(f"{place}{rank}", report)
    store.add(f"{place}{rank}/count", 1)


def exchange_reports(
    store: Any,
    me: int,
    group: str,
    ranks: Sequence[int],
    report: str,
    seconds: float,
    served_by_rank_0: bool = True,
) -> tuple[dict[int, str], tuple[int, ...]] | None:
    """Exchange reports after a failed collective, and return the missing ranks, as `Platform.find_missing_ranks` does.

    Args:
        store: object with the methods ``set``, ``get`` and ``add`` of a ``TCPStore`` of torch or MindSpore.
        me: this rank.
        group: name of the group of the failed collective.
        ranks: global ranks of the group.
        report: what this rank was doing.
        seconds: how long to wait for the other reports on an idle machine.
        served_by_rank_0: whether the store ends with the process of rank 0.
    """
    here = f"{_ANYWHERE}{group}/"
    reports: dict[int, str] = {me: report}
    try:
        leave_report(store, me, report, here)
        leave_report(store, me, report)
        deadline, over = time.monotonic() + seconds * slowness(), False
        while (waiting := _without_report(ranks, reports)) and not over:
            over = time.monotonic() > deadline  # before the last read: reports may arrive while this rank sleeps
            _collect(store, here, waiting, reports)
            time.sleep(0.05)
        _collect(store, _ANYWHERE, waiting, reports)
    except RuntimeError:
        # The store does not answer. Rank 0 may have ended after leaving its report.
        if not served_by_rank_0 or 0 not in ranks:
            return None
        return reports, _without_report(ranks, reports) if 0 in reports else (0,)
    return reports, waiting


def exchange_texts(
    store: Any, me: int, ranks: Sequence[int], place: str, text: str, seconds: float
) -> dict[int, str] | None:
    """Exchange texts through the store, as `Platform.exchange_texts` does. The arguments are as in
    `exchange_reports`."""
    here, texts = f"hyper_parallel/texts/{place}/", {me: text}
    begin, pause, told = time.monotonic(), 0.001, False
    try:
        leave_report(store, me, text, here)
        while waiting := _without_report(ranks, texts):
            waited = time.monotonic() - begin
            if waited > seconds:
                break
            if waited > _SOON and not told:  # the others may wait in a collective, and must learn why it fails
                told = True
                leave_report(store, me, text)
            _collect(store, here, waiting, texts)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if told and not waiting:
            store.add(f"{_ANYWHERE}{me}/count", -1)
    except RuntimeError:  # the store has ended, and with it a rank
        return texts
    return texts


def _without_report(ranks: Sequence[int], reports: dict[int, str]) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank not in reports)


def _collect(store: Any, place: str, ranks: Sequence[int], reports: dict[int, str]) -> None:
    """Add the available reports to ``reports``. ``get`` of a missing report blocks until the store's time-out, so read
    the count first."""
    for rank in ranks:
        if store.add(f"{place}{rank}/count", 0) > 0:
            text = store.get(f"{place}{rank}")
            reports[rank] = text.decode() if isinstance(text, bytes) else str(text)
