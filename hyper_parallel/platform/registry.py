"""Registry of backends: known names, the selected backend, and whether it can run here.

A backend is imported when it is first asked for. The built-in backends are listed here by name and module. Other
packages add backends through the entry-point group ``hyper_parallel.platforms`` or `register_platform`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, cast

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.logs import LOG, set_up
from hyper_parallel.platform.terminal import printable

__all__ = [
    "ENTRY_POINT_GROUP",
    "ENVIRONMENT_VARIABLE",
    "PlatformError",
    "available_platforms",
    "get_platform",
    "get_platform_for_device",
    "register_platform",
    "selected",
    "worlds",
]

ENVIRONMENT_VARIABLE = "HYPER_PARALLEL_PLATFORM"
#: Environment variable: ``0`` disables `Platform.fast` on every platform, to find out whether it causes a problem.
FAST_VARIABLE = "HYPER_PARALLEL_FAST"
ENTRY_POINT_GROUP = "hyper_parallel.platforms"


class PlatformError(RuntimeError):
    """Error for an unknown backend, or a backend that cannot run here. The message lists every known backend, and why
    each cannot be used."""


@dataclass
class _Backend:
    """A known backend; ``target`` is the class or ``"module:class"``, loaded at first use."""

    name: str
    target: type[Platform] | str
    framework: str | None
    instance: Platform | None = None

    def load(self) -> type[Platform]:
        target = self.target
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            self.target = target = cast("type[Platform]", getattr(importlib.import_module(module), attribute))
        return target

    def unavailable_reason(self) -> str | None:
        if self.framework is not None and not _is_installed(self.framework):
            return f"{self.framework} is not installed"
        try:
            return self.load().unavailable_reason()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # A backend that breaks, or exits, while loading must not hide the others.
            return printable(f"{type(error).__name__}: {error}")


#: The known backends, initially the built-in ones. Those of one framework are ordered from the best device on. An alias
#: of the framework means the first one that can run.
_backends = {
    backend.name: backend
    for backend in (
        _Backend("torch-cuda", "hyper_parallel.platform.torch.cuda:TorchCudaPlatform", "torch"),
        _Backend("torch-npu", "hyper_parallel.platform.torch.npu:TorchNpuPlatform", "torch"),
        _Backend("torch-cpu", "hyper_parallel.platform.torch.cpu:TorchCpuPlatform", "torch"),
        _Backend("mindspore", "hyper_parallel.platform.mindspore.base:MindSporePlatform", "mindspore"),
    )
}

#: alias -> names of backends, of which the first available one is used.
_aliases: dict[str, tuple[str, ...]] = {
    "torch": ("torch-cuda", "torch-npu", "torch-cpu"),
    "pytorch": ("torch-cuda", "torch-npu", "torch-cpu"),
    "cpu": ("torch-cpu",),
    "cuda": ("torch-cuda",),
    "gpu": ("torch-cuda",),
    "npu": ("torch-npu",),
    "ascend": ("torch-npu",),
    "ms": ("mindspore",),
}

#: Frameworks in order of preference, if nothing else decides.
_FRAMEWORKS = ("torch", "mindspore")

_lock = threading.RLock()
_selected: Platform | None = None
#: Replacements for the selected backend and for every device type, innermost last; see `selected`.
_stand_ins: list[Platform] = []
_entry_points_read = False


def register_platform(
    name: str, target: type[Platform] | str, *, aliases: Sequence[str] = (), framework: str | None = None
) -> None:
    """Make a backend known.

    Args:
        name: name of the backend in ``HYPER_PARALLEL_PLATFORM`` and `get_platform`; case does not matter.
        target: the `Platform` subclass, or ``"package.module:Class"`` to be imported at first use.
        aliases: further names.
        framework: top-level module of the framework, such as ``"torch"``. Backends of one framework serve each
            other's device types. A backend is not imported if its framework is not installed.

    Raises:
        ValueError: when the name or an alias is taken by another backend.

    Example:
        >>> register_platform("my-backend", "my_package.platform:MyPlatform", aliases=["mine"])  # doctest: +SKIP
    """
    with _lock:
        key = _normalize(name)
        known = _backends.get(key)
        if known is not None and known.target != target:
            raise ValueError(f"a backend named {key!r} is registered already: {known.target!r}")
        for alias in map(_normalize, aliases):
            if alias in _backends or _aliases.get(alias, (key,)) != (key,):
                raise ValueError(f"cannot register the alias {alias!r} for {key!r}: the name is taken")
        if known is None:
            _backends[key] = _Backend(key, target, framework)
        for alias in map(_normalize, aliases):
            _aliases[alias] = (key,)


def available_platforms() -> dict[str, str | None]:
    """Return every known backend by name, with None if it can run here, else the reason why not.

    Example:
        >>> available_platforms()["torch-cpu"] is None  # doctest: +SKIP
        True
    """
    with _lock:
        _read_all()
        return {name: backend.unavailable_reason() for name, backend in _backends.items()}


def get_platform(name: str | None = None) -> Platform:
    """Return the backend called ``name``, or the selected one. Every call returns the same object.

    The backend is selected when it is first needed, and stays selected. ``HYPER_PARALLEL_PLATFORM`` names the selected
    backend. Without the variable, the framework that the program has imported decides. If none is imported, the only
    installed framework decides, else torch.

    Args:
        name: a backend (``"torch-cpu"``, ``"torch-cuda"``, ``"torch-npu"``, ``"mindspore"``, or a registered one) or an
            alias (``"torch"``, ``"cpu"``, ``"gpu"``, ``"ascend"``, ``"ms"``, ...).

    Raises:
        PlatformError: for an unknown name or a backend that cannot run here. The message lists all backends.
    """
    global _selected
    with _lock:
        if name is not None:
            return _resolve(name, f"{name!r}")
        if _stand_ins:
            return _stand_ins[-1]
        if _selected is None:
            chosen = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
            if chosen:
                _selected = _resolve(chosen, f"{ENVIRONMENT_VARIABLE}={chosen!r}")
            else:
                framework, why = _detect_framework()
                _selected = _resolve(framework, f"the framework {framework!r} ({why})")
                LOG.info("HyperParallel uses the platform %r: %s", _selected.name, why)
        return _selected


def get_platform_for_device(device_type: str) -> Platform:
    """Return the backend of the selected framework that serves ``device_type`` (``"cpu"``, ``"cuda"``, ``"npu"``).

    Raises:
        ValueError: when the framework has no backend for it; the message names the available device types.
        PlatformError: when its backend cannot run here.
    """
    with _lock:
        current = get_platform()
        if current.device_type == device_type or _stand_ins:
            return current
        _read_all()
        framework = next((b.framework for b in _backends.values() if b.instance is current), None)
        served: dict[str, str] = {current.device_type: current.name}
        for backend in _backends.values():
            if framework is not None and backend.framework == framework and backend.instance is not current:
                try:
                    served.setdefault(backend.load().device_type, backend.name)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # it may also exit
                    LOG.debug("platform %r cannot be loaded: %s", backend.name, error)
        if device_type in served:
            return _resolve(served[device_type], f"device type {device_type!r}")
        choices = ", ".join(f"{d!r} (platform {n!r})" for d, n in served.items())
        raise ValueError(
            f"the platform {current.name!r} has no device type {device_type!r}: use one of {choices}, or leave the "
            f"device type out, or choose another platform with {ENVIRONMENT_VARIABLE}"
        )


@contextmanager
def selected(platform: Platform) -> Iterator[Platform]:
    """Select ``platform`` inside this context, for every device type. Dry runs use it, also for programs that name
    their device."""
    _stand_ins.append(platform)
    try:
        yield platform
    finally:
        _stand_ins.remove(platform)


def _resolve(name: str, asked: str) -> Platform:
    set_up(_rank)
    key = _normalize(name)
    if key not in _backends and key not in _aliases:
        _read_all()
    candidates = _aliases.get(key, (key,))
    reasons = []
    for candidate in candidates:
        backend = _backends.get(candidate)
        if backend is None:
            raise PlatformError(f"unknown platform: {asked} was asked for.\n{_listing()}")
        if backend.instance is not None:
            return backend.instance
        reason = backend.unavailable_reason()
        if reason is None:
            backend.instance = backend.load()()
            if os.environ.get(FAST_VARIABLE, "").strip() == "0":
                backend.instance.fast = None
            return backend.instance
        reasons.append(reason)
    # The last candidate needs the least: if it cannot run, none can.
    raise PlatformError(f"{asked} was asked for, but this platform cannot be used here: {reasons[-1]}\n{_listing()}")


def _made() -> list[Platform]:
    """Return the backends that are in use."""
    return [backend.instance for backend in _backends.values() if backend.instance is not None]


def worlds() -> list[Any]:
    """Return the default groups of all backends in use."""
    return [world for platform in _made() if (world := platform.world()) is not None]


def _rank() -> str:
    """Return the rank of this process, as far as it is known."""
    joined = (platform.rank() for platform in _made() if platform.world() is not None)
    return next(map(str, joined), printable(os.environ.get("RANK", "0")))


def _listing() -> str:
    """Return a table of every known backend with its availability, and the aliases, for error messages."""
    _read_all()
    lines = ["Known platforms:"]
    for name, backend in sorted(_backends.items()):
        reason = None if backend.instance is not None else backend.unavailable_reason()
        lines.append(f"  {name}: " + ("available" if reason is None else f"not available: {reason}"))
    aliases = ", ".join(sorted(_aliases))
    lines.append(f"Aliases: {aliases}. Set {ENVIRONMENT_VARIABLE} or call get_platform(name).")
    return "\n".join(lines)


def _detect_framework() -> tuple[str, str]:
    imported = [f for f in _FRAMEWORKS if getattr(sys.modules.get(f), "Tensor", None) is not None]
    if len(imported) == 1:
        return imported[0], f"the program has imported {imported[0]}"
    installed = [f for f in _FRAMEWORKS if _is_installed(f)]
    if not imported and len(installed) == 1:
        return installed[0], f"{installed[0]} is the only framework installed"
    if imported:
        why = f"the program has imported {' and '.join(imported)}"
    elif installed:
        why = f"{' and '.join(installed)} are installed"
    else:
        why = "no framework is installed"
    return _FRAMEWORKS[0], f"{why}; set {ENVIRONMENT_VARIABLE} to choose"


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _normalize(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a platform name is a string such as 'torch-cpu', got {name!r}")
    return name.strip().lower().replace("_", "-")


def _read_all() -> None:
    """Register the entry points of other packages, once. Their classes are not imported yet."""
    global _entry_points_read
    if _entry_points_read:
        return
    _entry_points_read = True
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register_platform(entry.name, entry.value)
        except ValueError as error:
            LOG.warning("the platform entry point %s = %s is ignored: %s", entry.name, entry.value, error)
