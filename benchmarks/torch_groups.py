"""A process group without other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["fake_group"]


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Be rank 0 of torch's fake process group, whose collectives return at once and move nothing; on one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
