"""torch-cuda on a real GPU: nccl with one rank, several ranks on one GPU over gloo, graphs and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import get_platform
from hyper_parallel.testing import spmd
from tests.cuda import bodies

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
]
#: Ranks share one GPU over gloo, unless there is one for each.
WORLD_SIZES = [2, 4]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A world of one rank over nccl, in this process."""
    platform = get_platform()
    platform.destroy_process_group()
    for name in ("HYPER_PARALLEL_TORCH_BACKEND", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(spmd, "rank", 0)
    monkeypatch.setattr(spmd, "world_size", 1)
    platform.init_process_group()
    yield platform
    platform.destroy_process_group()


def test_nccl_is_the_default(nccl: Any) -> None:
    assert dist.get_backend() == "nccl" and nccl.device() == torch.device("cuda", torch.cuda.current_device())


def test_collectives_of_nccl(nccl: Any) -> None:
    assert bodies.collectives() == "nccl"


@pytest.mark.parametrize("body", [bodies.styles, bodies.bfloat16_training, bodies.replayed_graph, bodies.side_stream])
def test_one_rank(nccl: Any, body: Any) -> None:
    body()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("body", [bodies.collectives, bodies.styles, bodies.bfloat16_training, bodies.side_stream])
def test_several_ranks(pool: Any, body: Any, world_size: int) -> None:
    results = pool.run(world_size, body)
    assert all(result == results[0] for result in results)
    if body is bodies.styles:
        assert results[0] == {"all_reduce": 4}


def test_generator_state(nccl: Any) -> None:
    """The state is that of the GPU's generator."""
    torch.cuda.manual_seed(0)
    state = nccl.get_rng_state()
    first = torch.rand(3, device="cuda")
    nccl.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)
