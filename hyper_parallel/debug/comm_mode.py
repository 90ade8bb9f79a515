"""Counting collectives. Mirrors ``torch.distributed.tensor.debug.CommDebugMode``."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from hyper_parallel.core.dtensor.communication.collectives import OBSERVERS

__all__ = ["CommDebugMode"]


class CommDebugMode:
    """Context manager that counts the collectives issued inside it, forward and backward, on this rank.

    A collective that the backend lacks and that is emulated with another counts once, under its own name. Collectives
    on a mesh dimension of size 1 are not issued and not counted.

    Example:
        >>> from hyper_parallel import CommDebugMode
        >>> with CommDebugMode() as comm:
        ...     pass
        >>> comm.get_total_counts()
        0

    Source: ``torch.distributed.tensor.debug.CommDebugMode``.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._elements: Counter[str] = Counter()

    def get_comm_counts(self) -> dict[str, int]:
        """Number of collectives by name: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``,
        ``broadcast``, ``scatter``."""
        return dict(self._counts)

    def get_total_counts(self) -> int:
        """Number of collectives."""
        return sum(self._counts.values())

    def get_elements(self) -> dict[str, int]:
        """Number of elements of the local tensors given to the collectives, by name."""
        return dict(self._elements)

    def __enter__(self) -> CommDebugMode:
        self._counts.clear()
        self._elements.clear()
        OBSERVERS.append(self._observe)
        return self

    def __exit__(self, *exc_info: object) -> None:
        OBSERVERS.remove(self._observe)

    def _observe(self, collective: str, mesh: Any, mesh_dim: int, local: Any) -> None:
        self._counts[collective] += 1
        self._elements[collective] += math.prod(mesh.platform.shape_of(local))
