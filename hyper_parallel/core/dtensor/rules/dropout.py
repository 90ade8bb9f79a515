"""Dropout."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.op_sharding import OpSharding
from hyper_parallel.core.dtensor.random import synchronize
from hyper_parallel.core.dtensor.rules import rule
from hyper_parallel.core.dtensor.rules.labels import named


@rule("dropout")
def dropout(shapes: tuple, statics: tuple) -> OpSharding | None:
    """Multiply by noise. Element for element it is that of a single device, the same on every rank: so the operation is
    linear in x, and the summands of a partial sum all get the same."""
    labels = named(shapes[0])
    return OpSharding(
        operands=(labels,),
        results=(labels,),
        result_shapes=(tuple(shapes[0]),),
        terms=((0,),),
        call=_drop,
    )


def _drop(
    platform: Any, native: Any, operands: tuple, statics: tuple, operand_layouts: tuple, result_layouts: tuple
) -> Any:
    """Every rank draws the noise of the whole tensor from its generator, all generators being in the same state, and
    uses its part of it. That costs memory of the global size for a moment and keeps the generators in step."""
    x, layout = operands[0], operand_layouts[0]
    _, training = statics[:2]
    if training:
        synchronize(layout.mesh)
    if not training or tuple(layout.local_shape) == tuple(layout.shape):
        return native(operands, statics)
    noise = native((platform.ones(layout.shape, x),), statics)
    for dim, (start, size) in enumerate(zip(layout.local_offset, layout.local_shape, strict=True)):
        if size != layout.shape[dim]:
            noise = platform.narrow(noise, dim, start, size)
    return x * noise
