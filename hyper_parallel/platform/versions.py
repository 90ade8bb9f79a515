"""Releases of the frameworks that the tests run with, and a warning about other releases."""

from __future__ import annotations

import re
import warnings

__all__ = ["TESTED", "is_tested", "tested_versions", "warn_of_untested"]

#: framework -> the releases whose tests pass. A later patch release of one of them (2.14.2) counts as tested.
TESTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.13.0", "2.14.0", "2.14.1", "2.15.0"),
    "torch_npu": ("2.13.0", "2.14.0"),
    "mindspore": ("2.10.0",),
}

_warned: set[tuple[str, str]] = set()


def tested_versions(framework: str) -> str:
    """Return the tested releases as words, for a message.

    Example:
        >>> tested_versions("torch_npu")
        '2.13.0 and 2.14.0'
    """
    *others, last = TESTED[framework]
    return f"{', '.join(others)} and {last}" if others else last


def is_tested(framework: str, version: str) -> bool:
    """Return whether ``version`` is a tested release, or a patch release or build of a tested release.

    Example:
        >>> is_tested("torch", "2.13.2+cpu"), is_tested("torch", "2.16.0"), is_tested("torch", "2.15.0a0+git1234")
        (True, False, False)
    """
    found = re.match(r"(\d+)\.(\d+)(\.\d+)?(?=\+|\.post|$)", version)
    return found is not None and any(t.split(".")[:2] == list(found.groups()[:2]) for t in TESTED[framework])


def warn_of_untested(framework: str, version: str) -> None:
    """Warn, once in a process, if ``version`` of ``framework`` is not a tested release. The program continues in any
    case."""
    if is_tested(framework, version) or (framework, version) in _warned:
        return
    _warned.add((framework, version))
    warnings.warn(
        f"HyperParallel is tested with {framework} {tested_versions(framework)}, but the installed version is "
        f"{version}. The program continues. If an operation fails, install a tested version, for example pip install "
        f"'{framework.replace('_', '-')}=={TESTED[framework][-1]}'",
        RuntimeWarning,
        stacklevel=2,
    )
