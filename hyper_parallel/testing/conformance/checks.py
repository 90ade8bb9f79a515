"""Requirements of a check of the suite on a platform before it begins."""

from __future__ import annotations

import pytest

from hyper_parallel.platform import Platform, get_platform


def needs_gradients() -> None:
    """Skip a test on a platform that does not say how a program differentiates."""
    if type(get_platform()).differentiate is Platform.differentiate:
        pytest.skip("this platform does not differentiate by itself")
