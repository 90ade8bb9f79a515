"""Dropout, with the noise of a single device."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.layouts.memory_order import ones_like_whole
from hyper_parallel.core.rules import counter
from hyper_parallel.core.rules.batch_parts import own_place, place_of
from hyper_parallel.core.rules.labels import named, unary
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding
from hyper_parallel.core.rules.random import is_held_alike, synchronize, take_part
from hyper_parallel.core.rules.registry import rule


@rule(
    "dropout",
    "x | p=0.5 training=True seed=None stream=None channels=False",
    memory="ordered",
)
def dropout(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Product of x and noise. Each element gets the noise that it would get on a single device.

    All ranks use the same noise for an element, so the operation is linear in x. This includes the ranks' summands of a
    partial tensor.
    """
    labels = named(shapes[0])
    return unary(labels, labels, shapes[0], terms=((0,),), call=_drop)


def _drop(call: LocalCall) -> Any:
    """Return the local result of dropout.

    Every rank draws the noise of the full tensor from its generator, and uses the elements of its shard. This
    temporarily takes memory of the global size, and keeps all generators in the same state. Ranks with the same shard
    receive the noise of the first of these ranks. No rank needs to receive noise that comes from a separate generator.

    On request, noise of single elements is drawn by counter, so that each rank draws only its shard.
    """
    platform = call.platform
    x, layout = call.operands[0], call.operand_layouts[0]
    p, training, *more = call.static_args
    if not training or p == 0:  # x itself, as on a single device
        return call.run()
    synchronize(layout.mesh)
    drops, of_channels = 0 < p < 1, any(more[2:])
    place = place_of(layout, "dropout") if drops else own_place(layout)
    if drops and not of_channels and counter.draws_by_counter(layout.mesh) and not platform.is_meta(x):
        kept = counter.numbers("uniform", layout, platform.dtypes["float32"], place) >= p
        return x * (platform.to_dtype(kept, platform.dtype_of(x)) * (1 / (1 - p)))
    shared = drops and is_held_alike(layout) and not any(stream is not None for stream in more[1:2])
    if not shared and tuple(layout.local_shape) == place.shape:
        return call.run()
    return x * take_part(
        call.native((ones_like_whole(x, layout, place.shape),), call.static_args), layout, shared, place
    )
