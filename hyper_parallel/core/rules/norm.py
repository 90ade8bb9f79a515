"""Normalisation over the last dimensions, which are unsharded. All leading dimensions can be sharded."""

from __future__ import annotations

from hyper_parallel.core.rules.labels import named, whole
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule


@rule("rms_norm", "x weight=None | normalized statistics=0 eps=None", repeatable=True)
@rule("layer_norm", "x weight=None bias=None | normalized statistics=0 eps=1e-5", repeatable=True)
def norm(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Normalisation over the last dimensions, whose shape is that of weight and bias. Statistics keep the normalised
    dimensions with size 1.
    """
    x, parameters = shapes[0], shapes[1:]
    normalised, statistics = (*static_args, 0)[:2]
    batch = len(x) - normalised
    if batch < 0 or any(p is not None and tuple(p) != tuple(x[batch:]) for p in parameters):
        return None
    labels = whole(named(x), range(batch, len(x)))
    return OpSharding(
        operands=(labels, *(None if p is None else (None,) * len(p) for p in parameters)),
        results=(labels,) * (1 + statistics),
        result_shapes=(tuple(x), *((*x[:batch], *(1,) * normalised),) * statistics),
    )
