"""State that the units of one model share: their order, and the units that are whole in backward.

The model of a unit is that of the outermost unit whose forward runs. In forward the parameters of the next unit are
prefetched while this one computes. The order of the forward before tells which unit is next. Backward comes to units in
the reverse order in which their forwards ended. So the outermost unit comes first, though its forward begins first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.agreement import Event, agreements_below
from hyper_parallel.core.dtensor.announcing import announce
from hyper_parallel.core.tensor_parallel.program.planned_parameters import UNIT

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.call import Call
    from hyper_parallel.core.data_parallel.gradients import Pending
    from hyper_parallel.core.data_parallel.unit import Unit
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["RUNNING", "BackwardPass", "Model"]

#: The units whose forward is running on this thread, the outermost first.
RUNNING: ContextVar[tuple[Unit, ...]] = ContextVar("hyper_parallel_units", default=())


class Model:
    """The units below an outermost one.

    Args:
        outermost: the outermost unit.
        module: the module that this unit belongs to.

    Attributes:
        outermost: a weak reference to it.
        is_last_backward: whether gradients are to be complete after the next backward.
        abandoned: how often pending work was discarded.
        accumulating: units that may have accumulated gradients, in the order in which they began to. All ranks have
            the same.
        pending: pending reductions, each with a function that waits and delivers the gradients.
        nests: whether a backward pass has begun within one that is running, as in reentrant checkpointing; known where
            the platform tells when backward begins.
        one_loss: whether the batch of this step is distributed: then all ranks have one loss, and gradients are summed.
    """

    def __init__(self, outermost: Unit, module: Any) -> None:
        self.platform, self.outermost = outermost.platform, weakref.ref(outermost)
        self.is_last_backward = True
        self.abandoned = 0
        self.accumulating: dict[Unit, None] = {}
        self.pending: Pending = []
        self.nests = self.one_loss = False
        self._beside: tuple[DeviceMesh, ...] | None = None
        #: Units in the order in which their forwards began, in the last step and in this one.
        self._order: Sequence[Unit] = ()
        self._began: list[Unit] = []
        #: Units to which a backward may come, in the order in which their forwards ended, for the same two steps.
        self._ends: Sequence[Unit] = ()
        self._ended: list[Unit] = []
        self._ahead: list[Unit] = []
        self._forwards = 0  # since the last backward
        #: The calls that were recorded, as long as their graphs live.
        self._calls: list[tuple[Unit, weakref.ref[Call]]] = []
        self._count = 0  # of backward passes
        if self.platform.frees_storage:
            self.platform.before_backward(self._begins)
        #: Running backward passes by the platform's keys. Those after the first run within those before.
        self._passes: dict[Any, BackwardPass] = {}
        self._position = 0  # in `_ends`, to which they have come
        self._paths, self._agreements = agreements_below(module, self.platform)
        announce("fully_shard", module, outermost.plan.mesh)

    # ---------------------------------------------------------------------- forward
    def begin(self) -> None:
        """Begin the forward of the outermost unit."""
        if self._passes:
            self.abandon()
        self._began, self._ended = [], []
        self._forwards += 1
        outermost = self.outermost()
        if outermost is not None:
            for agreement in self._agreements:
                agreement.forward, agreement.paths = outermost.steps.forward, self._paths

    def abandon(self) -> None:
        """Discard the state of a failed backward, and the gradients that it has not delivered."""
        self.abandoned += 1
        for left in self._passes.values():
            left.abandon()
        self._passes.clear()
        self.drop_ahead()
        pending, self.pending = self.pending, []
        for reduction, _ in pending:
            reduction.row()

    def end(self, complete: bool) -> None:
        """End the forward of the outermost unit, which is ``complete`` or has failed."""
        for unit in self._began:
            unit.forward_is_over()
        self.drop_ahead()
        if not complete:
            return
        outermost = self.outermost()
        if outermost is not None:
            self._has_come(outermost.steps.end)
        # The order is kept only after ranks have agreed, so that all of them prefetch the same units.
        self._order, self._ends = tuple(self._began), tuple(self._ended)

    def _has_come(self, event: Event) -> None:
        """Have ranks agree on ``event``, where they have communicated in this forward."""
        for agreement in self._agreements:
            if agreement.forward is None:
                agreement.comes(event)

    def entered(self, unit: Unit) -> None:
        """Prefetch the next unit: the forward of ``unit`` has its parameters, and begins to compute."""
        at, order = len(self._began), self._order
        self._began.append(unit)
        if unit.forward_prefetch:
            self.gather_ahead(unit.forward_prefetch)
        elif at + 1 < len(order) and order[at] is unit and order[at + 1] is not unit:  # which may write to its own
            self.gather_ahead(order[at + 1 : at + 2])

    def left(self, unit: Unit, goes_on: bool) -> None:
        """Remember that the forward of ``unit``, to which a backward may come, has computed its results.

        Args:
            unit: the unit.
            goes_on: whether this is one more module of a unit of several, of which others have run.
        """
        if goes_on and unit in self._ended:
            del self._ended[len(self._ended) - 1 - self._ended[::-1].index(unit)]
        self._ended.append(unit)

    def gather_ahead(self, units: Sequence[Unit], again: bool = False) -> None:
        """Prefetch the parameters of units, ``again`` in backward."""
        for unit in units:
            if (unit.whole_in_backward or not again) and unit.parameters.start(again=again):
                self._ahead.append(unit)

    def drop_ahead(self) -> None:
        """Discard pending prefetches of units that were not needed."""
        for unit in self._ahead:
            unit.parameters.drop()
        self._ahead = []

    def meshes_beside(self, module: Any) -> tuple[DeviceMesh, ...]:
        """Return the meshes on which tensor-parallel styles have placed parameters below the outermost ``module``."""
        if self._beside is None:
            plans = [getattr(below, UNIT, None) for _, below in self.platform.named_modules(module)]
            inner = [layout for plan in plans if plan is not None for layout in plan.inner]
            self._beside = tuple(dict.fromkeys(layout.mesh for layout in inner if layout is not None))
        return self._beside

    def recorded(self, unit: Unit, call: Call) -> None:
        """Remember a call of ``unit`` that has ended, and to which a backward may come."""
        self._calls = [entry for entry in self._calls if entry[1]() is not None]
        self._calls.append((unit, weakref.ref(call)))

    # ---------------------------------------------------------------------- backward
    def _begins(self, runs: Callable[[Any], bool]) -> None:
        """Make units whole, in a backward pass that begins, where it will bypass the results of a call.

        An auxiliary loss that was set as an attribute has such a pass. Nothing else tells when to gather for it. Units
        are made whole for calls whose backward was recorded (``create_graph``), too.
        """
        self.nests = bool(self._passes)
        for unit, ref in self._calls:
            call = ref()
            if call is not None and (call.again or call.comes_around(runs)):
                running = self.this_pass()
                if running is not None:
                    running.hold(unit, call)

    def this_pass(self) -> BackwardPass | None:
        """Return the running backward pass; None on a platform that does not tell when one ends."""
        key = self.platform.backward_pass()
        if key is None:
            return None
        found = self._passes.get(key)
        if found is None:
            self._count += 1
            if not self._passes:
                self._position = len(self._ends)
            found = self._passes[key] = BackwardPass(self, self._count)
            self.platform.after_backward(lambda: self._is_over(key))
        return found

    def _is_over(self, key: Any) -> None:
        ended = self._passes.pop(key, None)
        if not self._passes:
            self._forwards = 0
        if ended is None:
            return
        with self.platform.no_grad(), self.platform.no_dispatch():
            ended.close()
            if self._passes:
                # This pass ran within another one, as in reentrant checkpointing, and the other is not over. It needs
                # the prefetched units, and may come to units with accumulated gradients.
                return
            self.drop_ahead()
            outermost = self.outermost()
            if outermost is not None and outermost.finalized_by_hand:
                return
            self.reduce_accumulated()
            if outermost is not None:
                self._has_come(outermost.steps.end_of_backward)
            if self.is_last_backward:
                self.finish()

    def reduce_accumulated(self) -> None:
        """Begin to reduce accumulated gradients, also of units that this step does not call."""
        for unit in list(self.accumulating):
            unit.reduce_accumulated()
            if not unit.gradients.has_accumulated:
                del self.accumulating[unit]

    def finish(self) -> None:
        """Wait for pending reductions, and add their results to the gradients of the parameters."""
        pending, self.pending = self.pending, []
        for _, deliver in pending:
            deliver()

    def ran_once(self, unit: Unit) -> bool:
        """Return whether this is the backward of the only call of ``unit`` since the last backward."""
        return self._forwards <= 1 and self._order.count(unit) == 1

    def gather_before(self, unit: Unit, is_open: Sequence[Unit]) -> None:
        """Prefetch the unit to which backward comes after ``unit``, skipping those in ``is_open``."""
        if not self.platform.frees_storage:
            return
        if unit.backward_prefetch:
            self.gather_ahead(unit.backward_prefetch, True)
            return
        at, ends = min(self._position, len(self._ends)) - 1, self._ends
        while at >= 0 and ends[at] is not unit:
            at -= 1
        if at < 0:
            return
        self._position = at
        while at > 0:
            at -= 1
            if ends[at] not in is_open:
                self.gather_ahead((ends[at],), True)
                return


class BackwardPass:
    """One backward pass over a model, and the units that are whole in it.

    Attributes:
        number: its number among the passes of the model, from 1.
    """

    def __init__(self, model: Model, number: int) -> None:
        self._model, self.number = model, number
        self._open: list[Unit] = []
        self._held: list[Unit] = []  # whole until the pass is over

    def reached(self, unit: Unit, call: Call) -> None:
        """Make ``unit`` whole: the cotangents of its results are there.

        Until another unit is reached, its backward runs, or that of a unit whose forward contained its own.
        """
        call.reached = self.number
        if unit in self._open or unit in self._held:
            return
        for other in reversed(self._open):
            if other not in call.within:
                self._open.remove(other)
                other.close()
        self._open.append(unit)
        # Gradients of the unit before: free their rows, if they are reduced, for those that are computed now.
        if self._model.pending:
            self._model.pending[-1][0].let_go()
        unit.open(call)
        self._model.gather_before(unit, self._open)

    def hold(self, unit: Unit, call: Call) -> None:
        """Make ``unit`` whole until the pass is over."""
        call.check_unchanged(unit.what)
        call.reached = self.number
        if unit not in self._held:
            self._held.append(unit)
            unit.open(call)

    def left(self, unit: Unit) -> None:
        """End the backward of ``unit``, if this was that of its only call."""
        if self._open and self._open[-1] is unit and self._model.ran_once(unit):
            self._open.pop().close()

    def close(self) -> None:
        """End the pass, and the backward of all units in it."""
        for units in (self._open, self._held):
            while units:
                units.pop().close()

    def abandon(self) -> None:
        """Discard the state of a failed pass."""
        for units in (self._open, self._held):
            while units:
                units.pop().abandon()
