"""Modules that the short forward serves: they have no feature that it leaves out."""

from __future__ import annotations

from torch import nn

from hyper_parallel import get_platform


class OwnLinear(nn.Linear):
    """A subclass may compute something else."""


def test_plain_linear() -> None:
    assert get_platform().fast.is_plain_linear(nn.Linear(2, 3))
    assert not get_platform().fast.is_plain_linear(OwnLinear(2, 3))
