"""Output of commands: text for people, or JSON for programs."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, NoReturn

# No import of the library here, because `hyper-parallel --version` and `--help` must be fast.
__all__ = ["Parser", "UsageError", "print_text", "show", "through_pipe"]


class UsageError(Exception):
    """Error for a command that cannot do its task. The message names the missing or wrong argument."""


class Parser(argparse.ArgumentParser):
    """A parser whose error messages contain no control characters, even if the user typed some."""

    def error(self, message: str) -> NoReturn:
        """Print a message and exit, as `argparse.ArgumentParser.error` does, without control characters."""
        from hyper_parallel.platform.terminal import printable_lines

        super().error(printable_lines(message))


def through_pipe(run: Callable[[Any], int], given: Any) -> int:
    """Return the exit status ``run(given)``, or 1 if the program that reads the output ended too early, as ``head``
    does."""
    try:
        status = run(given)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the output that Python still wants to write when it ends
        return 1
    return status


def show(text: str, data: Any, as_json: bool) -> None:
    """Print ``text``, or ``data`` as JSON."""
    if as_json:
        print(json.dumps(data, indent=2, default=str))
    else:
        print_text(text)


def print_text(text: str, file: Any = None) -> None:
    """Print ``text``. On a terminal it is folded to the width, and coloured if rich is installed."""
    from hyper_parallel.platform.terminal import printable_lines

    out = sys.stdout if file is None else file
    text = printable_lines(text)
    if getattr(out, "isatty", lambda: False)():
        from hyper_parallel.debug.text import fold_lines

        text = fold_lines(text, shutil.get_terminal_size().columns)
        try:
            console = importlib.import_module("rich.console").Console(file=out, soft_wrap=True)
        except ImportError:
            console = None
        if console is not None:
            console.print(text, markup=False)
            return
    print(text, file=out)
