"""The collectives of a unit of `fully_shard`: those of the platform, or custom ones that the program has set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.communication.recorder import LISTENERS, record
from hyper_parallel.platform.contract.collectives import FINISHED, Work

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["Comms"]


class Comms:
    """Functions that do the collectives of one unit.

    Attributes:
        all_gather, reduce_scatter: an object with ``allocate(size, *, dtype, device)`` and ``__call__(output_tensor,
            input_tensor, group[, op], async_op=True)``, as in ``torch.distributed.fsdp``; None for the platform's own.
        all_reduce_hook: takes this rank's row of reduced gradients, and may change it in place; None for no hook.
    """

    def __init__(self) -> None:
        self.all_gather: Any = None
        self.reduce_scatter: Any = None
        self.all_reduce_hook: Callable[[Any], object] | None = None

    def buffer(self, collective: str, count: int, like: Any, mesh: DeviceMesh) -> Any:
        """Return a buffer of ``count`` elements for a collective, with the dtype of the plain tensor ``like``."""
        comm = getattr(self, collective)
        if comm is None:
            return mesh.platform.empty((count,), like)
        return comm.allocate((count,), dtype=like.dtype, device=getattr(like, "device", None))

    def operand(self, collective: str, x: Any, mesh: DeviceMesh) -> Any:
        """Return ``x`` in the memory from which the collective reads."""
        platform = mesh.platform
        if getattr(self, collective) is None:
            return x
        found = self.buffer(collective, platform.shape_of(x)[0], x, mesh)
        platform.write(found, x)
        return found

    def start(self, collective: str, out: Any, x: Any, mesh: DeviceMesh, mesh_dim: int, op: str = "") -> Work:
        """Begin a collective, as `asynchronous.start` does."""
        comm = getattr(self, collective)
        if comm is None or mesh.shape[mesh_dim] == 1:
            return asynchronous.start(collective, out, x, mesh, mesh_dim, op)
        if LISTENERS:
            record(collective, mesh, mesh_dim, x, op)
        ops = (mesh.platform.native_op(op),) if op else ()
        work: Work | None = comm(out, x, mesh.get_group(mesh_dim), *ops, async_op=True)
        return FINISHED if work is None else work
