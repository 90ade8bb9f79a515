"""Collectives on plain local tensors, outside autograd.

Core calls them in the same order on all ranks of a group. A backend must be able to gather. The other collectives are
composed of gathering in `core.communication.collectives` where a backend lacks them. The same holds for dtypes that a
backend denies in `CollectiveRole.supports`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["FINISHED", "CollectiveRole", "Work"]

Tensor = Any
Group = Any


class Work(Protocol):
    """A collective that was started. It may have ``is_completed()`` too, which says whether `wait` returns at once."""

    def wait(self) -> Any:
        """Return when later computations of this rank may read the result, and the operand may be overwritten."""


class _Finished:
    def wait(self) -> None:
        """Nothing is under way."""


#: The `Work` of a collective that is complete already.
FINISHED: Work = _Finished()


class CollectiveRole(ABC):
    """Gathering, and collectives that are cheaper than gathering."""

    def supports(self, collective: str, op: str, local: Tensor) -> bool:
        """Return whether the verb ``collective`` takes the dtype of ``local`` and, for reductions, the operation
        ``op``.

        Verbs: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"shift"``, ``"broadcast"``,
        ``"scatter"``. Operations: ``"sum"``, ``"avg"``, ``"max"``, ``"min"``, ``"product"``. Core emulates unsupported
        ones. By default, a backend supports the verbs that it overrides.
        """
        return getattr(type(self), collective) is not getattr(CollectiveRole, collective)

    def native_op(self, op: str) -> Any:
        """Return the framework's own object for the reduction ``op``, as in `supports`. It serves users with
        collectives of their own."""
        return op

    def all_reduce(self, local: Tensor, op: str, group: Group) -> Tensor:
        """Reduce over the group. ``local`` is contiguous and may be overwritten; the result is returned."""
        raise self._missing("all_reduce")

    @abstractmethod
    def all_gather(self, local: Tensor, group: Group, size: int) -> Tensor:
        """``local`` (s0, ...) contiguous, the same shape on all ``size`` ranks -> (size * s0, ...)."""

    def reduce_scatter(self, local: Tensor, op: str, group: Group, size: int) -> Tensor:
        """``local`` (size * s0, ...) contiguous -> (s0, ...): the reduction of part `rank` of every rank's tensor."""
        raise self._missing("reduce_scatter")

    def start_collective(
        self: Any, collective: str, out: Tensor, local: Tensor, op: str, group: Group, size: int
    ) -> Work:
        """Begin a collective that writes its result into ``out``: data parallelism computes meanwhile.

        ``out`` and ``local`` are buffers of core: 1-D, contiguous, of one dtype, each all of its storage, on this
        rank's device. Neither is read, written or freed before `Work.wait`. Called where `supports` says yes, in the
        same order on all ranks. Unless a backend brings it, the result is there on return.

        Args:
            collective: ``"all_gather"``, from (n,) to (size * n,), ``"reduce_scatter"``, from (size * n,) to (n,),
                ``"shift"``, of (n,), or ``"all_reduce"``, of (n,), where ``out`` may be ``local``.
            out: the buffer for the result.
            local: the operand.
            op: of a reduction, as in `supports`; ``""`` for ``"all_gather"``.
            group: whose ranks take part.
            size: how many they are.
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
        """Part i of contiguous ``local`` goes to rank i, part j of the result comes from rank j. Parts are equal
        without numbers. With them ``sent[i]`` rows go to rank i, and ``received[j]`` come from rank j."""
        raise self._missing("all_to_all")

    def shift(self, local: Tensor, group: Group, size: int) -> Tensor:
        """Send ``local``, contiguous and of one shape on all ranks, to the next rank; return the previous rank's."""
        raise self._missing("shift")

    def broadcast(self, local: Tensor, src: int, group: Group) -> Tensor:
        """Value of global rank ``src`` on every rank of the group. ``local`` is contiguous and may be overwritten."""
        raise self._missing("broadcast")

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int, group: Group) -> Tensor:
        """Fill contiguous ``out`` with this rank's part of ``parts``, which global rank ``src`` gives. The parts are
        contiguous and have one shape."""
        raise self._missing("scatter")

    @abstractmethod
    def all_gather_object(self, value: Any, group: Group, size: int) -> list[Any]:
        """One picklable value of each rank, in rank order. Off the hot path."""

    def _missing(self, verb: str) -> TypeError:
        return TypeError(f"{type(self).__name__} brings no {verb}, as its `supports` should say")
