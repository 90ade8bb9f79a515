"""What hooks of styles do to inputs and outputs, around a cell inside of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from mindspore import Tensor, nn

from hyper_parallel.platform.contract import CompiledInputs, Conversion
from hyper_parallel.platform.mindspore.compiled.forwards import GraphCell, NotTracedError, move_cell
from hyper_parallel.platform.mindspore.compiled.functions import Ranks, Same
from hyper_parallel.platform.mindspore.compiled.shapes import ShapeCheck

__all__ = ["make_surrounded"]


class _Conversion(GraphCell):
    """One input or output to another layout."""

    def __init__(self, module: Any, how: CompiledInputs, one: Conversion) -> None:
        super().__init__()
        self.move = move_cell(Ranks(how.group, how.size, how.rank), one.given, one.wanted)
        about = SimpleNamespace(
            kind="conversion",
            given=one.given,
            size=how.size,
            sizes=(),
            normalized=0,
            layouts={},
            compare=one.compare,
            mesh=how.mesh,
        )
        self.check = ShapeCheck(module, about, output=one.wanted)

    def construct(self, x: Tensor) -> Tensor:
        self.check(x.shape, x.dtype)
        return self.move(x)


class _Surrounded(GraphCell):
    """A cell between the conversions of its inputs and outputs."""

    def __init__(self, module: nn.Cell, inputs: Sequence[CompiledInputs], outputs: Sequence[CompiledInputs]) -> None:
        super().__init__()
        self.hold("body", module)
        self.inputs = nn.CellList(_slots(module, inputs), auto_prefix=False)
        self.outputs = nn.CellList(_slots(module, outputs), auto_prefix=False)
        self.known, self.given = len(self.inputs), len(self.outputs)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        taken = ()
        for i in range(len(args)):
            if i < self.known:
                taken = taken + (self.inputs[i](args[i]),)
            else:
                taken = taken + (args[i],)
        y = self.body.construct(*taken, **kwargs)
        if self.given == 0:
            return y
        if self.given == 1:
            return self.outputs[0](y)
        found = ()
        for i in range(self.given):
            found = found + (self.outputs[i](y[i]),)
        return found


def _slots(module: nn.Cell, hooks: Sequence[CompiledInputs]) -> list[nn.Cell]:
    """The cell for each of the first inputs, or for each output."""
    if not hooks:
        return []
    if len(hooks) > 1:
        raise NotTracedError("several styles convert its inputs or its outputs")
    (how,) = hooks
    if not how.local:
        raise NotTracedError("a style gives it DTensors: give that style use_local_output=True")
    cells: list[nn.Cell] = [Same() for _ in range(how.count)]
    for one in how.conversions:
        if not isinstance(one.key, int):
            raise NotTracedError("a style converts inputs that are given by keyword")
        cells[one.key] = _Conversion(module, how, one)
    return cells


def make_surrounded(module: nn.Cell) -> GraphCell:
    """The cell that stands for ``module``, which has hooks of styles.

    Raises:
        NotTracedError: where there is none.
    """
    before, after = list(module._forward_pre_hook.values()), list(module._forward_hook.values())
    hows = [getattr(hook, "graph_form", None) for hook in (*before, *after)]
    if None in hows:
        raise NotTracedError("a hook of it, or a style, has no form in graphs")
    return _Surrounded(module, hows[: len(before)], hows[len(before) :])
