"""Seeing and counting collectives. Mirrors ``torch.distributed.tensor.debug.CommDebugMode``."""

from __future__ import annotations

import math
from collections import Counter

from hyper_parallel.core.dtensor.communication.recorder import LISTENERS, CollectiveEvent

__all__ = ["CommDebugMode"]


class CommDebugMode:
    """Context manager that lists and counts the collectives issued inside it, forward and backward, on this rank.

    A collective that the backend lacks and that is emulated with another counts once, under its own name. Collectives
    on a mesh dimension of size 1 are not issued and not counted, and neither are those of values that are pickled.

    Attributes:
        events: the collectives in the order in which they were issued: see `hyper_parallel.debug.CollectiveEvent`.

    Example:
        >>> from hyper_parallel import CommDebugMode
        >>> with CommDebugMode() as comm:
        ...     pass
        >>> comm.get_total_counts()
        0
        >>> [(event.module, event.direction, event.kind, event.bytes) for event in comm.events]
        []

    Source: ``torch.distributed.tensor.debug.CommDebugMode``.
    """

    def __init__(self) -> None:
        self.events: list[CollectiveEvent] = []

    def get_comm_counts(self) -> dict[str, int]:
        """Number of collectives by name: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``,
        ``broadcast``, ``scatter``."""
        return dict(Counter(event.kind for event in self.events))

    def get_total_counts(self) -> int:
        """Number of collectives."""
        return len(self.events)

    def get_elements(self) -> dict[str, int]:
        """Number of elements of the local tensors given to the collectives, by name."""
        elements: Counter[str] = Counter()
        for event in self.events:
            elements[event.kind] += math.prod(event.shape)
        return dict(elements)

    def __enter__(self) -> CommDebugMode:
        self.events.clear()
        LISTENERS.append(self._listen)
        return self

    def __exit__(self, *exc_info: object) -> None:
        LISTENERS.remove(self._listen)

    def _listen(self, event: CollectiveEvent) -> None:
        if event.bytes:
            self.events.append(event)
