"""Findings: an operation of plain code that is not what one device computes, with the line of the program."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Folder of this package: frames in it, and in the framework, are none of the program.
_OWN = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Problem:
    """A finding without its place, as it is kept for all equal calls.

    Attributes:
        kind: ``"whole"``: a dimension that is cut must be whole. ``"sum"``: a sum over ranks comes too late.
            ``"count"``: a replicated tensor would count once for each rank. ``"mixed"``: a part meets a tensor that is
            cut otherwise. ``"gradient"``: the gradient of a tensor is one summand a rank, and nothing adds these up.
            ``"input"``, ``"output"``: a module takes, or the model gives, another part than the plan says.
        text: the fact, as a sentence about the operation.
        remedy: what to write.
        certain: whether layouts say so. Otherwise the tensor has no mark, and the program may know better.
    """

    kind: str
    text: str
    remedy: str
    certain: bool = True


@dataclass(frozen=True)
class Finding:
    """A place of a program where its numbers, or its gradients, depart from those of one device.

    Attributes:
        kind: see `Problem`.
        where: file and line of the program.
        module: path of the innermost module whose forward is on the call stack; empty outside of the model.
        operation: name of the operation.
        text, remedy, certain: see `Problem`.
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
    """File and line of the innermost frame of the program, and the path of the innermost module that runs.

    Args:
        paths: id of a module -> its path.
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
    """The folder of the package of a class."""
    package = sys.modules[cls.__module__.partition(".")[0]]
    return str(Path(str(package.__file__)).parent)


def _is_of_program(file: str, framework: str) -> bool:
    """Return whether lines of ``file`` belong to the program. Models of other libraries do, too."""
    if file.startswith(_OWN):
        return "/testing/" in file and "/testing/adapters/" not in file
    return not file.startswith(("<", framework))
