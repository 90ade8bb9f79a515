"""`ProfilerRanges`: named ranges of modules and collectives in the framework's profiler."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, as_range, attributed_backwards
from hyper_parallel.debug.module_scopes import ModuleScopes
from hyper_parallel.platform import get_platform

__all__ = ["ProfilerRanges"]


class ProfilerRanges:
    """Context manager that shows each collective of this library as a range in the profilers of framework and device. A
    range is named, for example, ``"all_reduce over tp, layers.0.attention.wo, forward"``.

    On torch these are ranges of ``torch.profiler``, on GPUs also of NVTX (Nsight), and on NPUs of MSTX (msprof). On
    MindSpore they are ranges of MSTX, so only on Ascend. A collective that overlaps with computation has a range until
    the wait for it. ``HYPER_PARALLEL_LOG=ranges`` gives ranges of collectives to a program that cannot be changed.
    Without the context and the variable, collectives have no extra cost.

    Args:
        model: the model that runs. Then forwards of its modules are ranges too, and collectives have the path of the
            innermost module. Without it, only modules with a style are known.

    Example:
        >>> import torch
        >>> from hyper_parallel.debug import ProfilerRanges
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> with torch.profiler.profile() as profile, ProfilerRanges(model):
        ...     _ = model(torch.ones(1, 2))
        >>> [event.key for event in profile.key_averages() if not event.key.startswith("aten::")]
        ['Sequential', '0']
    """

    def __init__(self, model: Any = None) -> None:
        self._model = model
        self._stack = ExitStack()

    def __enter__(self) -> ProfilerRanges:
        platform = get_platform()
        if self._model is not None:
            self._stack.enter_context(ModuleScopes(self._model, platform, around=platform.profiler_range))
        self._stack.enter_context(attributed_backwards())
        LISTENERS.append(as_range)
        return self

    def __exit__(self, *exc_info: object) -> None:
        LISTENERS.remove(as_range)
        self._stack.close()
