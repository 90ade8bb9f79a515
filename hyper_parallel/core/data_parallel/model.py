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
from hyper_parallel.core.data_parallel.call import BackwardPass
from hyper_parallel.core.dtensor.announcing import announce
from hyper_parallel.core.tensor_parallel.program.planned_parameters import UNIT

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.call import Call
    from hyper_parallel.core.data_parallel.gradients import Pending
    from hyper_parallel.core.data_parallel.unit_parameters import UnitParameters
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["RUNNING", "Model"]

#: The model whose forward is running on this thread, followed by its running units, the outermost unit first.
RUNNING: ContextVar[tuple[Any, ...]] = ContextVar("hyper_parallel_units", default=())


class Model:
    """State that an outermost unit shares with the units below it.

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
        one_loss: whether the batch of the running forward is distributed. If so, all ranks have one loss, and gradients
            are summed. Backward uses `Call.one_loss`.
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
        self._failed = False  # whether collectives of a failed backward may be pending
        self._kept = 0  # number of pending reductions of earlier backwards
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
        self.settle()
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
        if not self._passes:
            self.drop_prefetched()  # a unit that was called alone before may have left a prefetch
        self._began, self._ended = [], []
        self._forwards += 1
        for agreement in self._agreements:
            agreement.forward, agreement.paths = outermost.steps.forward, self._paths

    def take_over(self, before: Model) -> None:
        """Take over the state of a model whose outermost unit is now a unit of this model. The state consists of
        accumulated gradients, pending reductions and recorded calls."""
        before.settle()
        self.accumulating.update(before.accumulating)
        self.pending += before.pending
        self._calls += before._calls

    def abandon(self) -> None:
        """Discard pending collectives, and all gradients that were not delivered yet."""
        self.abandoned += 1
        self._failed, self._kept = True, 0
        self.settle()

    def settle(self) -> None:
        """Discard pending collectives of a failed backward, at the next use of the model.

        Other ranks may have failed too. The failed backward itself does not wait for them: the program shall get its
        error before the time-out.
        """
        if not self._failed:
            return
        self._failed = False
        left, self.pending = self.pending[self._kept :], self.pending[: self._kept]
        try:
            self.drop_prefetched()
        finally:
            for reduction, _ in left:
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
        """Free the unsharded parameters of ``call``, unless the settings keep them. If ``call`` is None, use the call
        that the modules of the unit share."""
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
        """Make ranks agree on ``event`` if the running forward has communicated already."""
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
            if unit.reopens and unit.start(again=True) if again else unit.start_early():
                self._prefetched.append(unit)

    def drop_prefetched(self) -> None:
        """Discard pending prefetches that were not used."""
        prefetched, self._prefetched = self._prefetched, []
        for unit in prefetched:
            unit.drop()

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
    def _begins(self, runs: Callable[[Any], bool], leads: Callable[[Any], bool]) -> None:
        """Unshard units at the start of a backward pass that will bypass the results of their calls.

        An auxiliary loss that was set as an attribute has such a pass. No later hook of the pass could start the
        gather. If the pass goes through recorded backwards (``create_graph``), all units of these are unsharded.
        """
        self._nests = bool(self._passes)
        calls = [(unit, call) for unit, ref in self._calls if (call := ref()) is not None]
        again = any(call.again and call.is_in(leads) for _, call in calls)
        for unit, call in calls:
            if call.comes_around(runs, again):
                running = self.this_pass()
                if running is not None:
                    running.hold(unit, call)

    @property
    def recomputes(self) -> bool:
        """Return whether a recomputed forward may have had a separate backward, as in reentrant checkpointing."""
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

    def reached_one_loss(self, otherwise: bool) -> bool:
        """Return whether the batch of the call that backward reached last is distributed; ``otherwise`` if backward
        has reached no call."""
        running = self.this_pass()
        return otherwise if running is None or running.one_loss is None else running.one_loss

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
                self.settle()
                self._kept, self._position = len(self.pending), len(self._ends)
            found = self._passes[key] = BackwardPass(self, self._count)
            self.platform.after_backward(lambda: self._is_over(key), lambda: self._fails(key))
        return found

    def _fails(self, key: Any) -> None:
        """Close the units of a failed backward pass immediately, so that modules find shards again."""
        failed = self._passes.pop(key, None)
        if not self._passes:
            self._forwards, self._failed = 0, True
        if failed is not None:
            failed.abandon()

    def _is_over(self, key: Any) -> None:
        with self.platform.no_grad(), self.platform.no_dispatch():
            self._passes[key].close()
            del self._passes[key]
            if self._passes:
                # This pass ran nested in another one, as in reentrant checkpointing, and the outer pass is not over.
                # The outer pass needs the prefetched units, and may reach units with accumulated gradients.
                return
            self._forwards = 0
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
        one_loss: bool,
        delay: bool = True,
    ) -> list[Any]:
        """Reduce or accumulate gradients of buffer ``b`` of a unit, with `Gradients.reduce`."""
        gradients, buffer, members = unit.gradients, unit.buffers[b], unit.members[b]
        gradients.check_kind(one_loss, unit.what)
        unit.steps.reduce()
        if not (gradients.reduce_gradients and gradients.all_reduce_gradients):
            self.accumulating[unit] = None
        return gradients.reduce(buffer, members, parameters, indices, cotangents, one_loss, self.pending, delay)

    def close(self, unit: UnitParameters, one_loss: bool) -> None:
        """End the backward of a unit, and reduce gradients of recomputed forwards."""
        for b, trained, cotangents in unit.close(self.recomputes):
            self.reduce(unit, b, unit.places.parameters(), trained, cotangents, one_loss)

    def reduce_accumulated(self) -> None:
        """Start to reduce accumulated gradients, including those of units that this step does not call."""
        self.settle()
        for unit in list(self.accumulating) if self.owes_gradients else ():
            for b, (buffer, members) in enumerate(zip(unit.buffers, unit.members, strict=True)):
                found = unit.gradients.accumulated(buffer, members)
                if found:
                    nothing = [None] * len(found)
                    self.reduce(unit, b, unit.places.parameters(), found, nothing, unit.gradients.one_loss)
            if not unit.gradients.has_accumulated:
                del self.accumulating[unit]

    def finish(self) -> None:
        """Wait for pending reductions, and add their results to the gradients of the parameters."""
        pending, self.pending = self.pending, []
        for _, deliver in pending:
            deliver()

    def ran_once(self, unit: UnitParameters) -> bool:
        """Return whether the running backward belongs to the only call of ``unit`` since the last backward."""
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
