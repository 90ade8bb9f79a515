"""Checks that skip a test on a platform without a required feature."""

from __future__ import annotations

import pytest

from hyper_parallel.platform import Platform, get_platform


def needs_gradients() -> None:
    """Skip a test on a platform without `Platform.differentiate`."""
    if type(get_platform()).differentiate is Platform.differentiate:
        pytest.skip("this platform does not differentiate by itself")
