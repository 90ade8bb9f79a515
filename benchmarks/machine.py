"""The machine, the versions and the commit of a run."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform as machine
import subprocess
from pathlib import Path

__all__ = ["describe", "pin"]


def describe() -> dict[str, str | int | float]:
    """Facts about the machine that a reader needs to compare results."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    versions = {package: _version(package) for package in ("torch", "mindspore", "numpy")}
    return {
        "date": f"{datetime.date.today()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "load average at the start": round(load, 2),
        "system": f"{machine.system()} {machine.machine()}",
        "python": machine.python_version(),
        **versions,
        "hyper_parallel": _revision(),
    }


def pin(core: int = 0) -> None:
    """Keep this process and the threads that it starts from now on to one core."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else machine.processor() or "unknown"
