"""Collectives on plain local tensors, outside autograd.

Core calls them in the same order on all ranks of a group. A backend must implement all-gather. Core builds all other
collectives that a backend lacks from all-gather, in `core.communication.collectives`. Core does the same for dtypes
that `CollectiveRole.supports` denies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["FINISHED", "CollectiveRole", "Work"]

Tensor = Any
Group = Any


class Work(Protocol):
    """Handle of a collective that was started. It may also have ``is_completed()``, which says whether `wait` returns
    at once."""

    def wait(self) -> Any:
        """Wait until later computations of this rank may read the result and overwrite the operand."""


class _Finished:
    def wait(self) -> None:
        """Return at once: no collective is pending."""


#: The `Work` of a collective that is complete already.
FINISHED: Work = _Finished()


class CollectiveRole(ABC):
    """All-gather, and collectives that are cheaper than an all-gather."""

    def supports(self, collective: str, op: str, local: Tensor) -> bool:
        """Return whether the verb ``collective`` takes the dtype of ``local`` and, for reductions, the operation
        ``op``.

        Verbs: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"shift"``, ``"broadcast"``,
        ``"scatter"``. Operations: ``"sum"``, ``"avg"``, ``"max"``, ``"min"``, ``"product"``. Core emulates unsupported
        verbs. By default, a backend supports the verbs that it overrides.
        """
        return getattr(type(self), collective) is not getattr(CollectiveRole, collective)

    def native_op(self, op: str) -> Any:
        """Return the framework's object for the reduction ``op`` of `supports`. Users pass it to collectives that they
        call themselves."""
        return op

    def all_reduce(self, local: Tensor, op: str, group: Group) -> Tensor:
        """Return the reduction of ``local`` over the group. ``local`` is contiguous and may be overwritten."""
        raise self._missing("all_reduce")

    @abstractmethod
    def all_gather(self, local: Tensor, group: Group, size: int) -> Tensor:
        """Concatenate the ranks' tensors along dimension 0: contiguous ``local`` of shape (s0, ...) -> (size * s0,
        ...). ``local`` has the same shape on all ``size`` ranks."""

    def reduce_scatter(self, local: Tensor, op: str, group: Group, size: int) -> Tensor:
        """Reduce contiguous ``local`` (size * s0, ...) over the group, and return this rank's chunk (s0, ...)."""
        raise self._missing("reduce_scatter")

    def start_collective(
        self: Any, collective: str, out: Tensor, local: Tensor, op: str, group: Group, size: int
    ) -> Work:
        """Start a collective that writes its result into ``out`` while data parallelism computes.

        ``out`` and ``local`` are buffers of core on this rank's device: 1-D, contiguous and of one dtype. Each buffer
        occupies its entire storage. Neither buffer is read, written or freed before `Work.wait`. Called where
        `supports` answers True, in the same order on all ranks. By default, the collective is complete on return.

        Args:
            collective: ``"all_gather"``, from (n,) to (size * n,), ``"reduce_scatter"``, from (size * n,) to (n,),
                ``"shift"``, of (n,), or ``"all_reduce"``, of (n,), where ``out`` may be ``local``.
            out: the buffer for the result.
            local: the operand.
            op: reduction, as in `supports`; ``""`` for ``"all_gather"``.
            group: group of ranks that take part.
            size: number of ranks in the group.
        """
        if collective == "all_gather":
            result = self.all_gather(local, group, size)
        elif collective == "reduce_scatter":
            result = self.reduce_scatter(local, op, group, size)
        elif collective == "shift":
            result = self.shift(local, group, size)
        else:
            result = self.all_reduce(local if out is local else self.clone(local), op, group)
        if result is not out:
            self.write(out, result)
        return FINISHED

    def all_to_all(
        self,
        local: Tensor,
        group: Group,
        size: int,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Tensor:
        """Send chunk i of contiguous ``local`` to rank i, and return the chunks received, in rank order. Chunks are
        equal by default. Otherwise ``sent[i]`` rows go to rank i, and ``received[j]`` rows come from rank j."""
        raise self._missing("all_to_all")

    def shift(self, local: Tensor, group: Group, size: int) -> Tensor:
        """Send ``local`` to the next rank, and return the tensor of the previous rank. It is contiguous and has the
        same shape on all ranks."""
        raise self._missing("shift")

    def broadcast(self, local: Tensor, src: int, group: Group) -> Tensor:
        """Return the ``local`` of global rank ``src`` on every rank of the group. ``local`` is contiguous and may be
        overwritten."""
        raise self._missing("broadcast")

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int, group: Group) -> Tensor:
        """Fill contiguous ``out`` with this rank's entry of ``parts``. Only global rank ``src`` passes ``parts``. All
        entries are contiguous and have the same shape."""
        raise self._missing("scatter")

    @abstractmethod
    def all_gather_object(self, value: Any, group: Group, size: int) -> list[Any]:
        """Return one picklable value of each rank, in rank order. It is not on the hot path."""

    def _missing(self, verb: str) -> TypeError:
        return TypeError(
            f"{type(self).__name__} does not implement {verb}, so its `supports` must return False for {verb}"
        )
