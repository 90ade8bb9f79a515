"""One unit of `fully_shard`: its parameters are whole while its module runs, in forward and in backward.

A call gathers the parameters, and lets the modules find whole ones where they look for theirs (`UnitParameters`).
Whole parameters are results of one differentiable function of the shards, whose backward reduces the gradients
(`Gradients`). Results of the module pass an identity, which makes the parameters whole again at the first cotangent.
The parameters are freed when their own cotangents are there, before gradients are reduced. With frozen ones, the
cotangent of the input has to be there too, where the platform tells.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, current_module
from hyper_parallel.core.data_parallel.agreement import Steps
from hyper_parallel.core.data_parallel.batches import is_distributed, mixed_batch, whole_for_all
from hyper_parallel.core.data_parallel.call import Call, ModuleGroup, chosen
from hyper_parallel.core.data_parallel.gradients import Gradients, add_gradients, with_summed
from hyper_parallel.core.data_parallel.hooks import Guard, Results, cast, refuse_second_order, watched
from hyper_parallel.core.data_parallel.model import RUNNING, Model
from hyper_parallel.core.data_parallel.places import counts_of
from hyper_parallel.core.data_parallel.plan import Plan
from hyper_parallel.core.data_parallel.unit_parameters import UnitParameters
from hyper_parallel.core.rules.random import BESIDE
from hyper_parallel.core.tensor_parallel.program.distributed_batches import SUMMED_OVER
from hyper_parallel.core.trees import tensors_in
from hyper_parallel.platform.contract import NOTHING_FASTER
from hyper_parallel.platform.contract.autograd import named

__all__ = ["Unit"]


class Unit:
    """The unit of one module object, or of several.

    Args:
        plan: facts that modules share with their copies.
        modules: the modules. They are not kept alive.

    Attributes:
        plan: facts that a module shares with its copies.
        what: the unit, for messages.
        fewer: the mesh, in its last dimension, of the ranks over which parameters are sharded after forward, or None.
        reshard_after_forward: None leaves it to the model: the outermost unit stays whole until its backward.
        reshard_after_backward: whether parameters are sharded again after backward.
        gradients: reduction of its gradients.
        parameters: its parameters, sharded or whole.
        steps: its steps, which ranks compare.
        model: state that it shares with the other units below the outermost one; None before the first forward.
        forward_prefetch, backward_prefetch: units to prefetch in place of the next one.
        post_optim_event: event that the next forward waits for, or None.
        whole_in_backward: whether backward needs the whole parameters.
        finalized_by_hand: whether backward ends when the program says so, where this is the outermost unit.
    """

    def __init__(self, plan: Plan, modules: Sequence[Any]) -> None:
        self.plan, self.platform, self.fewer = plan, plan.mesh.platform, plan.fewer
        self.what = f"{' and '.join(type(module).__name__ for module in modules)} under fully_shard"
        self.reshard_after_forward = plan.reshard_after_forward
        self.reshard_after_backward = self.whole_in_backward = True
        self.finalized_by_hand = False
        self.gradients = Gradients(plan.mesh, plan.stored if plan.moves_shards else None)
        self.forward_prefetch: Sequence[Unit] = ()
        self.backward_prefetch: Sequence[Unit] = ()
        self.model: Model | None = None
        self.steps = Steps(plan.mesh, modules)
        self.parameters = UnitParameters(plan, modules, self.what, self.steps)
        self._group = ModuleGroup(len(modules))
        self.post_optim_event: Any = None
        self._opened = 0  # by how many backward passes, one within the other
        self._leaves: list[Any] = []
        #: The buffers that `_leaves` were made for, and for each buffer the indices of trained parameters.
        self._leaves_of: tuple[Any, list[list[int]]] = (None, [])
        self._trained_leaves: set[int] = set()
        self._unsummed: list[Any] = []
        self._awaited = -1  # how many cotangents are missing until the backward of this unit is over; negative: unknown
        self._views = self.platform.joint_function(
            named("FullyShardParameters", self._views_forward), self._views_backward
        )
        self._results = Results(plan.mesh, self.what, "fully_shard", self._reached, self.parameters.frees)
        self._guard = Guard(self.platform, self._check_reached)

    # ---------------------------------------------------------------------- forward
    def run(self, module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run ``forward(module, *args, **kwargs)`` with whole parameters in their places."""
        platform, running = self.platform, RUNNING.get()
        again = platform.in_backward()
        if running:
            self.model = running[0].model
            if self.finalized_by_hand:
                raise RuntimeError(
                    f"{self.what}: set_manual_backward_finalization is for the outermost module alone: call it there"
                )
        elif self.model is None:
            self.model = Model(self, module)
        model: Any = self.model
        policy = self.plan.mp_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast((args, kwargs), policy.param_dtype, platform)
        plain = platform.Tensor
        inputs = [x for x in args if type(x) is plain]
        if kwargs or len(inputs) < len(args):
            inputs = tensors_in((args, kwargs), platform)
        self._check_batch(inputs, not running and not again)
        self.parameters.places.check_recompute()
        outermost = not running and not again and model.outermost() is self
        if LISTENERS:
            self.parameters.scope = current_module()
        if outermost:
            model.begin()
        if self.post_optim_event is not None:
            event, self.post_optim_event = self.post_optim_event, None
            event.wait()
        token = RUNNING.set((*running, self))
        summed = None if running else SUMMED_OVER.set(self.plan.mesh if model.one_loss else None)
        beside = BESIDE.set(model.meshes_beside(module)) if outermost and model.one_loss else None
        complete = False
        try:
            output = self._run(module, forward, args, kwargs, inputs, running, again)
            complete = True
            return output if policy.output_dtype is None else cast(output, policy.output_dtype, platform)
        finally:
            RUNNING.reset(token)
            if summed is not None:
                SUMMED_OVER.reset(summed)
            if beside is not None:
                BESIDE.reset(beside)
            if outermost:
                model.end(complete)

    def _check_batch(self, inputs: Sequence[Any], decides: bool) -> None:
        """Find out in the outermost unit whether the batch is distributed, and check that other units agree."""
        model: Any = self.model
        distributed = is_distributed(inputs, self.plan.mesh, self.what)
        if decides:
            model.one_loss = bool(distributed)
        elif self.plan.slots and distributed is not None and distributed is not model.one_loss:
            raise mixed_batch(self.what, distributed)

    def _run(
        self,
        module: Any,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        inputs: Sequence[Any],
        running: tuple,
        again: bool,
    ) -> Any:
        platform, model = self.platform, self.model
        assert model is not None
        if not self.plan.slots:
            if not again:
                model.entered(self)
            output = forward(module, *args, **kwargs)
            if running or again or not model.accumulating or not platform.accumulates_gradients:
                return output
            # Accumulated gradients wait for the next backward, also for one that comes to no parameters.
            return self._results.opening(output, Call([], [], True, running), model.one_loss)
        with platform.no_dispatch():
            parameters = self.parameters.shards()
            trained, one = self.parameters.trained(parameters)
            asked = one is not None and platform.requires_grad(parameters[one])
            recorded = asked or any(map(platform.requires_grad, inputs))
            call = Call(parameters, trained, recorded, running)
            first, shared = True, self._group.call_of(module, asked, again)
            if shared is not None:
                first, (call, wholes) = False, shared
            else:
                if not again:
                    self.forward_is_over()
                    self.parameters.drop_parts()
                self.parameters.check_stale(parameters)
                values = self.parameters.gather(recorded and platform.frees_storage, parameters)
                if not platform.frees_storage:
                    self.parameters.take_over()
                wholes = self._wholes(call, values, asked)
                self._group.begin(module, call, wholes, asked, again)
            versions = counts_of(wholes)
        try:
            self.parameters.show(wholes, parameters)
            if platform.frees_storage and not platform.tells_beginning and recorded:
                args, kwargs = self._guard.arguments(args, kwargs, inputs, call)
            elif asked and first and not again and platform.frees_storage and not self._runs_in_order(call):
                args, kwargs = watched(args, kwargs, inputs, platform, self._one_less_awaited)
            try:
                if first and not again:
                    model.entered(self)
                output = forward(module, *args, **kwargs)
                self.parameters.take_writes(call, wholes, versions)
            finally:
                self.parameters.hide()
            del wholes
            if not again and (recorded or any(trained)):
                model.left(self, not first)
            return self._results.opening(output, call, model.one_loss) if recorded else output
        finally:
            if first and recorded:
                model.recorded(self, call)
            if self._group.is_over or not running:
                self.forward_is_over(call)

    def forward_is_over(self, call: Call | None = None) -> None:
        """Free the whole parameters of ``call``, by default of the running one of several modules, unless they stay."""
        call, model = self._group.end() or call, self.model
        if call is None or model is None:
            return
        call.anchors = ()
        if self.reshard_after_forward or (self.reshard_after_forward is None and model.outermost() is not self):
            call.freed = True
            self.parameters.take_over()
            if self.fewer is not None:
                self.parameters.shrink(self.fewer)
            self.parameters.free()

    def _runs_in_order(self, call: Call) -> bool:
        """Return whether all readers of the whole parameters have run in backward when their cotangents are there. The
        last recorded node runs first. Another device has its own order, but its reads give trained ones cotangents."""
        all_trained = sum(map(len, call.trained)) == len(call.parameters)
        return all_trained and (self.platform.fast or NOTHING_FASTER).backward_in_order

    def _wholes(self, call: Call, values: Sequence[Any], asked: bool) -> list[Any]:
        """Return the whole parameters in the order of their indices, differentiable where that is ``asked``."""
        found: list[Any] = [None] * len(call.parameters)
        for b, (buffer, members) in enumerate(zip(self.parameters.buffers, self.parameters.members, strict=True)):
            trained = call.trained[b] if asked else []
            if len(trained) < len(members):
                for i, x in zip(members, buffer.views(values[b]), strict=True):
                    found[i] = x
            if trained:
                views = buffer.lasting_views(values[b])
                if len(trained) < len(members):
                    views = [x for i, x in zip(members, views, strict=True) if i in trained]
                if len(trained) == len(found):  # the only buffer
                    found = list(self._views((call, b, views), *call.parameters))
                    break
                new = self._views((call, b, views), *[call.parameters[i] for i in trained])
                for i, x in zip(trained, new, strict=True):
                    found[i] = x
        if asked and self.plan.mesh.size() > 1:
            call.anchors = [found[indices[0]] for indices in call.trained if indices]
        found = [self.platform.as_parameter(x, in_buffer=True) for x in found]
        return self._as_read(found, call.unsummed)

    def _as_read(self, xs: list[Any], unsummed: list[Any]) -> list[Any]:
        """Return whole tensors as modules read them: as DTensors where a tensor-parallel style has made them such.

        Args:
            xs: new plain tensors, one for each parameter; the list is changed.
            unsummed: takes cotangents that `coalesce_gradients` leaves to be summed over tensor-parallel ranks.
        """
        found = self.parameters.as_planned(xs, unsummed)
        if self.model is not None and self.model.one_loss:
            for i, inner in enumerate(self.plan.inner):
                if inner is None:
                    found[i] = whole_for_all(found[i], self.plan.mesh)
        return found

    def _views_forward(self, ctx: Any, static: Any, *shards: Any) -> Sequence[Any]:
        ctx.call, ctx.buffer, views = static
        ctx.call.gives.append(weakref.ref(ctx))
        return views

    def _views_backward(self, ctx: Any, *cotangents: Any) -> Sequence[Any]:
        platform, call, b = self.platform, ctx.call, ctx.buffer
        refuse_second_order(platform, "fully_shard")
        if platform.frees_storage:
            self._check_reached(ctx.call)
        trained: list[int] = call.trained[b]
        given: Sequence[Any] = with_summed(call.unsummed, trained, cotangents) if call.unsummed else cotangents
        if self._opened and self._nests():
            given = self._with_leaves(trained, given)
        self._one_less_awaited()
        delay = (platform.fast or NOTHING_FASTER).can_delay_gradient(*chosen(call.parameters, trained))
        return self._reduce(b, call.parameters, trained, given, delay)

    def _check_reached(self, call: Call) -> None:
        """Raise RuntimeError where backward has come to freed parameters without passing the results."""
        running = None if self.model is None else self.model.this_pass()
        if running is not None and call.reached != running.number:
            call.check_whole(self.what)

    def _one_less_awaited(self) -> None:
        """Count the cotangents of one buffer, or of the input. After the last one nothing reads the parameters."""
        self._awaited -= 1
        if self._awaited == 0 and self.model is not None and (running := self.model.this_pass()) is not None:
            running.left(self)

    def _reached(self, call: Call) -> None:
        """Take note that a cotangent of a result of ``call`` is there."""
        call.check_unchanged(self.what)
        assert self.model is not None
        running = self.model.this_pass()
        if running is not None:
            running.reached(self, call)

    # ---------------------------------------------------------------------- backward
    def open(self, call: Call) -> None:
        """Begin the backward: gather the parameters, for saved tensors and for recomputed forwards."""
        if not self.platform.frees_storage or not self.plan.slots or not self.whole_in_backward:
            return
        if self._opened:
            self._opened += 1
            return
        self.parameters.open()
        self._opened = 1
        self._awaited = sum(map(bool, call.trained)) + (not self._runs_in_order(call))
        known = self.parameters.buffers, call.trained
        if self._leaves_of[0] is not known[0] or self._leaves_of[1] != known[1]:
            self._leaves, self._leaves_of = self._make_leaves(call), known
        assert self.model is not None
        leaves = self._leaves
        if self.model.one_loss:
            with self.platform.no_dispatch(), self.platform.with_grad():
                leaves = self._as_read(list(leaves), self._unsummed)
        self.parameters.show(leaves, call.parameters)

    def _make_leaves(self, call: Call) -> list[Any]:
        """Return whole parameters as new leaves of autograd."""
        found: list[Any] = [None] * len(call.parameters)
        for buffer, members in zip(self.parameters.buffers, self.parameters.members, strict=True):
            for i, x in zip(members, buffer.views(buffer.whole), strict=True):
                found[i] = x
        found = self.parameters.as_planned(found, self._unsummed)
        self._trained_leaves = {i for trained in call.trained for i in trained}
        for i in self._trained_leaves:
            found[i].requires_grad_()
        return found

    def close(self) -> None:
        """End the backward of this unit."""
        if not self._opened:
            return
        self._opened -= 1
        if self._opened:
            return
        self.parameters.is_open = False
        self._awaited = -1
        self.parameters.hide()
        if self._nests():
            self._reduce_leaves()
        self.parameters.drop_parts()
        if self.reshard_after_backward:
            self.parameters.take_over()
            self.parameters.free()
        else:
            self.parameters.stay_whole()

    def _nests(self) -> bool:
        """Return whether a recomputed forward may have had its own backward, as in reentrant checkpointing."""
        nests = not self.platform.tells_beginning or (self.model is not None and self.model.nests)
        return self.platform.accumulates_gradients and nests

    def _with_leaves(self, indices: Sequence[int], cotangents: Sequence[Any]) -> Sequence[Any]:
        """Return cotangents with the gradients of the leaves added, and clear those."""
        with self.platform.no_dispatch():
            return with_summed(self._unsummed, indices, add_gradients(chosen(self._leaves, indices), cotangents))

    def _reduce_leaves(self) -> None:
        for b, members in enumerate(self.parameters.members):
            trained = [i for i in members if i in self._trained_leaves]
            cotangents = self._with_leaves(trained, [None] * len(trained))
            if any(g is not None for g in cotangents):
                self._reduce(b, self.parameters.places.parameters(), trained, cotangents, True)

    def abandon(self) -> None:
        """Discard the state of a failed backward."""
        if self._opened:
            self._opened, self.parameters.is_open = 0, False
            self.parameters.hide()
            self._unsummed.clear()
            for i in self._trained_leaves if self.platform.accumulates_gradients else ():
                self._leaves[i].grad = None
            self.parameters.free()

    # ---------------------------------------------------------------------- gradients
    def _reduce(
        self, b: int, parameters: Sequence[Any], indices: Sequence[int], cotangents: Sequence[Any], delay: bool
    ) -> list[Any]:
        assert self.model is not None
        self.steps.reduce()
        members, gradients = self.parameters.members[b], self.gradients
        if not (gradients.reduce_gradients and gradients.all_reduce_gradients):
            self.model.accumulating[self] = None
        one_loss, pending = self.model.one_loss, self.model.pending
        buffer = self.parameters.buffers[b]
        return gradients.reduce(buffer, members, parameters, indices, cotangents, one_loss, pending, delay)

    def reduce_accumulated(self) -> None:
        """Reduce accumulated gradients, after a backward pass that did not come to this unit."""
        if self.gradients.has_accumulated and self.platform.accumulates_gradients:
            for b, (buffer, members) in enumerate(zip(self.parameters.buffers, self.parameters.members, strict=True)):
                found = self.gradients.accumulated(buffer, members)
                if found:
                    self._reduce(b, self.parameters.places.parameters(), found, [None] * len(found), True)
