"""Calls in processes of their own, which may end by a signal, or hang."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

FORK = multiprocessing.get_context("fork")


def ended(call: Callable[[], Any]) -> tuple[str, str]:
    """Call something in a process of its own; returns the kind of the error, and its message."""
    told = FORK.SimpleQueue()

    def run() -> None:
        try:
            told.put(("nothing", repr(call())))
        except BaseException as error:
            told.put((type(error).__name__, str(error)))
        os._exit(0)

    process = FORK.Process(target=run)
    process.start()
    process.join(30)
    if process.is_alive():
        process.kill()
        raise AssertionError("it hangs")
    assert process.exitcode == 0, f"ended by {process.exitcode}"
    kind, text = told.get()
    return kind, text
