"""Active checks that compare the next steps of the ranks. All layers of the library can use them (see
`communication.rank_check`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["CHECKS", "Observer"]


class Observer(Protocol):
    """A running check, such as `check_ranks`, that compares the next steps of the ranks.

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
        """Wait until all ranks report the same step (see `communication.rank_check.Check.agree`)."""


#: The active checks. The last one is the innermost, and is the one to use.
CHECKS: list[Observer] = []
