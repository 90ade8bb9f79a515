"""Fixtures of the tests with fake GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hyper_parallel import Platform
from hyper_parallel.core.rules import random
from tests.fake_cuda.device import FakeCudaMode, fake_platform, fake_world

#: Ranks in the fake world.
WORLD = 4


@pytest.fixture(scope="session")
def cuda_platform() -> Platform:
    return fake_platform()


@pytest.fixture(params=[0, WORLD - 1], ids=["first rank", "last rank"])
def mode(
    request: pytest.FixtureRequest, cuda_platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCudaMode]:
    """The test runs as the first and as the last of four ranks. Of uneven sizes the last one has the least."""
    # There is no generator on a GPU, and no other rank that has one.
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)
    monkeypatch.setattr(random, "all_gather_object", lambda value, mesh, dim: [value] * mesh.size(dim))
    with fake_world(request.param, WORLD) as active:
        yield active
