"""Checks that learn of the next steps of the ranks, on whichever floor: see `communication.rank_check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["CHECKS", "Observer"]


class Observer(Protocol):
    """A check that is on.

    Attributes:
        at_end: comparisons to repeat when the check ends, by their subject.
    """

    at_end: dict[Any, Callable[[], None]]

    def agree(
        self,
        step: str,
        facts: Mapping[str, str] | None = None,
        row: Sequence[int] = (),
        row_facts: Mapping[str, str] | None = None,
        remedy: str = "",
    ) -> None:
        """Return when all ranks are at the same step; see `communication.rank_check.Check.agree`."""


#: The checks that are on, the innermost last; it is the one that counts.
CHECKS: list[Observer] = []
