"""``hyper-parallel env``: backends, versions and devices of this machine."""

from __future__ import annotations

import argparse
import platform as python_platform
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import hyper_parallel
from hyper_parallel.cli.output import show
from hyper_parallel.debug.text import TERMINAL, format_table
from hyper_parallel.platform import available_platforms, get_platform
from hyper_parallel.platform.versions import is_tested, tested_versions

__all__ = ["environment", "run"]

_PACKAGES = ("numpy", "torch", "torch-npu", "mindspore", "transformers", "safetensors", "rich", "pytest")


def environment() -> dict[str, Any]:
    """Return versions, backends, and the reasons why backends cannot be used."""
    found: dict[str, Any] = {
        "hyper_parallel": hyper_parallel.__version__,
        "python": python_platform.python_version(),
        "system": python_platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "backends": {},
        "selected": None,
    }
    for name, reason in available_platforms().items():
        entry: dict[str, Any] = {"available": reason is None, "reason": reason}
        if reason is None:
            backend = get_platform(name)
            framework = name.partition("-")[0]
            entry |= {
                "device": backend.device_type,
                "communication": backend.comm_backend,
                "devices": backend.device_count(),
                "patches": list(backend.patched_names()),
                "tested": is_tested(framework, str(_version(framework))),
                "tested_versions": tested_versions(framework),
            }
        found["backends"][name] = entry
    try:
        found["selected"] = get_platform().name
    except hyper_parallel.platform.PlatformError as error:
        found["selected_error"] = str(error).splitlines()[0]
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _wrapped(text: str) -> str:
    return textwrap.fill(text, TERMINAL, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def run(arguments: argparse.Namespace) -> int:
    """Print `environment`; return 0 if some backend can be used."""
    found = environment()
    rows = []
    for name, entry in found["backends"].items():
        mark = "*" if name == found["selected"] else " "
        if entry["available"]:
            tested = "" if entry["tested"] else f"; not tested: those that are, {entry['tested_versions']}"
            what = f"{entry['devices']} x {entry['device']}, {entry['communication']}{tested}"
        else:
            what = f"not available: {entry['reason']}"
        rows.append((mark, name, what))
    packages = ", ".join(f"{name} {v}" for name, v in found["packages"].items() if v)
    lines = [
        _wrapped(f"hyper-parallel {found['hyper_parallel']}, Python {found['python']} on {found['system']}"),
        sys.executable,
        _wrapped(f"packages: {packages}"),
        "",
        format_table(("", "backend", ""), rows, width=TERMINAL),
        "",
        "* is used here; HYPER_PARALLEL_PLATFORM chooses another" if found["selected"] else found["selected_error"],
    ]
    patched = {name: entry["patches"] for name, entry in found["backends"].items() if entry.get("patches")}
    seen: set[tuple] = set()
    for name, patches in patched.items() if arguments.patches else ():
        if tuple(patches) not in seen:
            seen.add(tuple(patches))
            framework = name.partition("-")[0]
            text = f"patched in {framework} when its first DTensor is made (docs/patches.md): {', '.join(patches)}"
            lines.append(_wrapped(text))
    show("\n".join(lines), found, arguments.json)
    return 0 if any(entry["available"] for entry in found["backends"].values()) else 1
