"""Processes that were forked from a rank: their messages are refused, unless they have joined a group of their own."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.core.communication import recorder
from hyper_parallel.platform import forks


class Rank:
    """A platform, as far as it is asked."""

    def __init__(self) -> None:
        self.own: Any = object()

    def world(self) -> Any:
        return self.own

    def rank(self) -> int:
        return 3


def test_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    platform: Any = Rank()
    monkeypatch.setattr(forks, "_INHERITED", [])
    monkeypatch.setattr(forks, "worlds", lambda: [platform.own])
    monkeypatch.setattr(recorder, "LISTENERS", [])
    forks.check_not_forked(platform, "all_reduce")
    forks._remember()
    recorder._listen_in_fork()
    event: Any = type("Event", (), {"mesh": type("Mesh", (), {"platform": platform}), "kind": "all_reduce"})
    with pytest.raises(RuntimeError, match="all_reduce: this process was forked from rank 3"):
        recorder.LISTENERS[0](event)
    platform.own = object()
    assert recorder.LISTENERS[0](event) is None
