"""Functions that run in threads of one process at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["failures_in_threads"]


def failures_in_threads(run: Callable[[Any], None], arguments: Iterable[Any], seconds: float) -> list[BaseException]:
    """Call ``run`` with each argument, each in a thread, and return all that was raised.

    Args:
        run: function of one argument.
        arguments: one for each thread.
        seconds: to wait for each thread.
    """
    failures: list[BaseException] = []

    def work(argument: Any) -> None:
        try:
            run(argument)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    return failures
