"""Public names of torch's distributed tensors, for `hyper_parallel.testing.api_table`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["VERSION", "PublicName", "public_names"]

VERSION = torch.__version__.partition("+")[0]

_MODULES = (
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.debug",
    "torch.distributed.device_mesh",
)
#: Base classes whose names are not names of distributed tensors.
_FOREIGN = (torch.Tensor, object)


class PublicName(NamedTuple):
    """A public name of torch.

    Attributes:
        module: module whose `__all__` has the name.
        name: such as ``"DTensor"`` or ``"DTensor.redistribute"``.
        keywords: keywords of a function, a method, or the call of a class. None for an attribute, and where torch has
            no signature.
    """

    module: str
    name: str
    keywords: tuple[str, ...] | None


def public_names() -> list[PublicName]:
    """Return every public name, method and attribute, module by module."""
    found = []
    for module in _MODULES:
        namespace = importlib.import_module(module)
        for name in namespace.__all__:
            value = getattr(namespace, name)
            found.append(PublicName(module, name, _keywords(value)))
            if inspect.isclass(value):
                found += [PublicName(module, f"{name}.{key}", _keywords(member)) for key, member in _members(value)]
    return found


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    names = {key for base in cls.__mro__ if base not in _FOREIGN and _is_torchs(base) for key in vars(base)}
    for key in sorted(name for name in names if not name.startswith("_")):
        member = inspect.getattr_static(cls, key)
        yield key, getattr(member, "__func__", member)


def _is_torchs(cls: type) -> bool:
    """Return whether a class belongs to torch's distributed tensors. Returns False for base classes from C++ bindings,
    and for the general base class of a debug mode.
    """
    return cls.__module__.startswith(("torch.distributed", "torch._C._distributed"))


def _keywords(value: Any) -> tuple[str, ...] | None:
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return None
    names = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD and name not in ("self", "cls")]
    # Keywords with an underscore are private to torch; ``args`` is the signature of any C++ class.
    return tuple(name for name in names if not name.startswith("_") and name != "args")
