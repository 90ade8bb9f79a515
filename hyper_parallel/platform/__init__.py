"""Backends: the only part of HyperParallel that imports a framework, and only the framework in use.

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
