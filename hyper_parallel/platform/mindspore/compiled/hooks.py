"""Cells that convert inputs and outputs inside of a graph, in place of hooks of styles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspore import Tensor, nn

from hyper_parallel.platform.contract import Conversions, Program
from hyper_parallel.platform.mindspore.compiled.forwards import (
    GraphCell,
    NotTracedError,
    make_cell,
    original_class,
)
from hyper_parallel.platform.mindspore.compiled.functions import Ranks, Same, step_cell
from hyper_parallel.platform.mindspore.compiled.readers import shared_inputs
from hyper_parallel.platform.mindspore.compiled.shapes import ShapeCheck

__all__ = ["make_surrounded"]


class _Conversion(GraphCell):
    """Cell that converts one input or output of ``module``."""

    def __init__(self, module: Any, how: Program) -> None:
        super().__init__()
        takes: Any = how.takes
        self.move, self.check = step_cell(Ranks(how), how.given, takes), ShapeCheck(module, how, takes)

    def construct(self, x: Tensor) -> Tensor:
        self.check(x.shape, x.dtype)
        return self.move(x)


class _Surrounded(GraphCell):
    """A cell with conversions of its inputs and outputs, and with gradient sums that several of its layers share."""

    def __init__(
        self,
        module: nn.Cell,
        body: nn.Cell,
        inputs: Sequence[Conversions],
        outputs: Sequence[Conversions],
        reads: dict[int, nn.Cell],
    ) -> None:
        super().__init__()
        self.hold("original", module)
        self.hold("body", body)
        converted = _slots(module, inputs)
        converted += [Same() for _ in range(1 + max(reads, default=-1) - len(converted))]
        self.inputs = nn.CellList(converted, auto_prefix=False)
        self.reads = nn.CellList([reads.get(i, Same()) for i in range(len(converted))], auto_prefix=False)
        self.outputs = nn.CellList(_slots(module, outputs), auto_prefix=False)
        self.known, self.given = len(self.inputs), len(self.outputs)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        taken: Any = ()
        for i in range(len(args)):
            if i < self.known:
                taken = taken + (self.reads[i](self.inputs[i](args[i])),)  # noqa: RUF005
            else:
                taken = taken + (args[i],)  # noqa: RUF005
        y = self.body.construct(*taken, **kwargs)
        if self.given == 0:
            return y
        if self.given == 1:
            return self.outputs[0](y)
        found: Any = ()
        for i in range(self.given):
            found = found + (self.outputs[i](y[i]),)  # noqa: RUF005
        return found


def _slots(module: nn.Cell, hooks: Sequence[Conversions]) -> list[nn.Cell]:
    """Return a conversion for each of the first inputs, or for each output."""
    if not hooks:
        return []
    if len(hooks) > 1:
        raise NotTracedError("several styles convert its inputs or its outputs")
    (how,) = hooks
    cells: list[nn.Cell] = [Same() for _ in range(how.count)]
    for key, program in how.programs:
        if not program.local:
            raise NotTracedError("a style passes DTensors to it: set use_local_output=True in that style")
        if not isinstance(key, int):
            raise NotTracedError("a style converts keyword inputs")
        cells[key] = _Conversion(module, program)
    return cells


def make_surrounded(module: nn.Cell, columns: Mapping[str, Program]) -> GraphCell:
    """Return the stand-in for ``module``, which has hooks of styles or several column-parallel layers.

    Args:
        module: the cell.
        columns: column-parallel linear layers directly below the cell, by attribute name. They may share the sum of
            the gradient of their input.

    Raises:
        NotTracedError: for a module that graphs cannot hold.
    """
    before, after = list(module._forward_pre_hook.values()), list(module._forward_hook.values())
    hows: list[Any] = [getattr(hook, "graph_form", None) for hook in (*before, *after)]
    if None in hows:
        raise NotTracedError("one of its hooks or styles is not supported in graphs")
    reads: dict[int, nn.Cell] = {}
    body = _copied(module)
    for position, names in shared_inputs(original_class(module), frozenset(columns)).items():
        how = columns[min(names)]
        reads[position] = step_cell(Ranks(how), None, None, for_parts=True)
        for name in names:
            layer = make_cell(module._cells[name], columns[name])
            layer.read = Same()
            object.__setattr__(body, name, layer)
    return _Surrounded(module, body, hows[: len(before)], hows[len(before) :], reads)


def _copied(module: nn.Cell) -> nn.Cell:
    """Return a cell with the code, attributes, parameters and cells of ``module``, but without its hooks."""
    cls = original_class(module)
    new: Any = cls.__new__(cls)
    nn.Cell.__init__(new, auto_prefix=False)
    same = {"_cells", "_params", "_buffers", "training"}
    for name, value in vars(module).items():
        if name in same or not (name in vars(new) or name.startswith("_graph")):
            object.__setattr__(new, name, value)
    return new
