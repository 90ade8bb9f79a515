"""One unit of `fully_shard`: its parameters are unsharded while its module runs, in forward and in backward.

Calls go in one direction. A `Unit` runs a module and notifies the `Model`, which knows the order of units. The model
unshards and reshards units (`UnitParameters`), which gather parameters and reduce gradients (`FlatBuffer`,
`Gradients`). Backward starts at autograd hooks, which call the model directly.

Unsharded parameters are results of one differentiable function of the shards, whose backward reduces the gradients.
Results of the module pass through an identity, which unshards the parameters again at the first cotangent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, current_module
from hyper_parallel.core.data_parallel.batches import is_distributed, mixed_batch
from hyper_parallel.core.data_parallel.call import Call, chosen
from hyper_parallel.core.data_parallel.gradients import with_summed
from hyper_parallel.core.data_parallel.hooks import Inputs, Results, cast, refuse_second_order
from hyper_parallel.core.data_parallel.model import RUNNING, Model
from hyper_parallel.core.data_parallel.places import counts_of
from hyper_parallel.core.data_parallel.unit_facts import UnitFacts
from hyper_parallel.core.data_parallel.unit_parameters import UnitParameters
from hyper_parallel.core.tensor_parallel.program.planned_parameters import UNIT
from hyper_parallel.core.trees import tensors_in
from hyper_parallel.core.weak_table import WeakTable
from hyper_parallel.platform.contract import NOTHING_FASTER
from hyper_parallel.platform.contract.autograd import named

__all__ = ["Unit", "is_unit", "make_unit", "shows_whole_parameters", "unit_of"]

#: module -> its `Unit`. A copy of a module shares the facts, and gets its own unit.
_UNITS = WeakTable()
#: Attribute of a module in a unit of several modules: the `_Modules` of the unit.
_GROUP = "_fully_sharded_group"


class Unit:
    """The unit of one module object, or of several.

    Args:
        facts: those that a module shares with its copies.
        modules: the modules. They are not kept alive.

    Attributes:
        what: name of the unit in messages.
        parameters: the parameters of the unit, sharded or unsharded.
        model: state shared with the other units below the outermost one; None before the first forward.
    """

    def __init__(self, facts: UnitFacts, modules: Sequence[Any]) -> None:
        self.platform = facts.mesh.platform
        self.what = f"{' and '.join(type(module).__name__ for module in modules)} under fully_shard"
        self.model: Any = None  # a `Model`
        self.parameters = UnitParameters(facts, modules, self.what)
        self._views = self.platform.joint_function(
            named("FullyShardParameters", self._views_forward), self._views_backward
        )
        unit = self.parameters
        self._results = Results(
            facts.mesh, self.what, "fully_shard", lambda call: self.model.reached(unit, call), unit.frees
        )
        self._inputs = Inputs(
            self.platform,
            lambda call: self.model.check_reached(unit, call),
            lambda: self.model.one_less_awaited(unit),
        )

    # ---------------------------------------------------------------------- forward
    def run(self, module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run ``forward(module, *args, **kwargs)`` with unsharded parameters in the module."""
        platform, parameters, settings = self.platform, self.parameters, self.parameters.settings
        running, again = RUNNING.get(), platform.in_backward()
        if running:
            self.model = running[0]
            if settings.finalized_by_hand:
                raise RuntimeError(
                    f"{self.what}: set_manual_backward_finalization must be called on the outermost module"
                )
        elif self.model is None:
            self._make_model(module)
        model = self.model
        policy = parameters.facts.mp_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast((args, kwargs), policy.param_dtype, platform)
        plain = platform.Tensor
        inputs = [x for x in args if type(x) is plain]
        if kwargs or len(inputs) < len(args):
            inputs = tensors_in((args, kwargs), platform)
        self._check_batch(inputs, not running, again)
        parameters.places.check_recompute()
        if LISTENERS:
            parameters.scope = current_module()
        if settings.post_optim_event is not None:
            event, settings.post_optim_event = settings.post_optim_event, None
            event.wait()
        token = RUNNING.set((*(running or (model,)), parameters))
        try:
            if running:
                output = self._run(module, forward, args, kwargs, inputs, running[1:], again)
            else:
                with model.step(parameters, module, again):
                    output = self._run(module, forward, args, kwargs, inputs, (), again)
            return output if policy.output_dtype is None else cast(output, policy.output_dtype, platform)
        finally:
            RUNNING.reset(token)

    def _make_model(self, module: Any) -> None:
        """Create the model of all units below ``module``. Some may have been called alone before. Others may not run in
        this forward."""
        self.model = model = Model(self.parameters, module)
        for below in [m for _, m in self.platform.named_modules(module) if is_unit(m)]:
            unit = unit_of(below)
            before, unit.model = unit.model, model
            if before is not None and before is not model and before.outermost() is unit.parameters:
                model.take_over(before)

    def _check_batch(self, inputs: Sequence[Any], is_first: bool, again: bool) -> None:
        """Determine whether the batch of the first unit that runs is distributed. Check that all other units get the
        same kind of batch."""
        model, has_parameters = self.model, bool(self.parameters.facts.slots)
        distributed = is_distributed(inputs, self.parameters.facts.mesh, self.what)
        if not is_first:
            if has_parameters and distributed is not None and distributed is not model.one_loss:
                raise mixed_batch(self.what, distributed)
        elif again and not (has_parameters and distributed is not None):
            # Backward recomputes a part without inputs that decide. The part belongs to a call that backward reached.
            model.one_loss = model.reached_one_loss(bool(distributed))
        else:
            model.one_loss = bool(distributed)

    def _run(
        self,
        module: Any,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        inputs: Sequence[Any],
        within: tuple,
        again: bool,
    ) -> Any:
        platform, model, unit = self.platform, self.model, self.parameters
        if not unit.facts.slots:
            if not again:
                model.entered(unit)
            output = forward(module, *args, **kwargs)
            if within or again or not model.owes_gradients:
                return output
            # Accumulated gradients wait for the next backward, even if that backward reaches no parameters.
            call = Call([], [], True, within, model.one_loss)
            return self._results.opening(output, call, call.one_loss)
        with platform.no_dispatch():
            parameters = unit.shards()
            trained, one = unit.trained(parameters)
            asked = one is not None and platform.requires_grad(parameters[one])
            recorded = asked or any(map(platform.requires_grad, inputs))
            if recorded:
                model.check_kind(self.what)
            call = Call(parameters, trained, recorded, within, model.one_loss)
            first, shared = True, unit.group.call_of(module, call, asked, again)
            if shared is not None:
                first, (call, wholes) = False, shared
            else:
                if not again:
                    model.forward_is_over(unit)
                    unit.drop_parts()
                unit.check_stale(parameters)
                values = unit.gather(recorded and unit.is_freed, parameters)
                if not unit.is_freed:
                    unit.take_over()
                wholes = self._wholes(call, values, asked)
                unit.group.begin(module, call, wholes, asked, again)
            versions = counts_of(wholes)
        try:
            unit.show(wholes, parameters)
            if recorded and unit.is_freed:
                tells = asked and first and not again and not call.runs_in_order(platform)
                args, kwargs = self._inputs.arguments(args, kwargs, inputs, call, tells)
            try:
                if first and not again:
                    model.entered(unit)
                output = forward(module, *args, **kwargs)
                unit.take_writes(call, wholes, versions)
            finally:
                unit.hide()
            del wholes
            if not again and (recorded or any(trained)):
                model.left(unit, not first)
            return self._results.opening(output, call, call.one_loss) if recorded else output
        finally:
            if first and recorded:
                model.recorded(unit, call)
            if unit.group.is_over or not within:
                model.forward_is_over(unit, call)

    def _wholes(self, call: Call, values: Sequence[Any], asked: bool) -> list[Any]:
        """Return the unsharded parameters in the order of their indices, differentiable if ``asked``."""
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
        if asked and self.parameters.facts.mesh.size() > 1:
            call.anchors = [found[indices[0]] for indices in call.trained if indices]
        found = [self.platform.as_parameter(x, in_buffer=True) for x in found]
        return self.parameters.as_read(found, call.unsummed, call.one_loss)

    # ---------------------------------------------------------------------- hooks of autograd
    def _views_forward(self, ctx: Any, static: Any, *shards: Any) -> Sequence[Any]:
        ctx.call, ctx.buffer, views = static
        ctx.call.gives.append(weakref.ref(ctx))
        return views

    def _views_backward(self, ctx: Any, *cotangents: Any) -> Sequence[Any]:
        platform, call, b, model, unit = self.platform, ctx.call, ctx.buffer, self.model, self.parameters
        refuse_second_order(platform, "fully_shard")
        if unit.is_freed:
            model.check_reached(unit, call)
        trained: list[int] = call.trained[b]
        given: Sequence[Any] = with_summed(call.unsummed, trained, cotangents) if call.unsummed else cotangents
        if model.recomputes:
            given = unit.with_leaves(trained, given)
        model.one_less_awaited(unit)
        delay = (platform.fast or NOTHING_FASTER).can_delay_gradient(*chosen(call.parameters, trained))
        return model.reduce(unit, b, call.parameters, trained, given, call.one_loss, delay)

    # ---------------------------------------------------------------------- between steps
    def outside(self) -> None:
        """Prepare for a gather that the program starts by hand, outside of a forward."""
        self.parameters.steps.outside()
        if self.model is not None:
            self.model.settle()

    # ---------------------------------------------------------------------- memory
    def memory(self) -> list[Any]:
        """Return the memory of the shards, as plain tensors."""
        with self.platform.no_dispatch(), self.platform.no_grad():
            return [*map(self.platform.detach, self.parameters.places.parameters())]

    def move(self, before: Sequence[Any] = ()) -> None:
        """Move the shards of each buffer into one storage, which is gathered without copies. It is called before the
        program can hold a reference to a shard. From then on the shards keep their memory.

        Args:
            before: an earlier result of `memory`. If a shard still has its earlier memory, the program may hold it, and
                no shard is moved.
        """
        platform, unit = self.platform, self.parameters
        if not unit.facts.slots:
            return
        with platform.no_dispatch(), platform.no_grad():
            parameters = unit.places.parameters()
            if any(map(platform.is_meta, parameters)):
                return
            pairs = zip(before, parameters, strict=True) if before else ()
            if any(0 not in platform.shape_of(x) and platform.same_memory(x, p) for x, p in pairs):
                return
            parameters = unit.shards()
            for buffer, members in zip(unit.buffers, unit.members, strict=True):
                buffer.move(chosen(parameters, members))


class _Modules:
    """The modules of one unit. A copy of one of these modules has a copy of this object, with copies of all modules."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = list(modules)


def make_unit(modules: Sequence[Any], facts: UnitFacts) -> None:
    """Make ``modules`` a unit."""
    group = _Modules(modules)
    for module in modules:
        object.__setattr__(module, UNIT, facts)
        if len(modules) > 1:
            object.__setattr__(module, _GROUP, group)


def is_unit(module: Any) -> bool:
    """Return whether `fully_shard` was applied to ``module``, or to a module that it is a copy of."""
    return hasattr(module, UNIT)


def unit_of(module: Any) -> Unit:
    """Return the unit of a module to which `fully_shard` was applied. The unit is created at first use."""
    unit = _UNITS.get(module)
    if unit is None:
        group = vars(module).get(_GROUP)
        modules = [module] if group is None else group.modules
        unit = Unit(getattr(module, UNIT), modules)
        for one in modules:
            _UNITS.set(one, unit)
    return unit


def shows_whole_parameters(module: Any) -> bool:
    """Return whether the attributes of ``module`` are unsharded parameters now, because its unit's forward is
    running."""
    unit = _UNITS.get(module) if is_unit(module) else None
    return unit is not None and unit.parameters.places.holds_others
