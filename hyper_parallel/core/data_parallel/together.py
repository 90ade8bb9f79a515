"""Several modules that are one unit of `fully_shard`: one gather and one reduction for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.call import Call

__all__ = ["Together"]


class Together:
    """Modules of one unit that have run since its parameters were gathered.

    Args:
        count: number of modules. With one, each call is for itself.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._ran: set[int] = set()
        self._call: Call | None = None
        self._wholes: Sequence[Any] = ()
        self._asked = False

    @property
    def is_over(self) -> bool:
        """Return whether no module of the running call is still to run."""
        return self._call is None or len(self._ran) == self._count

    def call_of(self, module: Any, asked: bool, again: bool) -> tuple[Call, Sequence[Any]] | None:
        """Return the running call that ``module`` joins, and its whole parameters; None where a new call begins.

        Args:
            module: a module of the unit, which begins to run.
            asked: whether gradients of parameters are asked for.
            again: whether the module is computed again in backward.
        """
        if self._call is None or again or asked is not self._asked or id(module) in self._ran:
            return None
        self._ran.add(id(module))
        return self._call, self._wholes

    def begin(self, module: Any, call: Call, wholes: Sequence[Any], asked: bool, again: bool) -> None:
        """Begin a call, in which ``module`` is the first to run."""
        if self._count > 1 and not again:
            self._ran, self._call, self._wholes, self._asked = {id(module)}, call, wholes, asked

    def end(self) -> Call | None:
        """End the call, and return it where the unit has several modules."""
        call, self._call, self._wholes = self._call, None, ()
        self._ran = set()
        return call
