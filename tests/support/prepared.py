"""Programs that run in forks of a process with the framework imported.

Importing a framework takes two seconds of a processor, for each rank. The test pool starts its workers the same way,
from the same process. The library is imported by each program itself.

A program runs as `python program.py` does. It has a module ``__main__``, variables of the environment and arguments of
its own. Its output goes to files, and so does the traceback of an error. Functions of `atexit` run at its end. It ends
by `os._exit`: the interpreter's own end needs an interpreter of its own.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import types
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["start"]


def start(
    arguments: Sequence[str], environment: dict[str, str], cwd: Path | None, output: Path, errors: Path
) -> BaseProcess:
    """Start a program.

    Args:
        arguments: a script and its arguments, or ``-c`` and a program with its arguments.
        environment: all variables.
        cwd: the folder in which it runs; None for the current one.
        output: file for its standard output.
        errors: file for its standard error.
    """
    # Not at the top: the program's process imports this module, and the library by itself.
    from hyper_parallel.testing.pool import prepared

    process = prepared(environment.get("HYPER_PARALLEL_PLATFORM")).Process(
        target=_run, args=([*arguments], environment, str(cwd or Path.cwd()), str(output), str(errors))
    )
    process.start()
    return process


def _run(arguments: list[str], environment: dict[str, str], cwd: str, output: str, errors: str) -> None:
    """Run a program in this process, which ends with it."""
    coverage = sys.modules.get("coverage")
    if (measurement := coverage and coverage.Coverage.current()) is not None:
        measurement.stop()  # a program of `_interpreter` is not measured either
    for descriptor, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os._exit(_status(arguments))


def _status(arguments: list[str]) -> int:
    """Run a program to its end, and return its exit status."""
    status = 0
    try:
        _execute(arguments)
    except SystemExit as end:
        if end.code is not None:
            status = end.code if isinstance(end.code, int) else 1
            if not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status


def _execute(arguments: list[str]) -> None:
    """Execute a script, or the program behind ``-c``, as the module ``__main__``."""
    main = types.ModuleType("__main__")
    if arguments[0] == "-c":
        source, name, sys.argv = arguments[1], "<string>", ["-c", *arguments[2:]]
        sys.path.insert(0, "")
    else:
        name, sys.argv = arguments[0], [*arguments]
        source = Path(name).read_text(encoding="utf-8")
        sys.path.insert(0, str(Path(name).resolve().parent))
        main.__file__ = name
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec"), vars(main))
