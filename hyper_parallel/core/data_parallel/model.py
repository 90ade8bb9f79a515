"""State that the units of one model share: their order, and the units that are unsharded in backward.

A unit belongs to the model of the outermost unit whose forward runs. In forward the parameters of the next unit are
prefetched while the present unit computes. The order of the previous forward determines which unit is next. Backward
reaches units in the reverse of the order in which their forwards ended. So the outermost unit comes first, because its
forward ends last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.agreement import Event, agreements_below
from hyper_parallel.core.data_parallel.batches import summed_over
from hyper_parallel.core.dtensor.announcing import announce
from hyper_parallel.core.tensor_parallel.program.planned_parameters import UNIT

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.call import Call
    from hyper_parallel.core.data_parallel.gradients import Pending
    from hyper_parallel.core.data_parallel.unit_parameters import UnitParameters
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["RUNNING", "BackwardPass", "Model"]

#: The model whose forward is running on this thread, followed by its running units, the outermost unit first.
RUNNING: ContextVar[tuple[Any, ...]] = ContextVar("hyper_parallel_units", default=())


class Model:
    """The units below an outermost one.

    Args:
        outermost: the outermost unit.
        module: the module of the outermost unit.

    Attributes:
        outermost: a weak reference to the outermost unit.
        is_last_backward: whether gradients must be complete after the next backward.
        abandoned: number of times that pending work was discarded.
        accumulating: units that may have accumulated gradients, in the order in which they started to. The order is the
            same on all ranks.
        pending: pending reductions, each with a function that waits for it and delivers the gradients.
        one_loss: whether the batch of this step is distributed. If so, all ranks have one loss, and gradients are
            summed.
    """

    def __init__(self, outermost: UnitParameters, module: Any) -> None:
        self.platform, self.outermost = outermost.facts.mesh.platform, weakref.ref(outermost)
        self.is_last_backward = True
        self.abandoned = 0
        self.accumulating: dict[UnitParameters, None] = {}
        self.pending: Pending = []
        self._nests = self.one_loss = False
        self._beside: tuple[DeviceMesh, ...] | None = None
        #: Units in the order in which their forwards started, in the last step and in this one.
        self._order: Sequence[UnitParameters] = ()
        self._began: list[UnitParameters] = []
        #: Units that a backward may reach, in the order in which their forwards ended, in the last step and in this
        #: one.
        self._ends: Sequence[UnitParameters] = ()
        self._ended: list[UnitParameters] = []
        self._prefetched: list[UnitParameters] = []
        self._forwards = 0  # number of forwards since the last backward
        #: The recorded calls whose autograd graphs are alive.
        self._calls: list[tuple[UnitParameters, weakref.ref[Call]]] = []
        self._count = 0  # number of backward passes
        self.platform.before_backward(self._begins)
        #: Running backward passes by the platform's keys. A later pass runs nested in the earlier ones.
        self._passes: dict[Any, BackwardPass] = {}
        self._position = 0  # position in `_ends` that the backward passes have reached
        self._paths, self._agreements = agreements_below(module, self.platform)
        announce("fully_shard", module, outermost.facts.mesh)

    # ---------------------------------------------------------------------- forward
    @contextmanager
    def step(self, unit: UnitParameters, module: Any, again: bool) -> Iterator[None]:
        """Run the forward of a unit that no other unit contains, usually of the outermost one.

        Args:
            unit: the unit.
            module: the module of the unit that runs.
            again: whether backward recomputes the forward.
        """
        outermost = not again and self.outermost() is unit
        if outermost:
            self._begin(unit)
        beside = self.meshes_beside(module) if outermost and self.one_loss else ()
        complete = False
        try:
            with summed_over(unit.facts.mesh if self.one_loss else None, beside):
                yield
            complete = True
        finally:
            if outermost:
                self._end(complete)

    def _begin(self, outermost: UnitParameters) -> None:
        """Start the forward of the outermost unit."""
        if self._passes:
            self.abandon()
        self._began, self._ended = [], []
        self._forwards += 1
        for agreement in self._agreements:
            agreement.forward, agreement.paths = outermost.steps.forward, self._paths

    def abandon(self) -> None:
        """Discard the state of a failed backward, and the gradients that it has not delivered yet."""
        self.abandoned += 1
        for left in self._passes.values():
            left.abandon()
        self._passes.clear()
        self.drop_prefetched()
        pending, self.pending = self.pending, []
        for reduction, _ in pending:
            reduction.row()

    def _end(self, complete: bool) -> None:
        """End the forward of the outermost unit. With ``complete`` it has succeeded, otherwise it has failed."""
        for unit in self._began:
            self.forward_is_over(unit)
        self.drop_prefetched()
        if not complete:
            return
        outermost = self.outermost()
        if outermost is not None:
            self._has_come(outermost.steps.end)
        # Save the order only after ranks have agreed on it, so that all of them prefetch the same units.
        self._order, self._ends = tuple(self._began), tuple(self._ended)

    def forward_is_over(self, unit: UnitParameters, call: Call | None = None) -> None:
        """Free the unsharded parameters of ``call``, unless they shall stay. None stands for a call that several
        modules of the unit share and that is still running."""
        call, settings = unit.group.end() or call, unit.settings
        if call is None:
            return
        call.anchors = ()
        if settings.reshard_after_forward or (settings.reshard_after_forward is None and self.outermost() is not unit):
            call.freed = True
            unit.take_over()
            if settings.fewer is not None:
                unit.shrink(settings.fewer)
            unit.free()

    def _has_come(self, event: Event) -> None:
        """Make ranks agree on ``event``, if they have communicated in this forward."""
        for agreement in self._agreements:
            if agreement.forward is None:
                agreement.comes(event)

    def entered(self, unit: UnitParameters) -> None:
        """Prefetch the next unit while the forward of ``unit``, whose parameters are gathered already, computes."""
        at, order = len(self._began), self._order
        self._began.append(unit)
        if unit.settings.forward_prefetch:
            self.prefetch(unit.settings.forward_prefetch)
        elif at + 1 < len(order) and order[at] is unit and order[at + 1] is not unit:  # else a write may come
            self.prefetch(order[at + 1 : at + 2])

    def left(self, unit: UnitParameters, goes_on: bool) -> None:
        """Record that the forward of ``unit`` has ended, so that backward can find its call.

        Args:
            unit: the unit.
            goes_on: whether the unit has several modules, and others of them have run before in this call.
        """
        if goes_on and unit in self._ended:
            del self._ended[len(self._ended) - 1 - self._ended[::-1].index(unit)]
        self._ended.append(unit)

    def prefetch(self, units: Sequence[UnitParameters], again: bool = False) -> None:
        """Prefetch the parameters of units. ``again`` is set in backward."""
        for unit in units:
            if (unit.reopens or not again) and unit.start(again=again):
                self._prefetched.append(unit)

    def drop_prefetched(self) -> None:
        """Discard pending prefetches that were not used."""
        for unit in self._prefetched:
            unit.drop()
        self._prefetched = []

    def check_kind(self, what: str) -> None:
        """Raise ValueError if gradients of the other kind of batch (distributed or plain) are accumulated. The check of
        each unit is `Gradients.check_kind`."""
        for unit in self.accumulating:
            unit.gradients.check_kind(self.one_loss, what)

    def meshes_beside(self, module: Any) -> tuple[DeviceMesh, ...]:
        """Return the meshes on which tensor-parallel styles have placed parameters below the outermost ``module``."""
        if self._beside is None:
            found = [getattr(below, UNIT, None) for _, below in self.platform.named_modules(module)]
            inner = [layout for facts in found if facts is not None for layout in facts.inner]
            self._beside = tuple(dict.fromkeys(layout.mesh for layout in inner if layout is not None))
        return self._beside

    def recorded(self, unit: UnitParameters, call: Call) -> None:
        """Record a call of ``unit`` that has ended, and whose results may have a backward."""
        self._calls = [entry for entry in self._calls if entry[1]() is not None]
        self._calls.append((unit, weakref.ref(call)))

    # ---------------------------------------------------------------------- backward
    def _begins(self, runs: Callable[[Any], bool]) -> None:
        """Unshard units at the start of a backward pass that will bypass the results of their calls.

        An auxiliary loss that was set as an attribute has such a pass. No later hook of the pass could start the
        gather. Units are also unsharded for calls whose backward was recorded (``create_graph``).
        """
        self._nests = bool(self._passes)
        for unit, ref in self._calls:
            call = ref()
            if call is not None and (call.again or call.comes_around(runs)):
                running = self.this_pass()
                if running is not None:
                    running.hold(unit, call)

    @property
    def recomputes(self) -> bool:
        """Return whether a recomputed forward may have had its own backward, as in reentrant checkpointing."""
        return self.platform.accumulates_gradients and (self._nests or not self.platform.tells_beginning)

    @property
    def owes_gradients(self) -> bool:
        """Return whether the end of a backward reduces accumulated gradients, including those of units that backward
        did not reach."""
        return bool(self.accumulating) and self.platform.accumulates_gradients

    def reached(self, unit: UnitParameters, call: Call) -> None:
        """Handle the arrival of a cotangent for a result of ``call``: unshard ``unit``."""
        call.check_unchanged(unit.what)
        running = self.this_pass()
        if running is not None:
            running.reached(unit, call)

    def check_reached(self, unit: UnitParameters, call: Call) -> None:
        """Raise RuntimeError if backward has reached freed parameters without passing the results."""
        running = self.this_pass()
        if running is not None and call.reached != running.number:
            call.check_whole(unit.what)

    def one_less_awaited(self, unit: UnitParameters) -> None:
        """Record that the cotangents of one buffer, or of the input, have arrived. Close the unit after the last
        ones."""
        if unit.is_last_awaited() and (running := self.this_pass()) is not None:
            running.left(unit)

    def this_pass(self) -> BackwardPass | None:
        """Return the running backward pass; None on a platform that does not report when one ends."""
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
                # This pass ran nested in another one, as in reentrant checkpointing, and the outer pass is not over.
                # The outer pass needs the prefetched units, and may reach units with accumulated gradients.
                return
            self.drop_prefetched()
            outermost = self.outermost()
            if outermost is not None and outermost.settings.finalized_by_hand:
                return
            self.reduce_accumulated()
            if outermost is not None:
                self._has_come(outermost.steps.end_of_backward)
            if self.is_last_backward:
                self.finish()

    def reduce(
        self,
        unit: UnitParameters,
        b: int,
        parameters: Sequence[Any],
        indices: Sequence[int],
        cotangents: Sequence[Any],
        delay: bool = True,
    ) -> list[Any]:
        """Reduce or accumulate gradients of buffer ``b`` of a unit, with `Gradients.reduce`."""
        unit.steps.reduce()
        gradients, buffer, members = unit.gradients, unit.buffers[b], unit.members[b]
        if not (gradients.reduce_gradients and gradients.all_reduce_gradients):
            self.accumulating[unit] = None
        return gradients.reduce(buffer, members, parameters, indices, cotangents, self.one_loss, self.pending, delay)

    def close(self, unit: UnitParameters) -> None:
        """End the backward of a unit, and reduce gradients of recomputed forwards."""
        for b, trained, cotangents in unit.close(self.recomputes):
            self.reduce(unit, b, unit.places.parameters(), trained, cotangents)

    def reduce_accumulated(self) -> None:
        """Start to reduce accumulated gradients, including those of units that this step does not call."""
        for unit in list(self.accumulating) if self.owes_gradients else ():
            for b, (buffer, members) in enumerate(zip(unit.buffers, unit.members, strict=True)):
                found = unit.gradients.accumulated(buffer, members)
                if found:
                    self.reduce(unit, b, unit.places.parameters(), found, [None] * len(found))
            if not unit.gradients.has_accumulated:
                del self.accumulating[unit]

    def finish(self) -> None:
        """Wait for pending reductions, and add their results to the gradients of the parameters."""
        pending, self.pending = self.pending, []
        for _, deliver in pending:
            deliver()

    def ran_once(self, unit: UnitParameters) -> bool:
        """Return whether this is the backward of the only call of ``unit`` since the last backward."""
        return self._forwards <= 1 and self._order.count(unit) == 1

    def prefetch_before(self, unit: UnitParameters, is_open: Sequence[UnitParameters]) -> None:
        """Prefetch the unit that backward reaches after ``unit``, skipping those in ``is_open``."""
        if unit.settings.backward_prefetch:
            self.prefetch(unit.settings.backward_prefetch, True)
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
                self.prefetch((ends[at],), True)
                return


class BackwardPass:
    """One backward pass over a model, and the units that are unsharded in it.

    Attributes:
        number: number of the pass among the passes of the model, from 1.
    """

    def __init__(self, model: Model, number: int) -> None:
        self._model, self.number = model, number
        self._open: list[UnitParameters] = []
        self._held: list[UnitParameters] = []  # unsharded until the pass is over

    def reached(self, unit: UnitParameters, call: Call) -> None:
        """Unshard ``unit``, because the cotangents of its results have arrived.

        The unit stays open until the pass reaches a unit whose forward did not run inside the forward of ``unit``.
        """
        call.reached = self.number
        if unit in self._open or unit in self._held:
            return
        for other in reversed(self._open):
            if other not in call.within:
                self._open.remove(other)
                self._model.close(other)
        self._open.append(unit)
        # Free the sent rows of the previous unit, if they are reduced, to make memory for new gradients.
        if self._model.pending:
            self._model.pending[-1][0].let_go()
        unit.open(call, self._model.one_loss)
        self._model.prefetch_before(unit, self._open)

    def hold(self, unit: UnitParameters, call: Call) -> None:
        """Unshard ``unit`` until the pass is over."""
        call.check_unchanged(unit.what)
        call.reached = self.number
        if unit not in self._held:
            self._held.append(unit)
            unit.open(call, self._model.one_loss)

    def left(self, unit: UnitParameters) -> None:
        """End the backward of ``unit``, if the unit was called only once."""
        if self._open and self._open[-1] is unit and self._model.ran_once(unit):
            self._model.close(self._open.pop())

    def close(self) -> None:
        """End the pass, and the backward of all units that are still open."""
        for units in (self._open, self._held):
            while units:
                self._model.close(units.pop())

    def abandon(self) -> None:
        """Discard the state of a failed pass."""
        for units in (self._open, self._held):
            while units:
                units.pop().abandon()
