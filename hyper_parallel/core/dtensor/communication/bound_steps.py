"""The two steps of sequence parallelism as functions of the tensor alone, for code that takes the same step every time.

They give what `Transitions.run` gives. What it finds out at every call is found out once, when a function is made: a
small layer spends more time in such questions than in its collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.communication.transitions import Step, transitions_of
from hyper_parallel.core.dtensor.placement_types import PackedShard, Partial
from hyper_parallel.platform.contract import NOTHING_FASTER

__all__ = ["bind_gather", "bind_scatter"]


def bind_scatter(step: Step) -> Callable[[Any], Any]:
    """A step from `Partial` to `Shard` as ``scatter(y)``, to be called under `Platform.no_dispatch`: a reduce-scatter
    whose backward is an all-gather."""
    platform, transitions = step.mesh.platform, transitions_of(step.mesh.platform)
    if step.source is not Partial() or isinstance(step.target, PackedShard) or step.mesh.shape[step.mesh_dim] == 1:
        return lambda y: transitions.run(y, step)
    requires_grad, scatter, gather = platform.requires_grad, step.sum_and_scatter, step.reversed.gather

    def backward(g: Any) -> Any:
        return transitions.gather_cotangent_of_sum(g, step) if requires_grad(g) else gather(g)

    def forward(ctx: Any, y: Any) -> Any:
        return scatter(y)

    step_of = (platform.fast or NOTHING_FASTER).autograd_step(forward, backward)
    return step_of or platform.autograd_function(forward, lambda ctx, g: backward(g))


def bind_gather(step: Step) -> Callable[[Any], tuple[Any, Any, Any]]:
    """A step from `Shard` to `Replicate` as ``gather(x)``, to be called under `Platform.no_dispatch`.

    Gives the whole tensor for consumers that return its full cotangent; the same 2-D, its leading dimensions as one,
    for those that return a partial one, where that costs next to nothing, else None; and the data of both.
    """
    platform, transitions = step.mesh.platform, transitions_of(step.mesh.platform)
    requires_grad, detach = platform.requires_grad, platform.detach

    def alone(x: Any) -> tuple[Any, Any, Any]:
        data = transitions.gather_data(x, step)
        return transitions.share(x, step, data), None, data

    if isinstance(step.source, PackedShard) or step.mesh.shape[step.mesh_dim] == 1 or step.layout is None:
        return alone
    gather, back, shape = step.gather, step.reversed, step.layout.local_shape
    rows = (math.prod(shape[:-1]), shape[-1]) if len(shape) > 2 else None
    scatter = back.sum_and_scatter

    def forward(ctx: Any, x: Any) -> tuple[Any, Any]:
        data = gather(detach(x))
        return data, detach(data if rows is None else data.view(*rows))

    def backward(full: Any, partial: Any) -> Any:
        if partial is None:
            return None if full is None else transitions.run(full, back)
        if rows is not None:
            partial = partial.reshape(shape)
        scattered = transitions.scatter_cotangent(partial, step) if requires_grad(partial) else scatter(partial)
        return scattered if full is None else scattered + transitions.run(full, back)

    both = (platform.fast or NOTHING_FASTER).autograd_pair(forward, backward)
    if both is None:
        return alone

    def share(x: Any) -> tuple[Any, Any, Any]:
        if not requires_grad(x):
            data = gather(detach(x))
            return data, None, data
        full, partial = both(x)
        return full, partial, partial

    return share
