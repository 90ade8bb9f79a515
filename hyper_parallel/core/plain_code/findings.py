"""Findings: operations on plain tensors that differ from the single-device model, with their line in the program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A finding without its line in the program. It is cached for all equal calls.

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
