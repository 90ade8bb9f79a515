"""Run a command that is silent for minutes, and print every ten seconds how long it has been running.

    python3 ci/heartbeat.py [--folder .venv/all] [--every 10] "making .venv/all" COMMAND...

Prints lines such as ``making .venv/all: 45 s, 2.1 GB``, with the size of the folder that the command fills. Returns
the exit status of the command. Needs only Python, since it runs before any environment exists.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

__all__ = ["main", "size_of"]


def size_of(folder: str) -> int:
    """Return the bytes on disk of the files below ``folder``. Files that vanish meanwhile are ignored."""
    total, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return total


def readable(size: int) -> str:
    """Return ``size``, in bytes, as text in MB or GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, or 128 plus the number of the signal that ended it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="which folder's size to print")
    parser.add_argument("--every", type=float, default=10, metavar="SECONDS", help="how often to print a line")
    parser.add_argument("title", help="name of the command in the lines")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a program and its arguments")
    arguments = parser.parse_args(argv)
    if not arguments.command:
        parser.error("which command?")

    def say(state: str = "") -> None:
        size = f", {readable(size_of(arguments.folder))}" if arguments.folder else ""
        print(f"{arguments.title}: {time.monotonic() - started:.0f} s{size}{state}", flush=True)

    started = time.monotonic()
    try:
        process = subprocess.Popen(arguments.command)
    except OSError as error:
        print(f"{arguments.title}: {error}", file=sys.stderr)
        return 127
    while True:
        try:
            status = process.wait(arguments.every)
            break
        except subprocess.TimeoutExpired:
            say()
        except KeyboardInterrupt:  # the command got the interrupt too: wait until it ends
            continue
    say(f", ended with status {status}" if status else ", done")
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
