"""Results of a unit of `fully_shard`. Backward begins with their cotangents."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.data_parallel.batches import lies_across
from hyper_parallel.core.data_parallel.borders import through
from hyper_parallel.core.data_parallel.call import Call
from hyper_parallel.core.data_parallel.plan import Plan
from hyper_parallel.core.data_parallel.second_order import refuse_second_order
from hyper_parallel.core.data_parallel.trees import map_tensors
from hyper_parallel.core.data_parallel.unit_parameters import UnitParameters
from hyper_parallel.platform.contract.autograd import named

__all__ = ["Results"]


class Results:
    """The results of the calls of one unit.

    Args:
        plan: plan of the unit.
        what: the unit, for messages.
        parameters: parameters of the unit.
        reached: ``reached(call)`` is called when the cotangent of one of its results is there.
    """

    def __init__(self, plan: Plan, what: str, parameters: UnitParameters, reached: Callable[[Call], None]) -> None:
        self._mesh, self._platform, self._what = plan.mesh, plan.mesh.platform, what
        self._parameters, self._reached = parameters, reached
        self._identity = self._platform.joint_function(named("FullyShardOutput", self._forward), self._backward)

    def opening(self, output: Any, call: Call, one_loss: bool) -> Any:
        """Return ``output``, whose cotangents make the parameters whole before backward goes on into the module.

        Args:
            output: the result of the module.
            call: the call.
            one_loss: whether the batch is distributed.
        """
        platform = self._platform
        if type(output) is platform.Tensor:
            # As most modules: there is nothing to look for.
            with platform.no_dispatch():
                if not self._holds(output):
                    leads = platform.requires_grad(output) or self._may_lead(output, call)
                    return self._led(call, output)[0] if leads else output
        found: list[Any] = []
        others: list[Any] = []

        def collect(x: Any) -> Any:
            if lies_across(x, self._mesh) and not one_loss:
                raise ValueError(
                    f"{self._what} returns a DTensor of shape {tuple(x.shape)} placed {list(x.placements)}, and was "
                    "called with plain tensors: compute plain ones, this rank's part of the batch, as in x.to_local()"
                )
            with platform.no_dispatch():
                if self._holds(x):
                    layout = getattr(x, "_layout", None)
                    x = platform.clone(x)
                    x = x if layout is None else platform.wrap(x, layout)
                if platform.requires_grad(x):
                    found.append(x)
                elif self._may_lead(x, call):
                    others.append(x)
            return x

        output = map_tensors(output, collect, platform, self._unknown)
        new = through(platform, self._led, call, found or others)
        return map_tensors(output, lambda x: new.get(id(x), x), platform, self._unknown)

    def _holds(self, x: Any) -> bool:
        """Return whether a plain tensor lies in memory that will be freed."""
        return any(buffer.holds(x) for buffer in self._parameters.buffers)

    def _unknown(self, x: Any) -> Any:
        """Return a result that may hold unknown tensors, such as a cache: their backward bypasses the results.

        Raises:
            TypeError: on a platform that does not tell when backward begins.
        """
        if self._platform.tells_beginning:
            return x
        raise TypeError(
            f"{self._what} returns a {type(x).__name__}: return tensors, or tuples, lists, dicts and dataclasses of "
            "them"
        )

    def _may_lead(self, x: Any, call: Call) -> bool:
        """Return whether backward may come from a result to the anchors, if the forward here used frozen parameters
        alone."""
        return bool(call.anchors) and self._platform.is_floating_point(x)

    def _led(self, call: Call, *xs: Any) -> Sequence[Any]:
        """Return results from which backward also comes to one parameter of each buffer.

        This rank may use no parameter of a buffer, while other ranks wait for it to reduce their gradients.
        """
        return self._identity((call, len(call.anchors)), *call.anchors, *xs)

    def _forward(self, ctx: Any, static: tuple[Call, int], *xs: Any) -> Sequence[Any]:
        ctx.call, ctx.anchors = static
        ctx.call.returns.append(weakref.ref(ctx))
        return xs[ctx.anchors :]

    def _backward(self, ctx: Any, *cotangents: Any) -> Sequence[Any]:
        recorded = self._platform.backward_is_recorded()
        if recorded and not self._platform.tells_beginning:
            refuse_second_order(self._platform, "fully_shard")
        ctx.call.again = ctx.call.again or recorded
        self._reached(ctx.call)
        return [*[None] * ctx.anchors, *cotangents]
