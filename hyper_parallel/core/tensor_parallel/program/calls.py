"""Wrappers for calls of styled modules, which report the calls to listeners and to `check_plain_code`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, current_module, run_in_module
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.core.tensor_parallel.program.planned_parameters import path_of

__all__ = ["followed", "hook_of_style", "is_entered"]


def hook_of_style(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run(module, ...)`` as a hook of a style, which is registered again when the module is loaded."""

    def hook(module: Any, *args: Any) -> Any:
        return run_in_module(path_of(module), followed(run, module), module, *args) if LISTENERS else run(module, *args)

    hook.of_style = True  # type: ignore[attr-defined]
    return hook


def followed(call: Callable[..., Any], module: Any, **how: bool) -> Callable[..., Any]:
    """Return ``call`` of a styled module, wrapped by `Following.styled` if `check_plain_code` follows the program.

    ``how`` is passed to `Following.styled`.
    """
    return FOLLOWING[-1].styled(call, module, path_of(module), **how) if FOLLOWING else call


def is_entered(module: Any) -> bool:
    """Return whether a styled module's call must still be reported, to listeners or to `check_plain_code`."""
    return current_module() != path_of(module) or bool(FOLLOWING and not FOLLOWING[-1].is_inside(module))
