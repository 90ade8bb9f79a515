"""Command line of the simulated NPU; see `tests.simulated_npu`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.simulated_npu import build, preload

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """The environment for processes below `run`: the libraries, the hook that loads them, and torch_npu without its
    queue."""
    places = [str(Path(__file__).parent / "autostart"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        preload.FOLDER_VARIABLE: str(build.build()),
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        # torch_npu's queue would call HCCL from a thread of its own, out of the order that the stand-in relies on.
        "TASK_QUEUE_ENABLE": "0",
    }


def print_calls() -> None:
    """The table of CANN's calls: emulated, accepted without doing anything, and not emulated."""
    emulated, accepted = build.emulated_calls(build.build()), build.accepted_calls()
    missing = build.calls_of_wheel() - emulated - set(accepted)
    for name in sorted(emulated):
        print(f"{name:40} emulated")
    for name, reason in sorted(accepted.items()):
        print(f"{name:40} accepted: {reason}")
    for name in sorted(missing):
        print(f"{name:40} not emulated: ends the process with this name")
    print(f"{len(emulated)} emulated, {len(accepted)} accepted, {len(missing)} not emulated")


def main() -> int:
    """Entry point; returns the exit status, or becomes the command that it runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_npu", description="A simulated Ascend NPU.")
    commands = parser.add_subparsers(dest="action", required=True)
    run = commands.add_parser("run", help="run a command, and everything that it starts, with simulated NPUs")
    run.add_argument("command", nargs=argparse.REMAINDER)
    commands.add_parser("check", help="say why it cannot run here, and exit with 1, if it cannot")
    commands.add_parser("calls", help="print the table of CANN's calls")
    arguments = parser.parse_args()
    reason = build.unavailable_reason()
    if reason:
        print(f"no simulated NPU: {reason}", file=sys.stderr)
        return 1
    if arguments.action == "run":
        if not arguments.command:
            parser.error("run: which command?")
        os.execvpe(arguments.command[0], arguments.command, {**os.environ, **environment()})
    if arguments.action == "calls":
        print_calls()
    return 0


if __name__ == "__main__":
    sys.exit(main())
