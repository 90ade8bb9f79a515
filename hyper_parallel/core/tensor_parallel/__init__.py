"""Tensor-parallel styles, `parallelize_module` and losses. Mirrors ``torch.distributed.tensor.parallel``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hyper_parallel

if TYPE_CHECKING:
    from hyper_parallel.core.tensor_parallel.api import *  # noqa: F403
    from hyper_parallel.core.tensor_parallel.loss import *  # noqa: F403
    from hyper_parallel.core.tensor_parallel.style import *  # noqa: F403


def _public() -> list[str]:
    """The public names that have their home here."""
    return [name for name, home in hyper_parallel._HOME_OF.items() if home.startswith(__name__)]


def __getattr__(name: str) -> Any:
    # Resolved when first used: importing the package imports no framework.
    if name not in _public():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(hyper_parallel, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_public()})
