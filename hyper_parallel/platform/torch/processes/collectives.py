"""Process groups and collectives of torch.distributed.

Frequent collectives call the group's backend directly. Such a call is four times as fast as a function of
`torch.distributed`. It is twice as fast as a method of the process group, which goes through torch's dispatcher. While
a mode observes the dispatcher, such as torch's `CommDebugMode` or fake tensors, the methods are called. Functions are
looked up at call time, because torch_npu replaces some of them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.platform.contract import NativeGroup, NativeMesh, Platform
from hyper_parallel.platform.timeout import timeout_seconds
from hyper_parallel.platform.torch.basics.private import dispatch_modes
from hyper_parallel.platform.torch.basics.transforms import MAYBE_INSIDE, refuse_transforms
from hyper_parallel.platform.torch.native import native_dtensors, native_meshes
from hyper_parallel.platform.torch.processes import launch, lost_ranks

__all__ = ["CommunicationVerbs"]


def _options(kind: Any) -> dict[str, Any]:
    """Return a dict from each reduction to torch's options object for it."""
    found = {}
    for op in ("sum", "avg", "max", "min", "product"):
        found[op] = options = kind()
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
    return found


_ALL_REDUCE, _REDUCE_SCATTER = _options(dist.AllreduceOptions), _options(dist.ReduceScatterOptions)


class _Group:
    """Reference of core to a process group.

    Calling it returns the `ProcessGroup`, or None once the group was destroyed. The reference is weak, because a strong
    reference can abort the process. That happens if a `ProcessGroup` outlives its default group until the interpreter
    ends. Measured with gloo: 5 of 12 runs, none of 12 with weak references.

    Attributes:
        backend: the object that runs the group's collectives on the platform's device, as long as the group exists;
            None for a group whose class has no such backends.
    """

    __slots__ = ("__weakref__", "_process_group", "backend")

    def __init__(self, process_group: Any, device_type: str) -> None:
        owner = weakref.ref(self)

        def forget(_: Any) -> None:
            group = owner()
            if group is not None:
                group.backend = None

        self._process_group = weakref.ref(process_group, forget)
        try:
            self.backend = process_group._get_backend(torch.device(device_type))
        except RuntimeError:
            self.backend = None

    def __call__(self) -> Any:
        return self._process_group()


class CommunicationVerbs(Platform):
    """Verbs of `Platform` for process groups and collectives; a group is a `_Group`."""

    def native_op(self, op: str) -> Any:
        """Return the framework's object for the reduction ``op``."""
        return getattr(dist.ReduceOp, op.upper())

    #: Dtypes that the backend moves natively; others are sent as bytes.
    moved_dtypes: ClassVar[frozenset[torch.dtype]]
    #: Reduction -> dtypes that the backend reduces, for all_reduce and for reduce_scatter.
    all_reduce_dtypes: ClassVar[dict[str, frozenset[torch.dtype]]]
    reduce_scatter_dtypes: ClassVar[dict[str, frozenset[torch.dtype]]]

    # ------------------------------------------------------------------------------------------------ groups
    def world(self) -> Any:
        """Return an object that identifies the default process group, or None."""
        return dist.group.WORLD if dist.is_initialized() else None

    def init_process_group(self, timeout: float | None = None) -> None:
        """Initialise the default process group, and select this rank's device; see `Platform.init_process_group`."""
        seconds = timeout_seconds(timeout)
        if not dist.is_initialized():
            launch.init_process_group(launch.chosen_backend(self.comm_backend), self._select_device, seconds)

    def destroy_process_group(self) -> None:
        """Destroy all process groups, including the default group. Called by programs, not by the library."""
        if dist.is_initialized():
            launch.destroy_process_group()

    def rank(self) -> int:
        """Return this rank's index in the default group."""
        return dist.get_rank()

    def world_size(self) -> int:
        """Return the size of the default group."""
        return dist.get_world_size()

    def new_group(self, rank_lists: Sequence[Sequence[int]], backend: str | None = None, options: Any = None) -> Any:
        """Make one process group for each list of ranks; see `Platform.new_group`."""
        world_size, mine = dist.get_world_size(), None
        more: dict[str, Any] = {} if backend is None else {"backend": backend}
        if options is not None:
            more["pg_options"] = options
        # By default, torch gives each group 30 minutes, whatever the default group has.
        timeout = getattr(options, "_timeout", None) or lost_ranks.timeout_of(dist.group.WORLD, self.device_type)
        for ranks in rank_lists:
            if list(ranks) == list(range(world_size)) and not more:
                group = dist.group.WORLD
            else:
                group = dist.new_group(list(ranks), timeout=timeout, **more, **_ordered(ranks))
            if dist.get_rank() in ranks:
                mine = _Group(group, self.device_type)
        return mine

    def native_group(self, group: Any) -> Any:
        """Return the framework's process group for ``group``."""
        return None if group is None else _resolve(group)

    def describe_group(self, native: Any) -> NativeGroup:
        """Describe a process group of the framework; see `Platform.describe_group`."""
        if not isinstance(native, dist.ProcessGroup):
            raise TypeError(f"from_group takes a torch.distributed.ProcessGroup, got {type(native).__name__}")
        ranks = tuple(dist.get_process_group_ranks(native))
        return NativeGroup(ranks, _Group(native, self.device_type), native.group_name)

    def native_mesh(
        self, ranks: np.ndarray, names: tuple[str, ...] | None, groups: Sequence[Any], root: Any = None
    ) -> Any:
        """Return the framework's mesh with these ranks and groups; see `Platform.native_mesh`."""
        return native_meshes.make_mesh(ranks, names, groups, root, self.device_type)

    def describe_native_mesh(self, native: Any) -> NativeMesh:
        """Describe a mesh of the framework; see `Platform.describe_native_mesh`."""
        return native_meshes.describe_mesh(native, self.device_type, _Group)

    #: Function that describes a placement of the framework by core's class and its arguments.
    describe_native_placement: Any = staticmethod(native_dtensors.describe_placement)

    # ------------------------------------------------------------------------------------------------ collectives
    def supports(self, collective: str, op: str, local: Tensor) -> bool:
        """Return whether ``collective`` takes the dtype of ``local`` and the operation ``op``. Collectives that only
        move data take every dtype, as bytes."""
        if collective == "all_reduce":
            return local.dtype in self.all_reduce_dtypes.get(op, ())
        if collective == "reduce_scatter":
            return local.dtype in self.reduce_scatter_dtypes.get(op, ())
        return True

    def all_reduce(self, local: Tensor, op: str, group: Any) -> Tensor:
        """Return the reduction of ``local`` over the group."""
        if MAYBE_INSIDE or local._is_zerotensor() or local.is_conj() or local.is_neg():
            local = _sendable(local)
        backend = _resolve(group) if dispatch_modes() else group.backend or _resolve(group)
        backend.allreduce([local], _ALL_REDUCE[op]).wait()
        return local

    def all_gather(self, local: Tensor, group: Any, size: int) -> Tensor:
        """Concatenate the tensors of all ranks along dimension 0."""
        if MAYBE_INSIDE or local._is_zerotensor() or local.is_conj() or local.is_neg():
            local = _sendable(local)
        shape = local.shape
        out = local.new_empty((size * shape[0], *shape[1:]))
        backend = _resolve(group) if dispatch_modes() else group.backend or _resolve(group)
        if local.dtype in self.moved_dtypes:
            backend._allgather_base(out, local).wait()
        else:
            backend._allgather_base(self._movable(out), self._movable(local)).wait()
        return out

    def reduce_scatter(self, local: Tensor, op: str, group: Any, size: int) -> Tensor:
        """Reduce ``local`` over the group, and return this rank's chunk."""
        if MAYBE_INSIDE or local._is_zerotensor() or local.is_conj() or local.is_neg():
            local = _sendable(local)
        shape = local.shape
        out = local.new_empty((shape[0] // size, *shape[1:]))
        backend = _resolve(group) if dispatch_modes() else group.backend or _resolve(group)
        backend._reduce_scatter_base(out, local, _REDUCE_SCATTER[op]).wait()
        return out

    def start_collective(self, collective: str, out: Tensor, local: Tensor, op: str, group: Any, size: int) -> Any:
        """Start a collective that writes into ``out``; see `Platform.start_collective`."""
        if MAYBE_INSIDE:
            refuse_transforms(local)
        backend = _resolve(group) if dispatch_modes() else group.backend or _resolve(group)
        if collective == "all_gather":
            if local.dtype in self.moved_dtypes:
                return backend._allgather_base(out, local)
            return backend._allgather_base(self._movable(out), self._movable(local))
        if collective == "reduce_scatter":
            return backend._reduce_scatter_base(out, local, _REDUCE_SCATTER[op])
        if collective == "shift":
            return self._start_shift(backend, out, local, size)
        if out is not local:
            out.copy_(local)
        return backend.allreduce([out], _ALL_REDUCE[op])

    def all_to_all(
        self,
        local: Tensor,
        group: Any,
        size: int,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Tensor:
        """Send chunk i of ``local`` to rank i, and return the received chunks; see `Platform.all_to_all`."""
        local = _sendable(local)
        if sent is None or received is None:
            out = torch.empty_like(local)
            _resolve(group).alltoall_base(self._movable(out), self._movable(local), [], []).wait()
            return out
        out = local.new_empty((sum(received), *local.shape[1:]))
        # A tensor that is sent as bytes is one vector, so a row has many of its elements.
        each = 1 if local.dtype in self.moved_dtypes else local[:1].nbytes if len(local) else out[:1].nbytes
        to, of = [each * n for n in sent], [each * n for n in received]
        _resolve(group).alltoall_base(self._movable(out), self._movable(local), of, to).wait()
        return out

    def shift(self, local: Tensor, group: Any, size: int) -> Tensor:
        """Send ``local`` to the next rank, and return the previous rank's tensor."""
        local = _sendable(local)
        out = torch.empty_like(local)
        self._start_shift(_resolve(group), out, local, size).wait()
        return out

    def _start_shift(self, backend: Any, out: Tensor, local: Tensor, size: int) -> Any:
        """Start an all-to-all in which only the chunk for the next rank is not empty."""
        if local.dtype not in self.moved_dtypes or local.ndim != 1:
            out, local = (self._movable(x).view(-1) for x in (out, local))
        return backend.alltoall_base(out, local, *_sizes_of_shift(backend.rank(), size, local.numel()))

    def broadcast(self, local: Tensor, src: int, group: Any) -> Tensor:
        """Return the tensor of global rank ``src``."""
        local = _sendable(local)
        dist.broadcast(self._movable(local), src, group=_resolve(group))
        return local

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int, group: Any) -> Tensor:
        """Fill ``out`` with this rank's entry of ``parts`` of global rank ``src``."""
        if MAYBE_INSIDE:
            refuse_transforms(out)
        sent = None if parts is None else [self._movable(p) for p in parts]
        dist.scatter(self._movable(out), sent, src=src, group=_resolve(group))
        return out

    def barrier(self, group: Any) -> None:
        """Wait for all ranks of the group. Called by programs, not by the library."""
        dist.barrier(group=_resolve(group))

    def all_gather_object(self, value: Any, group: Any, size: int) -> list[Any]:
        """Return one picklable value of each rank, in rank order."""
        if MAYBE_INSIDE:
            refuse_transforms()
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=_resolve(group))
        return values

    def exchange_texts(self, ranks: Sequence[int], place: str, text: str) -> dict[int, str] | None:
        """Exchange ``text`` with ``ranks`` through the store, without a collective; see `Platform.exchange_texts`."""
        return lost_ranks.exchange_texts(ranks, place, text, self.device_type)

    # ------------------------------------------------------------------------------------------------ faults
    #: Function that returns whether ``error`` means that a rank did not take part in a collective.
    is_communication_failure: Any = staticmethod(lost_ranks.is_communication_failure)

    def find_missing_ranks(
        self, group: Any, ranks: Sequence[int], report: str
    ) -> tuple[dict[int, str], tuple[int, ...]] | None:
        """Find the missing ranks after a failed collective; see `Platform.find_missing_ranks`."""
        return lost_ranks.find_missing_ranks(group(), ranks, report)

    def tell_of_failure(self, groups: Sequence[Any], ranks: Sequence[int], report: str) -> None:
        """Report to ``ranks`` that this rank failed outside a collective; see `Platform.tell_of_failure`."""
        lost_ranks.tell_of_failure([group() for group in groups], ranks, report)

    def _movable(self, x: Tensor) -> Tensor:
        """Return the memory of a tensor under a dtype that the backend can send."""
        if x.dtype in self.moved_dtypes:
            return x
        return x.detach().reshape(-1).view(torch.uint8)

    def _select_device(self, local_rank: int) -> None:
        """Make the device of this rank the current one."""


def _ordered(ranks: Sequence[int]) -> dict[str, Any]:
    """Return the arguments with which `torch.distributed.new_group` keeps ``ranks`` in this order.

    Raises:
        ValueError: when torch sorts them.
    """
    if list(ranks) == sorted(ranks):
        return {}
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ValueError(
            f"the ranks {list(ranks)} of a mesh dimension do not ascend, but torch {torch.__version__} sorts the "
            "ranks of a process group: make a mesh with ascending ranks"
        )
    return {"sort_ranks": False}


@lru_cache(1 << 10)
def _sizes_of_shift(rank: int, size: int, count: int) -> tuple[list[int], list[int]]:
    """Return the numbers of elements received from each rank, and sent to each rank."""
    before, after = [0] * size, [0] * size
    before[(rank - 1) % size], after[(rank + 1) % size] = count, count
    return before, after


def _sendable(x: Tensor) -> Tensor:
    """Return the values of ``x`` in memory. A tensor of torch's "efficient zero" kind has no values in memory; backward
    and forward-mode AD make such tensors. A tensor may also be marked as conjugate or negative. Backends do not send
    this mark.

    Raises:
        ValueError: inside a transform, see `refuse_transforms`.
    """
    if MAYBE_INSIDE:
        refuse_transforms(x)
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_conj().resolve_neg()


def _resolve(group: Any) -> Any:
    process_group = group()
    if process_group is None:
        raise RuntimeError("this mesh belongs to a process group that was destroyed: make a new mesh")
    return process_group
