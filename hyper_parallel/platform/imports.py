"""Callbacks that run once a module is imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

__all__ = ["WhenImported", "when_imported"]


class WhenImported(MetaPathFinder):
    """Import hook that calls ``call()`` once, right after the module ``name`` is imported. Other finders do the import.

    Args:
        name: name of a module that is not imported yet.
        call: the function to call.
    """

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        self.name, self.call = name, call
        sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Remove the import hook."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Wrap the loader of the awaited module to run the callback after it. Mirrors
        `importlib.abc.MetaPathFinder.find_spec`."""
        if fullname != self.name:
            return None
        self.cancel()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: Any) -> None:
                execute(module)
                self.call()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def when_imported(name: str, call: Callable[[], Any]) -> None:
    """Call ``call()`` now if the module ``name`` is imported already, else right after its import."""
    if name in sys.modules:
        call()
    else:
        WhenImported(name, call)
