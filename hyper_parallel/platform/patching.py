"""Patches of a framework: installed together or not at all, each checked before.

Some functions of a framework do not notice a DTensor, or compute on it incorrectly. Each backend lists its replacements
in one module, ``hyper_parallel/platform/<framework>/patches.py``, as a `PatchSet`. The set is installed when the
DTensor class is made, and stays. A process that never makes a DTensor has no patches. For plain tensors, replacements
do the same as the originals. docs/patches.md shows the lists. This module imports no framework.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal

from hyper_parallel.platform.imports import WhenImported
from hyper_parallel.platform.patch_places import ABSENT, Entry, Place, place_of

__all__ = ["Patch", "PatchSet", "calling", "installed", "takes"]

#: The installed patch sets.
_INSTALLED: list[PatchSet] = []


def _is_callable(original: Any) -> str | None:
    # A class method in the dict of its class is not callable itself.
    return None if callable(getattr(original, "__func__", original)) else "is not a function"


def takes(parameters: str) -> Callable[[Any], str | None]:
    """Return a check for `Patch`: the original must be a function with exactly these parameters.

    Example:
        >>> takes("a b")(lambda a, c: 0)
        "takes ('a', 'c') and not ('a', 'b')"
    """
    names = tuple(parameters.split())

    def check(original: Any) -> str | None:
        try:
            found = tuple(inspect.signature(getattr(original, "__func__", original)).parameters)
        except (TypeError, ValueError):
            return "is not a function of known parameters"
        return None if found == names else f"takes {found} and not {names}"

    return check


def calling(function: Callable, **options: Any) -> Callable[[Any], Callable]:
    """Return a ``make`` for `Patch`: the replacement calls ``function(original, ...)`` with its own arguments and
    ``options``.

    Example:
        >>> double = calling(lambda original, x, times: original(x) * times, times=2)
        >>> double(abs)(-3)
        6
    """

    def make(original: Callable) -> Callable:
        @wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs, **options)

        return replacement

    return make


@dataclass(frozen=True)
class Patch:
    """One change to a framework: an attribute of a module or class replaced, or an entry in a list or dict.

    Attributes:
        targets: dotted names of the places, all of which hold the same object. ``"torch.optim.Adam.step"`` is an
            attribute. ``"package.module.names[]"`` adds an entry to a list or set, or several if ``make`` returns a
            tuple. ``"package.module.table[key]"`` adds an entry to a dict. ``"package.module.function.__code__"`` is
            the code that a function runs, also for callers that hold it under another name.
        reason: the error or wrong result without it.
        versions: versions of the framework that it was tested with.
        make: the original -> its replacement; for an entry, the list, set or dict -> the entry. All replacements are
            made before anything is replaced.
        held: where the attribute is found: in the module or class itself, in a base class, in either, or not at all.
            `PatchSet.uninstall` restores attributes of the module or class itself, and deletes the others.
        check: original -> the reason why it does not fit, or None.
        required: whether results would be wrong without it. Then no DTensors can be made if a target is not as
            expected. Other patches are skipped, with a warning.
        everywhere: whether every loaded module of the framework that has the object, under any name, is a target too.
        after: a module that holds a target and takes long to import. If it is not imported yet, the patch waits for its
            import.
    """

    targets: tuple[str, ...]
    reason: str
    versions: str
    make: Callable[[Any], Any]
    held: Literal["own", "inherited", "either", "absent"] = "own"
    check: Callable[[Any], str | None] = _is_callable
    required: bool = True
    everywhere: bool = False
    after: str = ""

    @property
    def waits(self) -> bool:
        """Return whether the patch waits for a module that is not imported yet."""
        return bool(self.after) and self.after not in sys.modules


def _all_targets(verified: Sequence[tuple[Patch, Any]]) -> list[list[str]]:
    """Return the targets of each patch, including those that `Patch.everywhere` adds. One pass over the framework's
    loaded modules serves all patches."""
    keys = [(_framework(patch.targets[0]), id(original)) if patch.everywhere else None for patch, original in verified]
    elsewhere: dict[tuple[str, int], list[str]] = {key: [] for key in keys if key is not None}
    frameworks = {framework for framework, _ in elsewhere}
    for name, module in list(sys.modules.items()):
        framework = _framework(name)
        if module is not None and framework in frameworks:
            for key, value in list(vars(module).items()):
                if (found := elsewhere.get((framework, id(value)))) is not None:
                    found.append(f"{name}.{key}")
    others = [() if key is None else elsewhere[key] for key in keys]
    return [list(dict.fromkeys((*patch.targets, *more))) for (patch, _), more in zip(verified, others, strict=True)]


def _framework(name: str) -> str:
    return name.partition(".")[0]


# ----------------------------------------------------------------------------------------------------------- the set
@dataclass(frozen=True)
class _Done:
    patch: Patch
    place: Place
    target: str
    original: Any
    replacement: Any


class PatchSet:
    """All patches of one framework, which are installed together.

    Args:
        framework: its name, for messages.
        version: its version.
        patches: patches in the order of installation.
    """

    def __init__(self, framework: str, version: str, patches: Sequence[Patch]) -> None:
        self.framework, self.version, self.patches = framework, version, tuple(patches)
        self._done: list[_Done] | None = None
        self._waiting: list[WhenImported] = []

    @property
    def installed(self) -> tuple[Patch, ...]:
        """The patches that are installed now."""
        return tuple(dict.fromkeys(done.patch for done in self._done or ()))

    def install(self) -> None:
        """Install all patches; does nothing if they are installed.

        Raises:
            RuntimeError: a required target is missing or does not fit. Then nothing has been replaced.
        """
        if self._done is not None:
            return
        done = self._replace([patch for patch in self.patches if not patch.waits])
        self._waiting = [
            WhenImported(name, partial(self._install_late, name))
            for name in dict.fromkeys(patch.after for patch in self.patches if patch.waits)
        ]
        self._done = done
        _INSTALLED.append(self)

    def _install_late(self, name: str) -> None:
        """Install the patches that waited for the module ``name``."""
        if self._done is not None:
            self._done += self._replace([patch for patch in self.patches if patch.after == name])

    def _replace(self, patches: Sequence[Patch]) -> list[_Done]:
        """Install these patches, all or none."""
        done: list[_Done] = []
        verified = self._verified(patches)
        for (patch, original), targets in zip(verified, _all_targets(verified), strict=True):
            replacement = patch.make(original)
            done += [_Done(patch, place_of(target), target, original, replacement) for target in targets]
        for i, change in enumerate(done):
            try:
                change.place.write(change.replacement)
            except BaseException:
                self._take_back(done[:i])
                raise
        return done

    def uninstall(self) -> None:
        """Restore all originals; does nothing if no patches are installed. Used for patches that DTensors do not need,
        such as the patches that observe a program."""
        if self._done is None:
            return
        for waiting in self._waiting:
            waiting.cancel()
        done, self._done = self._done, None
        _INSTALLED.remove(self)
        self._take_back(done)

    def _verified(self, patches: Sequence[Patch]) -> list[tuple[Patch, Any]]:
        """Return the patches that can be installed, with the originals."""
        found = []
        for patch in patches:
            original, wrong = _inspected(patch)
            if not wrong:
                found.append((patch, original))
                continue
            message = f"{self.framework} {self.version}: {wrong}; tested with {patch.versions}. "
            if patch.required:
                raise RuntimeError(
                    f"{message}Without this patch: {patch.reason}. So no DTensor can be made with this version, and "
                    f"{self.framework} was left unchanged: install a tested version"
                )
            warnings.warn(f"{message}The patch is left out: {patch.reason}", RuntimeWarning, stacklevel=2)
        return found

    def _take_back(self, changes: Sequence[_Done]) -> None:
        for change in reversed(changes):
            if not change.place.put_back(change.replacement, change.original):
                warnings.warn(
                    f"{change.target} was changed after hyper_parallel patched it, and is left unchanged",
                    RuntimeWarning,
                    stacklevel=3,
                )


def _inspected(patch: Patch) -> tuple[Any, str | None]:
    """Return the original, and the reason why a target does not fit, if any."""
    first: Any = ABSENT
    for i, target in enumerate(patch.targets):
        try:
            place = place_of(target)
        except (ImportError, AttributeError, KeyError) as error:
            return None, f"{target} does not exist ({error})"
        held, original = place.held(), place.original()
        if held != patch.held and (patch.held != "either" or held == "absent"):
            return None, f"{target} is {_HELD[held]}, but expected to be {_HELD[patch.held]}"
        if i and original is not first:
            return None, f"{target} is not the same object as {patch.targets[0]}"
        first = original
        if not isinstance(place, Entry) and held != "absent":
            wrong = patch.check(original)
            if wrong:
                return None, f"{target} {wrong}"
    return first, None


_HELD = {
    "own": "defined there",
    "inherited": "inherited",
    "either": "defined there or inherited",
    "absent": "missing",
}


# -------------------------------------------------------------------------------------------------- installed patches
def installed() -> dict[str, tuple[Patch, ...]]:
    """Return the installed patches of this process, by framework.

    Example:
        >>> {framework: [p.targets for p in patches] for framework, patches in installed().items()}  # doctest: +SKIP
        {'torch': [('torch.autograd.Function.apply',), ...]}
    """
    return {one.framework: one.installed for one in _INSTALLED}
