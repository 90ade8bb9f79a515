"""Collectives of MindSpore that a program calls itself on DTensors: they act on the local tensors.

Supported are all-reduce, reduce and broadcast, whose result has the shape of the operand. The other collectives join or
split tensors, and are rejected.
"""

from __future__ import annotations

from typing import Any

from mindspore.mint import distributed as dist

from hyper_parallel.platform.mindspore.processes.collectives import dense

__all__ = ["is_collective", "run_collective"]

#: Primitive -> positions of its arguments for the reduction, if any, and the group.
_IN_PLACE: dict[str, tuple[int | None, int]] = {
    "DistCommAllReduce": (1, 2),
    "DistCommReduce": (1, 3),
    "DistCommBroadcast": (None, 3),
}
#: Collectives that return a new tensor.
_OUT_OF_PLACE = ("AllReduce", "InnerCommAllReduce")
#: Rejected collectives, which join or split tensors.
_REFUSED = """
    AllGather ReduceScatter AlltoAll AlltoAllV Broadcast Reduce CollectiveScatter CollectiveGather NeighborExchange
    NeighborExchangeV2 Send Receive AllGatherV
"""
_NAMES = frozenset((*_OUT_OF_PLACE, *_REFUSED.split()))


def is_collective(name: str) -> bool:
    """Return whether a primitive communicates."""
    return name in _NAMES or name.startswith(("DistComm", "InnerComm"))


def run_collective(name: str, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a collective on the local tensor of its first argument. Interception is off.

    Returns:
        MindSpore's result, in which a tensor is a DTensor of the same layout.

    Raises:
        TypeError: for a collective that joins or splits tensors.
        ValueError: when the ranks of the group hold different shards, on all of them.
    """
    x: Any = args[0] if args else None
    layout = getattr(x, "_layout", None)
    if layout is None or (name not in _IN_PLACE and name not in _OUT_OF_PLACE):
        raise TypeError(
            f"{name} would concatenate or split the shards of a DTensor: pass x.to_local() for this rank's shard, or "
            "x.full_tensor() for the full tensor"
        )
    if name in _IN_PLACE:
        op, group = _IN_PLACE[name]
        reduction, where = "sum" if op is None else args[op], args[group]
    elif name == "AllReduce":
        reduction, where = func.prim.op, func.prim.group
    else:
        reduction, where = args[1], args[2]
    ranks, parts = dist.get_process_group_ranks(where), name == "DistCommReduce"
    x._core.check_local_collective(name, layout, ranks, linear=reduction in ("sum", "avg"), parts=parts)
    if name in _OUT_OF_PLACE:
        result = func(dense(x), *args[1:], **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        first.__class__ = type(x)
        first._layout = layout
        return result
    local = dense(x)
    result = func(local, *args[1:], **kwargs)
    if local is not x:
        # MindSpore ignores a tensor that is not contiguous, or part of a larger storage; `copy_` does so too.
        if isinstance(result, tuple) and len(result) > 1 and hasattr(result[1], "wait"):
            result[1].wait()
        x.assign_value(local)
    return result
