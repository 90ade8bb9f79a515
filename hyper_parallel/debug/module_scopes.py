"""Which module is running, for all modules of a model, while somebody wants to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.communication.recorder import current_module, set_module

__all__ = ["ModuleScopes"]


class ModuleScopes:
    """Context manager: inside, what is recorded has the path of the innermost module of ``model`` that runs, whether a
    plan names it or not. Its hooks are taken away at the end.

    Args:
        model: of the platform.
        platform: the platform.
        tell: ``tell(path, args, output)`` is called after each forward.
    """

    def __init__(self, model: Any, platform: Any, tell: Callable[[str, Any, Any], None] | None = None) -> None:
        self._model, self._platform, self._tell = model, platform, tell
        self._handles: list[Any] = []
        self._outside: list[str] = []

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
        self._outside.clear()
        set_module(self._before)

    def _opening(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            self._outside.append(set_module(name))

        return hook

    def _closing(self, name: str, path: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            # An exception may have left the hooks of modules inside uncalled.
            while self._outside and current_module() != name:
                set_module(self._outside.pop())
            if self._outside:
                set_module(self._outside.pop())
            if self._tell is not None:
                self._tell(path, args, output)

        return hook
