"""Logging of the library, and the environment variable that turns it on.

All messages go to the logger ``"hyper_parallel"`` of Python's ``logging``. By default, it emits warnings only. The
program, or ``HYPER_PARALLEL_LOG``, can change that; the variable also adds a handler.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping

__all__ = ["LOG", "VARIABLE", "set_up", "words"]

#: Environment variable with comma-separated words: a level, and further words for observers.
VARIABLE = "HYPER_PARALLEL_LOG"
LOG = logging.getLogger("hyper_parallel")

_LEVELS = ("debug", "info", "warning", "error")
#: Words that switch on an observer from the start: it logs each collective, or shows each as a range of the profiler.
_WATCHED = ("collectives", "ranges")


def words(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the words of ``HYPER_PARALLEL_LOG``.

    Raises:
        ValueError: for unknown words, and for two levels.

    Example:
        >>> sorted(words({"HYPER_PARALLEL_LOG": "info, ranges"})), words({})
        (['info', 'ranges'], frozenset())
    """
    given = environ.get(VARIABLE, "")
    found = frozenset(word for part in given.split(",") if (word := part.strip().lower()))
    if not found <= {*_LEVELS, *_WATCHED} or len(found & {*_LEVELS}) > 1:
        raise ValueError(
            f"{VARIABLE}={given} is not a log level ({', '.join(_LEVELS)}), optionally followed by "
            f"{' and '.join(_WATCHED)}. Set it to info for a line about each plan, or to info,{','.join(_WATCHED)} "
            "for all messages"
        )
    return found


class _Handler(logging.StreamHandler):
    """Handler that writes to standard error, with the rank."""

    def __init__(self, rank: Callable[[], object]) -> None:
        super().__init__(sys.stderr)
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, which is easy to grep."""
        return f"[hyper_parallel {record.levelname.lower()}, rank {self._rank()}] {record.getMessage()}"


def set_up(rank: Callable[[], object]) -> None:
    """Configure the logger as ``HYPER_PARALLEL_LOG`` says. Does nothing without the variable, and from the second call
    on.

    Args:
        rank: returns the rank of this process.

    Raises:
        ValueError: see `words`.
    """
    asked = words()
    if not asked or any(isinstance(handler, _Handler) for handler in LOG.handlers):
        return
    level = next(iter(asked & {*_LEVELS}), "info")
    LOG.setLevel(level.upper())
    LOG.addHandler(_Handler(rank))
    LOG.propagate = False  # otherwise a handler of the program would print each message again
