"""Copies of parallelised modules: copy, deepcopy, pickle and `torch.save`.

The classes of such modules are made while the program runs, and their forwards are closures. So neither can be pickled.
The pickle contains the original class of the module, its parameters, and its styles. The styles are applied again when
the module is loaded.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import nn

from hyper_parallel.platform.contract.modules import APPLIED
from hyper_parallel.platform.torch.compiled.comparisons import NUMBER

__all__ = ["copying_methods"]

#: Dicts of hooks by number -> further dicts with options of the same hooks.
_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


def copying_methods(cls: Any) -> dict[str, Any]:
    """Return copying methods for a class derived from ``cls``, unless ``cls`` defines its own."""
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
        return {}
    methods = {"__reduce_ex__": _reduce, "__copy__": _copy, "__deepcopy__": _deepcopy}
    return {name: method for name, method in methods.items() if name == "__reduce_ex__" or not hasattr(cls, name)}


def _copy(self: Any) -> Any:
    new = object.__new__(type(self))
    new.__setstate__(self.__getstate__())
    return new


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    new = memo[id(self)] = object.__new__(type(self))
    new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
    return new


def _reduce(self: Any, protocol: Any) -> tuple:
    """Return the values that pickle stores.

    Raises:
        TypeError: for a module with hooks that cannot be pickled.
    """
    state = dict(self.__getstate__())
    state.pop("_replaced_forward", None)
    state.pop("_compiled_run", None)
    state.pop(NUMBER, None)
    for name, options in _HOOKS.items():
        kept = type(state[name])((i, hook) for i, hook in state[name].items() if not getattr(hook, "of_style", False))
        for hook in kept.values():
            if "<locals>" in getattr(hook, "__qualname__", ""):
                raise TypeError(
                    f"a parallelised {type(self).__name__} has the hook {hook.__qualname__}, which cannot be pickled: "
                    "save module.state_dict(), and load it into a module with the same plan"
                )
        state[name] = kept
        for option in options:
            state[option] = type(state[option])((i, value) for i, value in state[option].items() if i in kept)
    return (object.__new__, (_importable(type(self)),), (state, state.pop(APPLIED, ())), None, None, _restore)


def _restore(module: Any, saved: tuple[dict[str, Any], tuple]) -> None:
    state, applied = saved
    module.__setstate__(state)
    for style, mesh in applied:
        style._apply(module, mesh)  # its parameters are distributed already, so nothing is communicated


def _importable(cls: type) -> type:
    """Return the importable class from which ``cls`` was derived while the program ran."""
    for base in cls.__mro__:
        found: Any = sys.modules.get(base.__module__)
        for name in base.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is base and issubclass(base, nn.Module):
            return base
    return nn.Module
