"""Autograd functions that a call of a module under `replicate` makes, and that its backward runs.

A call makes them in this order. A root takes the parameters of one dtype. With several dtypes, one more function
gathers the roots. For each bucket, views are the tensors that the module reads in place of its parameters. An anchor
goes around the module's results.

Backward runs them in the reverse order. The anchor says that backward begins. Views collect the gradients of their
bucket. A bucket is sent when it and all buckets before it are complete. The root waits for all buckets, and gives
gradients to the parameters. A token leads from each function to the next: a zero without meaning. So backward comes
to the root on every rank, whichever parameters the rank has used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.data_parallel.backward import Call
from hyper_parallel.platform.contract.autograd import named

__all__ = ["ReplicaFunctions", "functions_of"]


class ReplicaFunctions:
    """The functions of one platform.

    Attributes:
        give: the root: ``give((call, places of the parameters, zero), *parameters)`` returns a token.
        gather: ``gather((call, zero), *tokens)`` returns a token.
        read: ``read((call, number of the bucket, its parameters), token)`` returns plain tensors with their data.
        anchor: ``anchor((call, zero), token, *results)`` returns the results.
    """

    def __init__(self, platform: Any) -> None:
        joint = platform.joint_function
        self.give = joint(named("ReplicateGive", _give), _give_backward)
        self.gather = joint(named("ReplicateGather", _gather), _gather_backward)
        self.read = joint(named("ReplicateRead", _read), _read_backward)
        self.anchor = joint(named("ReplicateAnchor", _anchor), _anchor_backward)


def functions_of(platform: Any) -> ReplicaFunctions:
    """Return the autograd functions for ``platform``."""
    return _FUNCTIONS[platform]


_FUNCTIONS: Table = Table(ReplicaFunctions, 1 << 4, "functions of replicate")


def _give(ctx: Any, static: tuple[Call, Sequence[int], Any], *parameters: Any) -> Sequence[Any]:
    ctx.call, ctx.members, zero = static
    return [zero]


def _give_backward(ctx: Any, cotangent: Any) -> Sequence[Any]:
    call: Call = ctx.call
    if len(call.arrangement.roots) == 1:
        call.finish()
    return call.take(ctx.members)


def _gather(ctx: Any, static: tuple[Call, Any], *tokens: Any) -> Sequence[Any]:
    ctx.call, ctx.zero, ctx.count = *static, len(tokens)
    return [ctx.zero]


def _gather_backward(ctx: Any, cotangent: Any) -> Sequence[Any]:
    ctx.call.finish()
    return [ctx.zero] * ctx.count


def _read(ctx: Any, static: tuple[Call, int, Sequence[Any]], token: Any) -> Sequence[Any]:
    ctx.call, ctx.bucket, parameters = static
    return parameters


def _read_backward(ctx: Any, *cotangents: Any) -> Sequence[Any]:
    call: Call = ctx.call
    call.collect(ctx.bucket, cotangents)
    return [call.arrangement.buckets[ctx.bucket].zero]


def _anchor(ctx: Any, static: tuple[Call, Any], token: Any, *results: Any) -> Sequence[Any]:
    ctx.call, ctx.zero = static
    return results


def _anchor_backward(ctx: Any, *cotangents: Any) -> Sequence[Any]:
    ctx.call.begin()
    return [ctx.zero, *cotangents]
