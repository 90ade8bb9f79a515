"""Logging of the library, and the environment variable that turns it on.

All goes to one logger of Python's ``logging``, ``"hyper_parallel"``, which says warnings alone unless it is told
otherwise: by the program, or by ``HYPER_PARALLEL_LOG``, which gives it a handler of its own.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping

__all__ = ["LOG", "VARIABLE", "set_up", "words"]

#: Words with commas between: a level, and further words for observers.
VARIABLE = "HYPER_PARALLEL_LOG"
LOG = logging.getLogger("hyper_parallel")

_LEVELS = ("debug", "info", "warning", "error")
#: Words that switch on an observer from the beginning: each collective is logged, or is a range of the profiler.
_WATCHED = ("collectives", "ranges")


def words(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the words of ``HYPER_PARALLEL_LOG``.

    Raises:
        ValueError: for others than there are, and for two levels.

    Example:
        >>> sorted(words({"HYPER_PARALLEL_LOG": "info, ranges"})), words({})
        (['info', 'ranges'], frozenset())
    """
    given = environ.get(VARIABLE, "")
    found = frozenset(word for part in given.split(",") if (word := part.strip().lower()))
    if not found <= {*_LEVELS, *_WATCHED} or len(found & {*_LEVELS}) > 1:
        raise ValueError(
            f"{VARIABLE}={given} is no level ({', '.join(_LEVELS)}), after which {' and '.join(_WATCHED)} may stand: "
            f"set it to info for a line about each plan, to info,{','.join(_WATCHED)} for all there is"
        )
    return found


class _Handler(logging.StreamHandler):
    """To standard error, with the rank."""

    def __init__(self, rank: Callable[[], object]) -> None:
        super().__init__(sys.stderr)
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """One line, as grep likes it."""
        return f"[hyper_parallel {record.levelname.lower()}, rank {self._rank()}] {record.getMessage()}"


def set_up(rank: Callable[[], object]) -> None:
    """Set up the logger as ``HYPER_PARALLEL_LOG`` asks for. Does nothing without it, and when done already.

    Args:
        rank: gives that of this process.

    Raises:
        ValueError: see `words`.
    """
    asked = words()
    if not asked or any(isinstance(handler, _Handler) for handler in LOG.handlers):
        return
    level = next(iter(asked & {*_LEVELS}), "info")
    LOG.setLevel(level.upper())
    LOG.addHandler(_Handler(rank))
    LOG.propagate = False  # it would be said twice where the program has a handler, too
