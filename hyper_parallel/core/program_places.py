"""Places in the program: the line that called the library, its variables, and the module whose forward is running.

The search walks the call stack. It runs only when a message is made.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["line_of_program", "place_in_program", "variable_of"]

#: Folder of this library. Frames in it, and in the framework, do not belong to the program.
_OWN = str(Path(__file__).parents[1])


def place_in_program(paths: Mapping[int, str], tensor: type, frame: Any = None) -> tuple[str, str]:
    """Return the file and line of the program's innermost frame, and the path of the innermost running module.

    Args:
        paths: id of a module -> path of the module.
        tensor: class of the framework's tensors.
        frame: innermost frame to look at; None for that of the caller.
    """
    frame = frame or sys._getframe(1)
    framework, where, module = _folder_of(tensor), "", None
    while frame is not None and not (where and module is not None):
        code = frame.f_code
        if not where and _is_of_program(code.co_filename, framework):
            where = f"{code.co_filename}:{frame.f_lineno}"
        if module is None and code.co_varnames and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            module = paths.get(id(owner)) if owner is not None else None
        frame = frame.f_back
    return where or "(a line that Python does not know)", module or ""


def line_of_program(tensor: type, frame: Any = None) -> str:
    """Return the file, the number and the text of the program's innermost line: ``"train.py:41: print(loss.item())"``.

    Arguments are those of `place_in_program`.
    """
    where, _ = place_in_program({}, tensor, frame or sys._getframe(1))
    file, _, number = where.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    return f"{where}: {text}" if text else where


def variable_of(x: Any, tensor: type) -> str:
    """Return the local variable that holds ``x`` in the program's innermost frame, by name; "" if there is none.

    Args:
        x: an object.
        tensor: class of the framework's tensors.
    """
    frame, framework = sys._getframe(1), _folder_of(tensor)
    while frame is not None and not _is_of_program(frame.f_code.co_filename, framework):
        frame = frame.f_back  # type: ignore[assignment]
    held = {} if frame is None else frame.f_locals
    return next((name for name, value in held.items() if value is x and name.isidentifier()), "")


def _folder_of(cls: type) -> str:
    """Return the folder of the top-level package that defines a class."""
    package = sys.modules[cls.__module__.partition(".")[0]]
    return str(Path(str(package.__file__)).parent)


def _is_of_program(file: str, framework: str) -> bool:
    """Return whether ``file`` belongs to the program. Models of other libraries are part of the program."""
    if file.startswith(_OWN):
        return "/testing/" in file and "/testing/adapters/" not in file
    return not file.startswith(("<", framework))
