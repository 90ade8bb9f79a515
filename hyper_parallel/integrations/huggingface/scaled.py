"""Experts that take all tokens for each expert, scaled by the router's score, as in Llama 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.expert_calls import evenly, like, values_of
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label
from hyper_parallel.core.tensor_parallel.styles.experts import ExpertParallel
from hyper_parallel.integrations.huggingface.experts import WholeExpertsParallel
from hyper_parallel.platform import Platform

__all__ = ["ScaledExpertParallel", "WholeScaledExperts"]


class WholeScaledExperts(WholeExpertsParallel):
    """Placeholder style for experts that are called with all tokens for each expert, scaled by the router's scores.

    Raises:
        ValueError: when applied directly, without a mesh of the ranks that share the experts.
    """

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        raise ValueError(
            f"{where!r} computes each expert on all tokens, scaled by the router's scores, so tokens cannot be sent "
            "to ranks of their experts. Pass the mesh over which experts are sharded, expert_parallel=mesh['tp'], or "
            "shard inside each expert (expert_parallel=False)"
        )

    def with_own_tokens(self, top_k: int, **arguments: Any) -> ExpertParallel:
        return ScaledExpertParallel(top_k, **arguments)


class ScaledExpertParallel(ExpertParallel):
    """`ExpertParallel` for a module that takes (E * T, d): all T tokens for the first expert, then for the next.

    Each token is scaled by its score, which is zero for an expert that it is not routed to. A row of zeros gives zeros,
    so only the other rows are sent. The module's own forward runs on this rank's experts. All experts get equal numbers
    of rows, padded with zeros.

    Args:
        top_k: number of experts of a token, for a dry run, whose tensors have no values.
        **arguments: arguments of `ExpertParallel`.

    Raises:
        ValueError: as `ExpertParallel` raises; also when called with a DTensor.
    """

    def __init__(self, top_k: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.top_k = top_k

    def _run(
        self, module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict, mesh: DeviceMesh, tp: Any, count: int
    ) -> Any:
        platform = mesh.platform
        given = [*args, *kwargs.values()]
        if any(isinstance(x, DTensor) for x in given):
            raise ValueError(
                f"{module_label(module)} is called with a DTensor, whose shards would divide the rows of one expert "
                "between ranks: pass a plain batch on each rank"
            )
        if len(given) != 1 or len(platform.shape_of(given[0])) != 2 or platform.shape_of(given[0])[0] % count:
            return super()._run(module, forward, args, kwargs, mesh, tp, count)  # which refuses it on all ranks
        (x,), experts = given, [count]
        places, counts = self._routed(x, count, platform)
        experts = like(counts, platform.host_tensor(np.zeros(1, np.int64)), platform)

        def own_forward(module: Any, rows: Any, numbers: Any) -> Any:
            return _equally(module, forward, rows, numbers, platform)

        with platform.no_dispatch():
            sent = x[platform.places(places, x)]
        y = super()._run(module, own_forward, (sent, experts), {}, mesh, tp, count)
        with platform.no_dispatch():
            back = np.full(platform.shape_of(x)[0], len(places), np.int64)
            back[places] = np.arange(len(places))
            return _with_zeros(y, platform)[platform.places(back, y)]

    def _routed(self, x: Any, count: int, platform: Platform) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the nonzero rows, and the number of these rows for each expert."""
        rows = platform.shape_of(x)[0]
        if platform.sends_nothing:
            counts = evenly(rows // count * self.top_k, count)
            return np.arange(counts.sum()), counts
        places = np.flatnonzero(values_of((platform.detach(x) != 0).any(1), platform))
        return places, np.bincount(places // max(rows // count, 1), minlength=count)


def _equally(module: Any, forward: Callable[..., Any], rows: Any, numbers: Any, platform: Platform) -> Any:
    """Run a forward that needs equal numbers of rows for each expert, by padding with zeros."""
    total, experts = platform.shape_of(rows)[0], platform.shape_of(numbers)[0]
    counts = evenly(total, experts) if platform.sends_nothing else values_of(numbers, platform)
    most = int(counts.max())
    own = np.repeat(np.arange(experts) * most, counts) + np.concatenate([np.arange(n) for n in counts])
    places = np.full(experts * most, total, np.int64)
    places[own] = np.arange(total)
    y = forward(module, _with_zeros(rows, platform)[platform.places(places, rows)])
    return y[platform.places(own, rows)]


def _with_zeros(x: Any, platform: Platform) -> Any:
    """Return ``x`` with a row of zeros appended."""
    return platform.cat([x, platform.zeros((1, *platform.shape_of(x)[1:]), platform.detach(x))], 0)
