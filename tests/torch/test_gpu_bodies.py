"""The bodies of tests/cuda on the CPU: they are right where there is no GPU.

CUDA graphs and streams have stand-ins here that run in order. Only a GPU can show the behaviour of the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.testing.extent import on_ranks
from tests.cuda import bodies


def repeat(work: Callable[[], None]) -> Callable[[], None]:
    """The work of `bodies.cuda_graph`, without a graph."""
    work()
    return work


def replayed_graph() -> None:
    bodies.replayed_graph(repeat)


def everything() -> tuple:
    """One job for all, since a job costs more than its work."""
    replayed_graph()
    bodies.side_stream()
    return bodies.collectives(), bodies.styles(), bodies.bfloat16_training()


@on_ranks(1, 2, 4)
def test_bodies(pool: Any, world_size: int) -> None:
    for backend, counts, losses in pool.run(world_size, everything):
        assert backend == "gloo" and len(losses) == 3
        assert counts == ({"all_reduce": 4} if world_size > 1 else {})
