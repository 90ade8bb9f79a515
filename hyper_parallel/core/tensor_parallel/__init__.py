"""Tensor-parallel styles, `parallelize_module` and losses. Mirrors ``torch.distributed.tensor.parallel``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hyper_parallel.public_names import HOME_OF

if TYPE_CHECKING:
    from hyper_parallel.core.tensor_parallel.api import *  # noqa: F403
    from hyper_parallel.core.tensor_parallel.balance import *  # noqa: F403
    from hyper_parallel.core.tensor_parallel.loss import *  # noqa: F403
    from hyper_parallel.core.tensor_parallel.style import *  # noqa: F403


def _public() -> list[str]:
    """Return the public names that this package defines."""
    return [name for name, home in HOME_OF.items() if home.startswith(__name__)]


def __getattr__(name: str) -> Any:
    # Names are resolved when first used, so that importing the package imports no framework.
    if name not in _public():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_public()})
