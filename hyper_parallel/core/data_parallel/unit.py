"""One unit of `fully_shard`: its parameters are whole while its module runs, in forward and in backward.

A call gathers the parameters, and lets the modules find whole ones where they look for theirs (`UnitParameters`).
Whole parameters are results of one differentiable function of the shards, whose backward reduces the gradients
(`Gradients`). What the module returns goes through an identity: when the first cotangent comes back to it, the
parameters are made whole again. Where the platform tells when the cotangent of the input is there, they are given back
then, before their gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.data_parallel.batches import is_distributed, lies_across, whole_for_all
from hyper_parallel.core.data_parallel.call import Call
from hyper_parallel.core.data_parallel.computed_again import Inside
from hyper_parallel.core.data_parallel.gradients import Gradients, with_waiting
from hyper_parallel.core.data_parallel.model import RUNNING, Model
from hyper_parallel.core.data_parallel.plan import Plan
from hyper_parallel.core.data_parallel.trees import map_tensors, tensors_in
from hyper_parallel.core.data_parallel.unit_parameters import UnitParameters
from hyper_parallel.core.tensor_parallel.distributed_batches import SUMMED_OVER
from hyper_parallel.platform.contract import NOTHING_FASTER

__all__ = ["Unit"]


class Unit:
    """The unit of one module object.

    Attributes:
        plan: what is the same for a module and its copies.
        what: the unit, for messages.
        reshard_after_forward: None leaves it to the model: the outermost unit stays whole until its backward.
        reshard_after_backward: whether parameters are sharded again after backward.
        gradients: how they are reduced.
        parameters: sharded or whole.
        model: what it shares with the other units below the outermost one; None before the first forward.
        forward_prefetch, backward_prefetch: units to gather ahead, in place of the next one.
    """

    def __init__(self, plan: Plan, module: Any) -> None:
        self.plan, self.platform = plan, plan.mesh.platform
        self.what = f"{type(module).__name__} under fully_shard"
        self.reshard_after_forward = plan.reshard_after_forward
        self.reshard_after_backward = True
        self.gradients = Gradients(plan)
        self.forward_prefetch: Sequence[Unit] = ()
        self.backward_prefetch: Sequence[Unit] = ()
        self.model: Model | None = None
        self.parameters = UnitParameters(plan, module, self.what)
        self._inside = Inside(self.platform, module, plan.slots, self.what)
        self._opened = 0  # by how many backward passes, one within the other
        self._leaves: list[Any] = []
        #: The buffers of these, and of each buffer those that gradients are asked for.
        self._leaves_of: tuple[Any, list[list[int]]] = (None, [])
        self._trained_leaves: set[int] = set()
        self._waiting: list[Any] = []
        self._awaited = -1  # how much is missing until the backward of this unit is known to be over; negative: unknown
        self._views = self.platform.joint_function(self._views_forward, self._views_backward)
        self._returned = self.platform.joint_function(self._returned_forward, self._returned_backward)

    # ---------------------------------------------------------------------- forward
    def run(self, module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """``forward(module, *args, **kwargs)`` with whole parameters in their places."""
        platform, running = self.platform, RUNNING.get()
        again = platform.in_backward()
        if running:
            self.model = running[0].model
        elif self.model is None:
            self.model = Model(self)
        model: Any = self.model
        policy = self.plan.mp_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = self._cast((args, kwargs), policy.param_dtype)
        inputs = list(tensors_in((args, kwargs), platform))
        self._check_batch(inputs, not running and not again)
        self._inside.check()
        outermost = not running and not again and model.outermost() is self
        if outermost:
            model.begin()
        token, summed = RUNNING.set((*running, self)), SUMMED_OVER.set(self.plan.mesh if model.one_loss else None)
        complete = False
        try:
            output = self._run(module, forward, args, kwargs, inputs, running, again)
            complete = True
            return output if policy.output_dtype is None else self._cast(output, policy.output_dtype)
        finally:
            RUNNING.reset(token)
            SUMMED_OVER.reset(summed)
            if outermost:
                model.end(complete)

    def _check_batch(self, inputs: Sequence[Any], decides: bool) -> None:
        """Find out, in the outermost unit, whether the batch is distributed, and in others, whether theirs is alike."""
        model: Any = self.model
        distributed = is_distributed(inputs, self.plan.mesh, self.what)
        if decides:
            model.one_loss = bool(distributed)
        elif self.plan.slots and distributed is not None and distributed is not model.one_loss:
            given, others = ("plain tensors", "DTensors") if model.one_loss else ("DTensors", "plain tensors")
            raise ValueError(
                f"{self.what} was called with {given}, and the outermost module under fully_shard with {others}: "
                "whether the data-parallel ranks have one loss or one each depends on which, so give all units the same"
            )

    def _cast(self, tree: Any, dtype: Any) -> Any:
        """``tree`` with floating point tensors of ``dtype``."""
        platform = self.platform

        def cast(x: Any) -> Any:
            return platform.to_dtype(x, dtype) if platform.is_floating_point(x) and x.dtype != dtype else x

        return map_tensors(tree, cast, platform, lambda x: x)

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
        with platform.no_dispatch():
            parameters = self.parameters.shards()
            trained = [[i for i in members if parameters[i].requires_grad] for members in self.parameters.members]
            # One answers for all: they differ in what `trained` says, and that is the same for those in it.
            asked = any(platform.requires_grad(parameters[i]) for of_buffer in trained for i in of_buffer[:1])
            recorded = asked or any(map(platform.requires_grad, inputs))
            call = Call(parameters, trained, recorded, running)
            self.parameters.check_kept(parameters)
            values = self.parameters.gather(recorded and platform.frees_storage)
            wholes = self._wholes(call, values, asked)
        try:
            self.parameters.show(wholes, parameters)
            del wholes
            if asked and not again and platform.frees_storage:
                args, kwargs = self._watched(args, kwargs, inputs)
            try:
                if not again:
                    model.entered(self)
                output = forward(module, *args, **kwargs)
            finally:
                self.parameters.hide()
            return self._with_opening(output, call) if recorded and self.plan.slots else output
        finally:
            if self.reshard_after_forward or (self.reshard_after_forward is None and model.outermost() is not self):
                self.parameters.free()

    def _watched(self, args: tuple, kwargs: dict, inputs: Sequence[Any]) -> tuple[tuple, dict]:
        """The arguments, such that backward tells when the cotangent of the input is there. Of several inputs, or a
        distributed one, nothing is asked."""
        found = [x for x in inputs if self.platform.requires_grad(x)]
        if len(found) != 1 or getattr(found[0], "_layout", None) is not None:
            return args, kwargs
        with self.platform.no_dispatch():
            view = (self.platform.fast or NOTHING_FASTER).tell_gradient(found[0], self._one_less_awaited)
        if args and args[0] is found[0]:
            return (view, *args[1:]), kwargs
        changed: tuple[tuple, dict] = map_tensors(
            (args, kwargs), lambda x: view if x is found[0] else x, self.platform, lambda x: x
        )
        return changed

    def _wholes(self, call: Call, values: Sequence[Any], asked: bool) -> list[Any]:
        """The whole parameters in the order of their indices, differentiable where that is ``asked``."""
        found: list[Any] = [None] * len(call.parameters)
        for b, (buffer, members) in enumerate(zip(self.parameters.buffers, self.parameters.members, strict=True)):
            views = buffer.views(values[b])
            trained = call.trained[b] if asked else []
            if trained:
                given = [x for i, x in zip(members, views, strict=True) if i in trained]
                new = self._views((call, b, given), *[call.parameters[i] for i in trained])
                found_here = dict(zip(trained, new, strict=True))
            for i, x in zip(members, views, strict=True):
                found[i] = self._as_read(i, found_here[i] if trained and i in found_here else x, call.waiting)
        return found

    def _as_read(self, index: int, x: Any, waiting: list[Any]) -> Any:
        """A whole tensor as modules read it: as a DTensor where a tensor-parallel style has made it one.

        Args:
            index: of the parameter.
            x: a new plain tensor.
            waiting: takes what `coalesce_gradients` leaves to be summed over tensor-parallel ranks.
        """
        inner = self.plan.inner[index]
        if inner is None:
            one_loss = self.model is not None and self.model.one_loss
            return whole_for_all(x, self.plan.mesh) if one_loss else x
        x = self.platform.wrap(x, inner)
        x._collect = lambda cotangent, mesh, mesh_dims: waiting.append((index, cotangent, mesh, mesh_dims))
        return x

    def _views_forward(self, ctx: Any, static: Any, *shards: Any) -> Sequence[Any]:
        ctx.call, ctx.buffer, views = static
        return views

    def _views_backward(self, ctx: Any, *given: Any) -> Sequence[Any]:
        platform, cotangents = self.platform, list(given)
        self._refuse_second_order(cotangents)
        self._one_less_awaited()
        trained: list[int] = ctx.call.trained[ctx.buffer]
        if ctx.call.waiting:
            cotangents = with_waiting(ctx.call.waiting, trained, cotangents)
        parameters = [ctx.call.parameters[i] for i in trained]
        fast = platform.fast or NOTHING_FASTER
        delay = fast.can_delay_gradient(*parameters)
        return self._reduce(ctx.buffer, trained, cotangents, delay)

    def _refuse_second_order(self, cotangents: Sequence[Any]) -> None:
        """Raise RuntimeError where cotangents have gradients themselves."""
        if any(g is not None and self.platform.requires_grad(g) for g in cotangents):
            raise RuntimeError(
                "gradients of gradients do not go through fully_shard: leave create_graph off, or do not shard the "
                "modules that they go through"
            )

    def _one_less_awaited(self) -> None:
        """The cotangents of one buffer are there, or that of the input. After all of them nothing reads the whole
        parameters any more: they make room for the buffer in which their gradients are reduced."""
        self._awaited -= 1
        if self._awaited == 0 and self.model is not None:
            running = self.model.this_pass()
            if running is not None:
                running.left(self)

    # ---------------------------------------------------------------------- what the module returns
    def _with_opening(self, output: Any, call: Call) -> Any:
        """``output``, whose cotangents make the parameters whole before they reach what the forward has computed."""
        platform, found = self.platform, []
        one_loss = self.model is not None and self.model.one_loss

        def collect(x: Any) -> Any:
            if lies_across(x, self.plan.mesh) and not one_loss:
                raise ValueError(
                    f"{self.what} returns a DTensor of shape {tuple(x.shape)} placed {list(x.placements)}, and was "
                    "called with plain tensors: compute plain ones, this rank's part of the batch, as in x.to_local()"
                )
            with platform.no_dispatch():
                if any(buffer.holds(x) for buffer in self.parameters.buffers):
                    layout = getattr(x, "_layout", None)
                    x = platform.clone(x)
                    x = x if layout is None else platform.wrap(x, layout)
                asked = platform.requires_grad(x)
            if asked:
                found.append(x)
            return x

        # Tensors of one dtype go through one function: then it does not matter which of them the loss needs.
        output = map_tensors(output, collect, platform, self._refuse_unknown)
        new: dict[int, Any] = {}
        with platform.no_dispatch():
            for same in by_dtype(found):
                for x, y in zip(same, self._returned(call, *same), strict=True):
                    layout = getattr(x, "_layout", None)
                    new[id(x)] = y if layout is None else platform.wrap(y, layout)
        return map_tensors(output, lambda x: new.get(id(x), x), platform, self._refuse_unknown)

    def _refuse_unknown(self, x: Any) -> Any:
        raise TypeError(
            f"{self.what} returns a {type(x).__name__}: return tensors, or tuples, lists, dicts and dataclasses of them"
        )

    def _returned_forward(self, ctx: Any, call: Call, *xs: Any) -> Sequence[Any]:
        ctx.call = call
        return [self.platform.detach(x) for x in xs]

    def _returned_backward(self, ctx: Any, *cotangents: Any) -> Sequence[Any]:
        self._refuse_second_order(cotangents)
        ctx.call.check_unchanged(self.what)
        assert self.model is not None
        running = self.model.this_pass()
        if running is not None:
            running.reached(self, ctx.call)
        return cotangents

    # ---------------------------------------------------------------------- backward
    def open(self, call: Call) -> None:
        """Backward begins: have the whole parameters there, for what the forward has kept of them, and for what is
        computed again."""
        if not self.platform.frees_storage or not self.plan.slots:
            return
        if self._opened:
            self._opened += 1
            return
        self.parameters.open()
        self._opened = 1
        self._awaited = 1 + sum(map(bool, call.trained))
        known = self.parameters.buffers, call.trained
        if self._leaves_of[0] is not known[0] or self._leaves_of[1] != known[1]:
            self._leaves, self._leaves_of = self._make_leaves(call), known
        assert self.model is not None
        leaves = self._leaves
        if self.model.one_loss:
            with self.platform.no_dispatch(), self.platform.with_grad():
                leaves = [self._as_read(i, x, self._waiting) for i, x in enumerate(leaves)]
        self.parameters.show(leaves)

    def _make_leaves(self, call: Call) -> list[Any]:
        """Whole parameters as tensors that nothing was computed from yet."""
        found: list[Any] = [None] * len(call.parameters)
        self._trained_leaves.clear()
        for buffer, members in zip(self.parameters.buffers, self.parameters.members, strict=True):
            for i, x in zip(members, buffer.views(buffer.whole), strict=True):
                found[i] = x if self.plan.inner[i] is None else self._as_read(i, x, self._waiting)
                if call.parameters[i].requires_grad:
                    found[i].requires_grad_()
                    self._trained_leaves.add(i)
        return found

    def close(self) -> None:
        """The backward of this unit is over."""
        if not self._opened:
            return
        self._opened -= 1
        if self._opened:
            return
        self.parameters.is_open = False
        self._awaited = -1
        self.parameters.hide()
        for b, members in enumerate(self.parameters.members):
            # Of what was computed again and differentiated on its own, as reentrant checkpointing does.
            if not self.platform.accumulates_gradients:
                break
            trained = [i for i in members if i in self._trained_leaves]
            with self.platform.no_dispatch():
                cotangents = [self._leaves[i].grad for i in trained]
            cotangents = with_waiting(self._waiting, trained, cotangents)
            if any(g is not None for g in cotangents):
                for i in trained:
                    self._leaves[i].grad = None
                self._reduce(b, trained, cotangents, True)
        if self.reshard_after_backward:
            self.parameters.free()
        else:
            self.parameters.keep()

    def abandon(self) -> None:
        """Backward has failed."""
        if self._opened:
            self._opened, self.parameters.is_open = 0, False
            self.parameters.hide()
            self._waiting.clear()
            for i in self._trained_leaves if self.platform.accumulates_gradients else ():
                self._leaves[i].grad = None
            self.parameters.free()

    # ---------------------------------------------------------------------- gradients
    def _reduce(self, b: int, indices: Sequence[int], cotangents: Sequence[Any], delay: bool) -> list[Any]:
        assert self.model is not None
        parameters = self.parameters.places.parameters()
        return self.gradients.reduce(
            self.model, self.parameters.buffers[b], self.parameters.members[b], parameters, indices, cotangents, delay
        )

    def reduce_kept(self) -> None:
        """A backward pass is over that did not come to this unit: reduce what was kept from those before."""
        if self.gradients.has_kept and self.gradients.reduce_gradients and self.platform.accumulates_gradients:
            for b in range(len(self.parameters.buffers)):
                kept = self.gradients.kept(self.parameters.buffers[b])
                if kept:
                    self._reduce(b, kept, [None] * len(kept), True)


def by_dtype(xs: Sequence[Any]) -> list[list[Any]]:
    """The tensors, each once, in lists of one dtype."""
    lists: dict[Any, dict[int, Any]] = {}
    for x in xs:
        lists.setdefault(x.dtype, {})[id(x)] = x
    return [list(same.values()) for same in lists.values()]
