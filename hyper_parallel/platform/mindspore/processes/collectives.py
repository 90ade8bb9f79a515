"""Collectives on plain local tensors. Core emulates collectives that the communication library lacks: see `supports`.

On CPU (mccl) there are all_reduce, all_gather and broadcast; reduce_scatter, all_to_all and scatter exist on Ascend.
In-place collectives silently ignore non-contiguous tensors. On CPU, in-place collectives also ignore tensors that are
part of a larger storage. `dense` copies such tensors.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.mint import distributed as dist

from hyper_parallel.platform.mindspore.processes.launch import device_target, wait_for_group

__all__ = ["CollectiveVerbs", "copied", "dense", "is_dense"]

_CPU_REDUCE = {ms.float32, ms.float16, ms.bfloat16, ms.int8, ms.int32, ms.int64}
#: dtypes that are sent as another dtype
_AS_BYTES = {ms.bool_: ms.int8, ms.int16: ms.int32}
#: dtypes that neither mccl nor hccl supports; gathered as bytes, broadcast through bytes on the host
_UNKNOWN = {ms.uint16, ms.uint32, ms.uint64, ms.complex64, ms.complex128}
_CPU_MOVE = {*_CPU_REDUCE, *_AS_BYTES, ms.uint8, ms.float64}
_CPU_OPS = {"sum", "max"}
_CPU_FLOAT32_OPS = {"sum", "max", "min"}
_HCCL_REDUCE = {ms.float32, ms.float16, ms.bfloat16, ms.int8, ms.int16, ms.int32, ms.int64}
_HCCL_OPS = {"sum", "max", "min"}


def is_dense(x: Tensor) -> bool:
    """Return whether ``x`` occupies its entire storage, in order. Collectives and in-place operations on CPU support
    nothing else."""
    return x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes


def dense(x: Tensor) -> Tensor:
    """Return ``x`` itself if `is_dense`, else a copy. Differentiable."""
    if is_dense(x):
        return x
    # `contiguous` would return the beginning of a larger storage unchanged.
    return copied(x) if x.is_contiguous() else x.contiguous()


def copied(x: Tensor) -> Tensor:
    """Return a contiguous copy, made by concatenating a single tensor.

    ``Clone`` has no kernel on CPU, and a multiplication by 1 takes four times as long.
    """
    if x._shape:
        return mint.cat((x,), 0)
    return ops.logical_and(x, True) if x.dtype == ms.bool_ else x * 1


class CollectiveVerbs:
    """MindSpore's implementation of `CollectiveRole`."""

    #: Method of `GroupVerbs`.
    check_group: Callable[[Any], None]

    def supports(self, collective: str, op: str, local: Tensor) -> bool:
        reduces = collective in ("all_reduce", "reduce_scatter")
        if device_target() == "CPU":
            if collective == "all_reduce":
                ops_of = _CPU_FLOAT32_OPS if local.dtype == ms.float32 else _CPU_OPS
                return op in ops_of and local.dtype in _CPU_REDUCE
            movable = collective == "all_gather" and (local.dtype in _CPU_MOVE or local.dtype in _UNKNOWN)
            return movable or collective == "broadcast"
        if reduces:
            return op in _HCCL_OPS and local.dtype in _HCCL_REDUCE
        return collective in ("all_gather", "broadcast") or (collective == "all_to_all" and local.dtype != ms.bool_)

    def all_reduce(self, local: Tensor, op: str, group: Any) -> Tensor:
        self.check_group(group)
        local = dense(local)
        dist.all_reduce(local, op, group)
        return local

    def all_gather(self, local: Tensor, group: Any, size: int) -> Tensor:
        self.check_group(group)
        if local.dtype in _AS_BYTES:
            return self.all_gather(local.astype(_AS_BYTES[local.dtype]), group, size).astype(local.dtype)
        local = dense(local)
        if local.dtype in _UNKNOWN:
            # One row per rank: MindSpore views the last dimension as another dtype, and that dimension may be too
            # short.
            rows = self.all_gather(local.reshape((1, -1)).view(ms.uint8), group, size).view(local.dtype)
            return rows.reshape((size * local.shape[0], *local.shape[1:]))
        if device_target() == "CPU":
            parts = [mint.empty(local.shape, dtype=local.dtype) for _ in range(size)]
            dist.all_gather(parts, local, group)
            return mint.cat(parts, 0)
        out = mint.empty((size * local.shape[0], *local.shape[1:]), dtype=local.dtype)
        dist.all_gather_into_tensor(out, local, group)
        return out

    def reduce_scatter(self, local: Tensor, op: str, group: Any, size: int) -> Tensor:
        self.check_group(group)
        out = mint.empty((local.shape[0] // size, *local.shape[1:]), dtype=local.dtype)
        dist.reduce_scatter_tensor(out, local, op, group)
        return out

    def all_to_all(
        self,
        local: Tensor,
        group: Any,
        size: int,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Tensor:
        self.check_group(group)
        rows = local.shape[0] if received is None else sum(received)
        out = mint.empty((rows, *local.shape[1:]), dtype=local.dtype)
        if sent is None or received is None:
            dist.all_to_all_single(out, local, group=group)
        else:
            dist.all_to_all_single(out, local, list(received), list(sent), group=group)
        return out

    def broadcast(self, local: Tensor, src: int, group: Any) -> Tensor:
        self.check_group(group)
        if local.dtype in _AS_BYTES:
            return self.broadcast(local.astype(_AS_BYTES[local.dtype]), src, group).astype(local.dtype)
        if local.dtype in _UNKNOWN:
            values = local.asnumpy()
            sent = self.broadcast(Tensor(np.frombuffer(values.tobytes(), np.uint8)), src, group).asnumpy()
            return Tensor(np.frombuffer(sent.tobytes(), values.dtype).reshape(values.shape))
        local = dense(local)
        dist.broadcast(local, src, group)
        return local

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int, group: Any) -> Tensor:
        """Scatter the parts. On CPU `supports` returns False for scatter, so core broadcasts all parts instead."""
        size = dist.get_world_size(group)
        parts = [out] * size if parts is None else parts
        everything = self.broadcast(ops.stack(tuple(parts)), src, group)
        out.copy_(dense(everything[dist.get_rank(group)]))
        return out

    def barrier(self, group: Any) -> None:
        self.check_group(group)
        wait_for_group(group)

    def all_gather_object(self, value: Any, group: Any, size: int) -> list[Any]:
        """Gather objects as bytes: sizes first, then the padded contents."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = self.all_gather(Tensor(np.array([len(data)], np.int32)), group, size).asnumpy()
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(data)] = data
        everything = self.all_gather(Tensor(padded), group, size).asnumpy().reshape(size, -1)
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(everything, lengths, strict=True)]
