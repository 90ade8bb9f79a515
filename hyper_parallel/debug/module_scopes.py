"""Tracker of a model's running module, inside a context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.communication.recorder import current_module, set_module

__all__ = ["ModuleScopes"]


class ModuleScopes:
    """Context manager in which events have the path of the innermost running module of ``model``. The module need not
    be in a plan. The hooks are removed at the end.

    Args:
        model: model of the platform.
        platform: the platform.
        tell: function that is called as ``tell(path, args, output)`` after each forward.
        around: function that is called as ``around(path)`` before each forward. Its result is called after the forward,
            unless it is None.
    """

    def __init__(
        self,
        model: Any,
        platform: Any,
        tell: Callable[[str, Any, Any], None] | None = None,
        around: Callable[[str], Callable[[], None] | None] | None = None,
    ) -> None:
        self._model, self._platform, self._tell, self._around = model, platform, tell, around
        self._handles: list[Any] = []
        #: For each running module: the path of the enclosing module, and the function to call at its end.
        self._outside: list[tuple[str, Callable[[], None] | None]] = []

    def __enter__(self) -> ModuleScopes:
        self._before = current_module()
        for path, module in list(self._platform.named_modules(self._model)):
            name = path or type(module).__name__  # as the styles call it
            platform = self._platform
            self._handles.append(platform.register_forward_pre_hook(module, self._opening(name), prepend=True))
            self._handles.append(platform.register_forward_hook(module, self._closing(name, path)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._outside:
            self._leave()
        set_module(self._before)

    def _opening(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            self._outside.append((set_module(name), self._around(name) if self._around else None))

        return hook

    def _leave(self) -> None:
        before, end = self._outside.pop()
        set_module(before)
        if end is not None:
            end()

    def _closing(self, name: str, path: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            # An exception may have skipped the hooks of nested modules.
            while self._outside and current_module() != name:
                self._leave()
            if self._outside:
                self._leave()
            if self._tell is not None:
                self._tell(path, args, output)

        return hook
