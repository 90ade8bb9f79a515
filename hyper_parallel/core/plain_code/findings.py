"""Findings: operations on plain tensors that differ from the single-device model, with their line in the program."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Folder of this library. Frames in it, and in the framework, do not belong to the program.
_OWN = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Problem:
    """A finding without its place in the program, which is cached for all equal calls.

    Attributes:
        kind: ``"whole"``: a sharded dimension must be unsharded. ``"sum"``: a partial tensor must be reduced first.
            ``"count"``: a replicated tensor would be added once for each rank. ``"mixed"``: operands are sharded
            differently. ``"gradient"``: the gradient of a tensor is partial, and is never reduced. ``"input"``,
            ``"output"``: the input of a module, or the output of the model, has another placement than in the plan.
        text: the fact, as a sentence about the operation.
        remedy: the change that corrects the program.
        certain: whether it follows from layouts. Otherwise a placement was assumed, and the program may be right.
    """

    kind: str
    text: str
    remedy: str
    certain: bool = True


@dataclass(frozen=True)
class Finding:
    """A line of a program whose values or gradients differ from those of the single-device model.

    Attributes:
        kind: kind of the problem, as in `Problem`.
        where: file and line of the program.
        module: path of the innermost module whose forward is on the call stack; empty outside of the model.
        operation: name of the operation.
        text, remedy, certain: as in `Problem`.
    """

    kind: str
    where: str
    module: str
    operation: str
    text: str
    remedy: str
    certain: bool = True

    def __str__(self) -> str:
        of = f" in {self.module!r}" if self.module else ""
        return f"{self.where}{of}: {self.text}. {self.remedy}."


def place_in_program(paths: dict[int, str], framework: str) -> tuple[str, str]:
    """Return the file and line of the program's innermost frame, and the path of the innermost running module.

    Args:
        paths: id of a module -> path of the module.
        framework: folder of the framework.
    """
    frame: Any = sys._getframe(1)
    where, module = "", None
    while frame is not None and not (where and module is not None):
        code = frame.f_code
        if not where and _is_of_program(code.co_filename, framework):
            where = f"{code.co_filename}:{frame.f_lineno}"
        if module is None and code.co_varnames and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            module = paths.get(id(owner)) if owner is not None else None
        frame = frame.f_back
    return where or "(a line that Python does not know)", module or ""


def folder_of(cls: type) -> str:
    """Return the folder of the top-level package that defines a class."""
    package = sys.modules[cls.__module__.partition(".")[0]]
    return str(Path(str(package.__file__)).parent)


def _is_of_program(file: str, framework: str) -> bool:
    """Return whether ``file`` belongs to the program. Models of other libraries are part of the program."""
    if file.startswith(_OWN):
        return "/testing/" in file and "/testing/adapters/" not in file
    return not file.startswith(("<", framework))
