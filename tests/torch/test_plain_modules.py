"""Which modules have nothing about them that the short forward leaves out."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hyper_parallel import get_platform


class OwnLinear(nn.Linear):
    """A subclass may compute something else."""


class OwnEmbedding(nn.Embedding):
    """The same."""


def test_plain_linear() -> None:
    assert get_platform().fast.is_plain_linear(nn.Linear(2, 3))
    assert not get_platform().fast.is_plain_linear(OwnLinear(2, 3))


@pytest.mark.parametrize(
    "options", [{"padding_idx": 1}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_plain_embedding(options: dict[str, Any]) -> None:
    assert get_platform().fast.is_plain_embedding(nn.Embedding(4, 2))
    assert not get_platform().fast.is_plain_embedding(nn.Embedding(4, 2, **options))
    assert not get_platform().fast.is_plain_embedding(OwnEmbedding(4, 2))
