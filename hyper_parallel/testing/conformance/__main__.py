"""Run the conformance suite on a backend: the checks that this project's own gates run, with a report.

    python -m hyper_parallel.testing.conformance my-backend --report conformance.md

The backend is found as programs find it: it is one of this package's, or an installed package names it in the
entry-point group ``hyper_parallel.platforms``. Exit status: 0 when checks ran and all passed, 1 when one failed or none
ran, 2 when the suite cannot be run, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform as python_platform
import sys
from collections.abc import Sequence
from pathlib import Path

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.registry import ENVIRONMENT_VARIABLE, PlatformError, get_platform
from hyper_parallel.testing import adapters, extent
from hyper_parallel.testing.conformance.report import Report
from hyper_parallel.testing.pool import SIZE

__all__ = ["main"]

CHECKS = Path(__file__).resolve().parent
#: pytest's exit status when checks failed, and when there were none. The report says both; others are pytest's own.
FAILED, NOTHING_RAN = 1, 5


def world_sizes(text: str) -> list[int]:
    """Parse numbers of ranks: ``"1,2"`` -> [1, 2]."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= SIZE:
        raise argparse.ArgumentTypeError(f"numbers from 1 to {SIZE}, separated by commas, not {text!r}")
    return sizes


def report_file(text: str) -> Path:
    """Return the path of a report. Its suffix must name a format."""
    path = Path(text)
    if path.suffix not in (".json", ".md"):
        raise argparse.ArgumentTypeError(f"a report is a .json or .md file, not {text!r}")
    return path


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hyper_parallel.testing.conformance",
        description="Run the conformance suite on a backend and report.",
        epilog="Further arguments go to pytest.",
    )
    every = ",".join(map(str, range(1, SIZE + 1)))
    parser.add_argument("backend", help="name or alias of the backend")
    parser.add_argument(
        "--adapter", metavar="MODULE", help="adapter of the backend, instead of the one its package names"
    )
    parser.add_argument(
        "--world-sizes", type=world_sizes, default=every, metavar="N,...", help=f"run checks on so many ranks ({every})"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="run the checks that match, as pytest has it")
    parser.add_argument("--quick", action="store_true", help="leave out checks that repeat others: minutes less")
    parser.add_argument(
        "--report", type=report_file, action="append", default=[], metavar="FILE", help="write .json or .md; repeatable"
    )
    return parser


def backend_of(name: str) -> Platform:
    """Return the tested backend. Check that the backend is registered under the name that its class states.

    Raises:
        PlatformError: when it is not known, cannot run here, or is registered under another name. A program that
            chooses a backend by its own name would then get another backend, or none.
    """
    backend = get_platform(name)
    try:
        same = get_platform(backend.name) is backend
    except PlatformError:
        same = False
    if not same:
        raise PlatformError(
            f"{name!r} is {type(backend).__name__}, whose attribute `name` is {backend.name!r}: register it under that "
            f"name, or change the attribute"
        )
    return backend


def comm_backend_of(backend: Platform) -> str:
    """Return the name of the communication backend. An environment variable can select it for torch backends."""
    chosen = os.environ.get("HYPER_PARALLEL_TORCH_BACKEND", "").strip().lower()
    return chosen if chosen and backend.Tensor.__module__.split(".")[0] == "torch" else backend.comm_backend


def versions_of(backend: Platform) -> dict[str, str]:
    """Return the versions that affect the result."""
    versions = {"Python": python_platform.python_version()}
    for package in ("hyper-parallel", "numpy", backend.Tensor.__module__.split(".")[0]):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    return versions


def run(
    backend: Platform, adapter: str, arguments: argparse.Namespace, pytest_arguments: Sequence[str]
) -> tuple[int, Report]:
    """Run pytest in this process; return its exit status and the report."""
    import pytest

    from hyper_parallel.testing.conformance import plugin

    report = Report(
        backend=backend.name,
        device_type=backend.device_type,
        comm_backend=comm_backend_of(backend),
        adapter=adapter,
        versions=versions_of(backend),
        world_sizes=arguments.world_sizes,
        complete=len(arguments.world_sizes) == SIZE and not (arguments.quick or arguments.k or pytest_arguments),
    )
    options = [
        str(CHECKS),
        # The folder of checks alone decides: not a configuration in the current folder.
        f"--rootdir={CHECKS}",
        f"--config-file={os.devnull}",
        "--import-mode=importlib",
        "-pno:cacheprovider",
        "-ofaulthandler_timeout=300",
        "--continue-on-collection-errors",  # the other files print enough
        "-q",
        *(["-k", arguments.k] if arguments.k else []),
        *pytest_arguments,
    ]
    return int(pytest.main(options, plugins=[plugin, plugin.Counter(report)])), report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    arguments, pytest_arguments = make_parser().parse_known_args(argv)
    if importlib.util.find_spec("pytest") is None:
        return _cannot_run("the checks are written for pytest, which is not installed: pip install 'pytest>=8.4'")
    if arguments.adapter:
        os.environ[adapters.ENVIRONMENT_VARIABLE] = arguments.adapter
    # Read when the frameworks are loaded, here and in the workers: ranks share few cores, and MindSpore warns a lot.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOG_v", "3")
    os.environ[extent.VARIABLE] = "" if arguments.quick else "yes"
    try:
        backend = backend_of(arguments.backend)
        adapter = adapters.adapter_of(backend.name)
        os.environ[ENVIRONMENT_VARIABLE] = backend.name
        adapters.load_adapter(adapter)
    except (PlatformError, adapters.AdapterError) as error:
        return _cannot_run(str(error))
    status, report = run(backend, adapter, arguments, pytest_arguments)
    for path in arguments.report:
        report.write(path)
    print(f"\n{report.to_text()}", flush=True)
    if status not in (0, FAILED, NOTHING_RAN):
        return status
    return 0 if report.ok else 1


def _cannot_run(reason: str) -> int:
    print(f"the conformance suite cannot be run: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
