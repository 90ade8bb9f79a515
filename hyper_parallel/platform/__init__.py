"""Backends: the only part of HyperParallel in which a framework is imported, and only the one in use.

Example:
    >>> from hyper_parallel.platform import get_platform
    >>> get_platform("torch-cpu").device_type  # doctest: +SKIP
    'cpu'
"""

from hyper_parallel.platform.contract import OptimizerState, Platform
from hyper_parallel.platform.registry import (
    PlatformError,
    available_platforms,
    get_platform,
    get_platform_for_device,
    register_platform,
)

__all__ = [
    "OptimizerState",
    "Platform",
    "PlatformError",
    "available_platforms",
    "get_platform",
    "get_platform_for_device",
    "register_platform",
]
