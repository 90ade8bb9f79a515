"""What the units of one model share: in which order they run, and which are whole in backward.

The model of a unit is that of the outermost unit whose forward runs. In forward, the parameters of the next unit are
gathered while this one computes; which is next is known from the forward before. In backward it is the other way round.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.call import Call
    from hyper_parallel.core.data_parallel.unit import Unit

__all__ = ["RUNNING", "BackwardPass", "Model"]

#: The units whose forward is running on this thread, the outermost first.
RUNNING: ContextVar[tuple[Unit, ...]] = ContextVar("hyper_parallel_units", default=())


class Model:
    """The units below an outermost one.

    Attributes:
        outermost: a weak reference to it.
        is_last_backward: whether gradients are to be complete after the next backward.
        delayed: reductions that nobody has waited for, each with a function that waits and delivers the gradients.
        one_loss: whether the batch of this step is distributed: then all ranks have one loss, and gradients are summed.
    """

    def __init__(self, outermost: Unit) -> None:
        self.platform, self.outermost = outermost.platform, weakref.ref(outermost)
        self.is_last_backward = True
        self.delayed: list[Any] = []
        self.one_loss = False
        #: In the order in which their forwards began: of the last step, and of this one.
        self._order: Sequence[Unit] = ()
        self._began: list[Unit] = []
        self._ahead: list[Unit] = []
        self._forwards = 0  # since the last backward
        #: Backward passes by what the platform calls them.
        self._passes: dict[Any, BackwardPass] = {}

    # ---------------------------------------------------------------------- forward
    def begin(self) -> None:
        """The forward of the outermost unit begins."""
        if self._passes:
            self.abandon()
        self._began = []
        self._forwards += 1

    def abandon(self) -> None:
        """Backward has failed: forget what it was doing, and the gradients that it has not delivered."""
        for left in self._passes.values():
            left.abandon()
        self._passes.clear()
        self.drop_ahead()
        delayed, self.delayed = self.delayed, []
        for reduction, _ in delayed:
            reduction.row()

    def end(self, complete: bool) -> None:
        """It has ended, or failed."""
        if complete:
            self._order = tuple(self._began)
        self.drop_ahead()

    def entered(self, unit: Unit) -> None:
        """The forward of ``unit`` has its parameters, and begins to compute."""
        at, order = len(self._began), self._order
        self._began.append(unit)
        if unit.forward_prefetch:
            self.gather_ahead(unit.forward_prefetch)
        elif at + 1 < len(order) and order[at] is unit:
            self.gather_ahead(order[at + 1 : at + 2])

    def gather_ahead(self, units: Sequence[Unit]) -> None:
        """Begin to gather the parameters of units that are needed next."""
        for unit in units:
            if unit.parameters.start():
                self._ahead.append(unit)

    def drop_ahead(self) -> None:
        """Forget what was gathered for units that were not needed."""
        for unit in self._ahead:
            unit.parameters.drop()
        self._ahead = []

    # ---------------------------------------------------------------------- backward
    def this_pass(self) -> BackwardPass | None:
        """The backward pass that is running; None on a platform that does not say when one ends."""
        key = self.platform.backward_pass()
        if key is None:
            return None
        found = self._passes.get(key)
        if found is None:
            found = self._passes[key] = BackwardPass(self, len(self._order))
            self.platform.after_backward(lambda: self._ended(key))
        return found

    def _ended(self, key: Any) -> None:
        ended = self._passes.pop(key, None)
        if not self._passes:  # not within another one
            self._forwards = 0
        if ended is None:
            return
        with self.platform.no_grad(), self.platform.no_dispatch():
            ended.close()
            self.drop_ahead()
            for unit in dict.fromkeys(self._order):
                unit.reduce_kept()
            if self.is_last_backward:
                self.finish()

    def finish(self) -> None:
        """Wait for the gradients, and add them to those that the parameters have."""
        delayed, self.delayed = self.delayed, []
        for _, deliver in delayed:
            deliver()

    def ran_once(self, unit: Unit) -> bool:
        """Whether this is the backward of the only call of ``unit`` since the last backward."""
        return self._forwards <= 1 and self._order.count(unit) == 1

    @property
    def order(self) -> Sequence[Unit]:
        """The units in the order in which their forwards began, in the last complete forward."""
        return self._order


class BackwardPass:
    """One backward pass over a model: the units that are whole in it."""

    def __init__(self, model: Model, position: int) -> None:
        self._model, self._position = model, position
        self._open: list[Unit] = []

    def reached(self, unit: Unit, call: Call) -> None:
        """The cotangents of what ``unit`` returned are there. What is computed from now on, until another unit is
        reached, is its backward, or that of a unit whose forward it was a part of."""
        if unit in self._open:
            return
        for other in reversed(self._open):
            if other not in call.within:
                self._open.remove(other)
                other.close()
        self._open.append(unit)
        unit.open(call)
        order, model = self._model.order, self._model
        if unit.backward_prefetch:
            model.gather_ahead(unit.backward_prefetch)
            return
        at = next((i for i in range(min(self._position, len(order)) - 1, -1, -1) if order[i] is unit), None)
        if at is not None:
            self._position = at
            before = next((u for u in reversed(order[:at]) if u not in self._open), None)
            if before is not None:
                model.gather_ahead((before,))

    def left(self, unit: Unit) -> None:
        """The backward of a call of ``unit`` is over."""
        if self._open and self._open[-1] is unit and self._model.ran_once(unit):
            self._open.pop().close()

    def close(self) -> None:
        """The pass is over."""
        while self._open:
            self._open.pop().close()

    def abandon(self) -> None:
        """The pass has failed: forget what it was doing."""
        while self._open:
            self._open.pop().abandon()
