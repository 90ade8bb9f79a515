"""First steps of a process in several threads: each is done once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from hyper_parallel.core.dtensor import tensor
from hyper_parallel.core.mesh.first_use import join_world
from tests.support.in_threads import failures_in_threads


class Slow:
    """A platform that takes a moment for work that it does once."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.start = threading.Barrier(4)

    def world(self) -> Any:
        return self if "joined" in self.done else None

    def init_process_group(self) -> None:
        time.sleep(0.1)
        self.done.append("joined")

    def make_dtensor_class(self, mixin: type, core: Any) -> type:
        time.sleep(0.1)
        self.done.append("made")
        return type("Made", (), {})


def test_each_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "_BOUND", {})
    monkeypatch.setattr(tensor, "DTENSOR_CLASSES", set())
    platform: Any = Slow()
    classes = set()

    def use(_: int) -> None:
        platform.start.wait(20)
        join_world(platform)
        platform.start.wait(20)
        classes.add(tensor.dtensor_class(platform))

    assert not failures_in_threads(use, range(4), 20)
    assert platform.done == ["joined", "made"] and classes == tensor.DTENSOR_CLASSES and len(classes) == 1
