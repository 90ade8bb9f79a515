"""Fixtures of the tests with fake GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hyper_parallel import Platform
from tests.fake_cuda.device import FakeCudaMode, fake_platform, fake_world

#: Ranks in the fake world.
WORLD = 4


@pytest.fixture(scope="session")
def cuda_platform() -> Platform:
    return fake_platform()


@pytest.fixture(params=[0, WORLD - 1], ids=["first rank", "last rank"])
def mode(request: pytest.FixtureRequest, cuda_platform: Platform) -> Iterator[FakeCudaMode]:
    """The test runs as the first and as the last of four ranks; of uneven sizes the last one has the least."""
    with fake_world(request.param, WORLD) as active:
        yield active
