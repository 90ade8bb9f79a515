"""Attention over a sequence that is cut, with torch features that other frameworks lack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.experimental import context_parallel
from hyper_parallel.mindspore import scaled_dot_product_attention
from hyper_parallel.platform import PlatformError
from hyper_parallel.testing import spmd
from tests.torch.support import device


@spmd.on_mesh()
def refused(mesh: Any) -> None:
    part = torch.ones(2, 4, 3, 2, device=device())
    with context_parallel(mesh, length=6), pytest.raises(ValueError, match="drops weights"):
        F.scaled_dot_product_attention(part, part, part, dropout_p=0.5)
    leaf = torch.ones(6, device=device(), requires_grad=True)
    with (
        pytest.raises(ValueError, match="a buffer requires gradients"),
        context_parallel(mesh, buffers=[leaf], buffer_seq_dims=[0]),
    ):
        pass
    with pytest.raises(PlatformError, match=r"call torch\.nn\.functional\.scaled_dot_product_attention"):
        scaled_dot_product_attention(part, part, part)


def test_wrong_use_of_torch(pool: Any) -> None:
    pool.run(2, refused)
