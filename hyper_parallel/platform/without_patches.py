"""DTensors of a framework whose patches are not installed: they can neither be made nor used (`platform.patching`)."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

__all__ = ["NeedsPatches", "live_objects", "make_usable", "make_unusable"]


def _error(framework: str) -> RuntimeError:
    return RuntimeError(
        f"the patches of {framework} are not installed, and DTensors would compute wrong results without the patches: "
        f"call hyper_parallel.platform.{framework}.patches.PATCHES.install() before DTensors are made or used"
    )


class NeedsPatches:
    """Descriptor in place of the DTensor class while there are no patches: reading it raises."""

    def __init__(self, framework: str) -> None:
        self._framework = framework

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        raise _error(self._framework)


@functools.cache
def _unusable_class(cls: Any, framework: str) -> type:
    """Return the class that replaces a DTensor class while there are no patches. Every use of its instances raises."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _error(framework)

    def get(self: Any, name: str) -> Any:
        if name in ("__class__", "__torch_function__", "__fallback__"):  # `isinstance` and frameworks ask for these
            return object.__getattribute__(self, name)
        raise _error(framework)

    methods = {"__getattribute__": get, "__torch_function__": classmethod(refuse), "__fallback__": refuse}
    return type(cls)(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})


def live_objects(classes: Sequence[type]) -> list[Any]:
    """Return all live objects of these classes."""
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in classes]


def make_unusable(classes: Sequence[Any], framework: str) -> None:
    """Make the DTensors of these classes unusable, by a change of their class."""
    unusable = {cls: _unusable_class(cls, framework) for cls in classes}
    for x in live_objects(classes):
        object.__setattr__(x, "__class__", unusable[type(x)])


def make_usable(classes: Sequence[Any], framework: str) -> None:
    """Undo `make_unusable`."""
    usable = {_unusable_class(cls, framework): cls for cls in classes}
    for x in live_objects(tuple(usable)):
        object.__setattr__(x, "__class__", usable[type(x)])
