"""Sending of rows to the ranks of their experts and back: two differentiable steps, each of which is the backward of
the other.

====================  =======================================================  ====================
step                  forward                                                  step of the cotangent
====================  =======================================================  ====================
`Dispatch`            rows, each as often as it is routed, to the experts      `Combine`
`Combine`             rows back to where they came from, routes of one summed  `Dispatch`
====================  =======================================================  ====================

Every rank knows the row counts of all ranks (see `Routes`). So no padding is sent, and a rank without rows takes part
in each exchange.

Source: the dispatch and combine of GShard (Lepikhin et al. 2020), with exact counts in place of a capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.recorder import dim_name
from hyper_parallel.core.communication.transitions import Step

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["ROUTE_WATCHERS", "Combine", "Dispatch", "Routes", "order_of"]

#: Functions that are called with a module's path and the routes of its tokens (see `hyper_parallel.debug`).
ROUTE_WATCHERS: list[Callable[[str, Routes], None]] = []

#: Expert indices below this limit are sorted as 16-bit integers, for which NumPy's stable sort is linear.
_SHORT = 1 << 15


class Routes:
    """The number of rows that go from each rank to each expert.

    Args:
        mesh, mesh_dim: the mesh dimension over which the experts are distributed.
        counts: ``counts[i, e]`` rows of rank i go to expert e. All ranks have equal counts.
        sizes: number of experts on each rank. Ranks hold consecutive experts.
        order: indices of this rank's routes, sorted by expert; None if the routes are sorted already.

    Attributes:
        counts: the argument.
        between: ``between[i, j]`` rows go from rank i to rank j.
        arriving: number of rows that each expert of this rank receives.
    """

    def __init__(
        self, mesh: DeviceMesh, mesh_dim: int, counts: np.ndarray, sizes: Sequence[int], order: np.ndarray | None = None
    ) -> None:
        self.mesh, self.mesh_dim, self.counts, self.order = mesh, mesh_dim, counts, order
        ends = np.cumsum(sizes)
        own = [counts[:, end - size : end] for end, size in zip(ends, sizes, strict=True)]
        self.between = np.stack([part.sum(1) for part in own], 1)
        self._mine = own[mesh.get_local_rank(mesh_dim)]
        self.arriving = self._mine.sum(0)

    @cached_property
    def sorting(self) -> np.ndarray | None:
        """The indices that sort received rows by expert. Rows arrive rank by rank. None if they are sorted already."""
        ranks, experts = self._mine.shape
        return order_of(np.repeat(np.tile(np.arange(experts), ranks), self._mine.ravel()))


def order_of(experts: np.ndarray) -> np.ndarray | None:
    """Return the indices that sort rows by expert, stably; None if they are sorted already."""
    if not (experts[1:] < experts[:-1]).any():
        return None
    short = experts.astype(np.int16) if experts.max() < _SHORT else experts
    return np.argsort(short, kind="stable")


class _RouteStep(Step):
    """A step that moves rows along routes.

    Args:
        routes: the routes of the rows.
        copies: number of routes of each row on its source rank. Routes of one row are consecutive.
    """

    def __init__(self, routes: Routes, copies: int = 1) -> None:
        super().__init__(routes.mesh.platform, dim_name(routes.mesh, routes.mesh_dim))
        self.routes, self.copies = routes, copies

    def _taken(self, x: Any, places: np.ndarray | None) -> Any:
        """Return the rows of ``x`` at the indices ``places``."""
        if places is None:
            return x
        return x[self.platform.places(places, x)]

    def _exchanged(self, x: Any, counts: np.ndarray) -> Any:
        return collectives.exchange_rows(x, self.routes.mesh, self.routes.mesh_dim, counts)


class Dispatch(_RouteStep):
    """Step that sends rows to the ranks of their experts. Received rows are sorted by expert."""

    def forward(self, ctx: Any, x: Any) -> Any:
        routes, order = self.routes, self.routes.order
        if self.copies > 1:
            total = self.platform.shape_of(x)[0] * self.copies
            order = (np.arange(total) if order is None else order) // self.copies
        sent = self._taken(x, order)
        arrived = self._taken(self._exchanged(sent, routes.between), routes.sorting)
        return self.platform.clone(arrived) if arrived is x else arrived

    def backward(self, ctx: Any, g: Any) -> Any:
        return Combine(self.routes, self.copies)(g)


class Combine(_RouteStep):
    """Step that sends rows, sorted by expert, back to their source ranks. If a row went to several experts, the source
    rank sums their results."""

    def forward(self, ctx: Any, x: Any) -> Any:
        routes, platform = self.routes, self.platform
        sent = self._taken(x, _inverse(routes.sorting))
        back = self._taken(self._exchanged(sent, routes.between.T), _inverse(routes.order))
        if self.copies > 1:
            rows, *rest = platform.shape_of(back)
            parts = back.reshape((rows // self.copies, self.copies, *rest))
            return platform.sum_along(parts, 1).reshape((rows // self.copies, *rest))
        return platform.clone(back) if back is x else back

    def backward(self, ctx: Any, g: Any) -> Any:
        return Dispatch(self.routes, self.copies)(g)


def _inverse(order: np.ndarray | None) -> np.ndarray | None:
    if order is None:
        return None
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places
