"""Collectives on plain local tensors, outside autograd.

Core calls them in the same order on all ranks of a group. A backend must be able to gather; the other collectives are
composed of that in `core.dtensor.communication.collectives` where a backend does not bring them, or denies them for
some dtype in `CollectiveRole.supports`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["CollectiveRole"]

Tensor = Any
Group = Any


class CollectiveRole(ABC):
    """Gathering, and what is better than gathering."""

    def supports(self, collective: str, op: str, local: Tensor) -> bool:
        """Whether the verb ``collective`` (``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``,
        ``"broadcast"``, ``"scatter"``) takes the dtype of ``local`` and, for reductions, the op ``op`` (``"sum"``,
        ``"avg"``, ``"max"``, ``"min"``, ``"product"``). Core emulates what is not supported. Unless a backend says
        more, it is what it brings."""
        return getattr(type(self), collective) is not getattr(CollectiveRole, collective)

    def all_reduce(self, local: Tensor, op: str, group: Group) -> Tensor:
        """Reduce over the group. ``local`` is contiguous and may be overwritten; the result is returned."""
        raise self._missing("all_reduce")

    @abstractmethod
    def all_gather(self, local: Tensor, group: Group, size: int) -> Tensor:
        """``local`` (s0, ...) contiguous, the same shape on all ``size`` ranks -> (size * s0, ...)."""

    def reduce_scatter(self, local: Tensor, op: str, group: Group, size: int) -> Tensor:
        """``local`` (size * s0, ...) contiguous -> (s0, ...): the reduction of part `rank` of every rank's tensor."""
        raise self._missing("reduce_scatter")

    def all_to_all(self, local: Tensor, group: Group, size: int) -> Tensor:
        """``local`` (size * s0, ...) contiguous -> the same shape: part i goes to rank i, part j comes from rank j."""
        raise self._missing("all_to_all")

    def broadcast(self, local: Tensor, src: int, group: Group) -> Tensor:
        """Value of global rank ``src`` on every rank of the group. ``local`` is contiguous and may be overwritten."""
        raise self._missing("broadcast")

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int, group: Group) -> Tensor:
        """Fill contiguous ``out`` with this rank's part of ``parts``, which global rank ``src`` gives; the parts are
        contiguous and have one shape."""
        raise self._missing("scatter")

    @abstractmethod
    def all_gather_object(self, value: Any, group: Group, size: int) -> list[Any]:
        """One picklable value of each rank, in rank order. Off the hot path."""

    def _missing(self, verb: str) -> TypeError:
        return TypeError(f"{type(self).__name__} brings no {verb}, as its `supports` should say")
