"""Stand-ins for styled modules in MindSpore's graphs: cells of plain local tensors and collectives.

A stand-in is built from the data of a style (`Program`). The stand-in holds the parameters of its module under special
names. By these names MindSpore's parser recognises a distributed parameter, and reads its local tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mindspore import Tensor, mint, nn, ops

from hyper_parallel.platform.contract.programs import KEPT, SUMMANDS, Program, are_planned
from hyper_parallel.platform.mindspore.compiled.functions import Ranks, Same, ScatterAndAdd, step_cell
from hyper_parallel.platform.mindspore.compiled.shapes import ShapeCheck
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor

__all__ = ["GraphCell", "Layer", "NotTracedError", "make_cell", "original_class"]


class NotTracedError(Exception):
    """Raised with the reason why a module cannot be in a graph."""


def original_class(module: nn.Cell) -> Any:
    """Return the class that a cell had before styles replaced its class."""
    return next(cls for cls in type(module).__mro__ if "_of_style" not in cls.__dict__)


class GraphCell(nn.Cell):
    """Cell that replaces another cell in graphs. The new cell registers no parameters, because these belong to the
    replaced cell.

    Attributes:
        original: the replaced cell, if its other attributes may be read.
        owned: names of the parameters of the replaced cell. Reading these names from other code raises an error.
    """

    original: nn.Cell | None = None

    def __init__(self, owned: Iterable[str] = ()) -> None:
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "owned", frozenset(owned))

    def hold(self, name: str, p: Any) -> None:
        """Let ``construct`` read the parameter ``p`` as ``name``."""
        object.__setattr__(self, name, p)


def make_cell(module: nn.Cell, how: Program) -> Layer:
    """Return the stand-in for ``module``, with its current parameters.

    Raises:
        NotTracedError: for a module that graphs cannot hold.
    """
    if not how.local:
        raise NotTracedError("its output is a DTensor: set use_local_output=True in its style")
    own = {name: p for name, p in module._params.items() if p is not None}
    if not are_planned(own, how.layouts.items(), InterceptedTensor):
        raise NotTracedError("its parameters were replaced after its style distributed them")
    return Layer(module, how, own)


class Layer(GraphCell):
    """A cell that computes a `Program`: the step of the input, the operation, and the step of the output."""

    def __init__(self, module: Any, how: Program, own: dict[str, Any]) -> None:
        super().__init__(own)
        ranks = Ranks(how)
        takes: Any = how.given if how.takes == KEPT else how.takes
        gives: Any = takes if how.gives == KEPT else how.gives
        wanted: Any = gives if how.wanted == KEPT else how.wanted
        _check_steps(how, own, takes, gives, wanted)
        of_input = how.sizes if takes == -1 and gives == SUMMANDS else ()
        self.read = step_cell(ranks, how.given, takes, of_input, how.input_for_parts)
        self.move = step_cell(ranks, gives, wanted, how.sizes if gives == -1 else ())
        self.check = ShapeCheck(module, how, wanted, output_dims=int(_is_embedding(module)))
        self.operate, bias = _operation(module, how, own, ranks)
        self.bias_inside = bias is not None and wanted is not None and how.size > 1
        self.bias_after = bias is not None and not self.bias_inside
        if self.bias_inside:
            self.add_both = ScatterAndAdd(ranks, wanted)
        if bias is not None:
            self.hold("_bias", bias)
        self.last = how.partial_features
        self.read_last = step_cell(ranks, None, None, for_parts=True)

    def construct(self, x: Tensor) -> Tensor:
        self.check(x.shape, x.dtype)
        y = self.operate(self.read(x))
        if self.bias_inside:
            return self.add_both(y, self._bias)
        y = self.move(y)
        if self.bias_after:
            y = y + self._bias
        n = self.last
        if n == 0:
            return y
        if n < 0:
            return self.read_last(y)
        return mint.cat((y[..., :-n], self.read_last(y[..., -n:])), -1)


def _check_steps(how: Program, own: dict[str, Any], takes: Any, gives: Any, wanted: Any) -> None:
    """Raise NotTracedError for steps that graphs cannot do."""
    if how.gives == KEPT and takes != how.given:
        raise NotTracedError("its input would be redistributed from one sharded dimension to another")
    if how.packed and gives == -1 and wanted != -1:
        raise NotTracedError("its weight packs several matrices, and its output is gathered")
    if how.packed and takes == -1 and how.given != -1:
        raise NotTracedError("its weight packs several matrices, and its input is replicated")
    if takes == -1 and how.given not in (None, -1) and not how.even:
        raise NotTracedError("its input would be redistributed between shards of unequal sizes")
    if gives == -1 and wanted not in (None, -1) and how.size > 1 and not how.even:
        raise NotTracedError("its output would be redistributed between shards of unequal sizes")
    if gives == SUMMANDS and wanted == -1 and _outputs(own) % how.size:
        raise NotTracedError("its output would be sharded along its features, into shards of unequal sizes")


def _outputs(own: dict[str, Any]) -> int:
    """Return the number of output features of a row-parallel layer: the size of its weight's unsharded dimension."""
    weight = next(p for p in own.values() if len(p.shape) == 2)
    return int(weight.shape[1 - weight._layout.placements[0].dim])


# ------------------------------------------------------------------------------------------------ operations
def _operation(module: Any, how: Program, own: dict[str, Any], ranks: Ranks) -> tuple[nn.Cell, Any]:
    """Return the operation on local tensors, and the bias to add to the all-reduced output, or None."""
    if how.sizes and not _is_embedding(module):
        known = original_class(module) in (nn.Dense, mint.nn.Linear)
        if not known or getattr(module, "activation", None) is not None:
            raise NotTracedError("it is an nn.Dense with an activation, or an unsupported kind of linear layer")
        summands = how.gives == SUMMANDS
        bias = own.get("bias")
        return _Linear(own["weight"], None if summands else bias), bias if summands else None
    if how.sizes:
        return _Embedding(module, how, own), None
    return _body(module, own, lambda: step_cell(ranks, None, None, for_parts=how.parameters_for_parts)), None


def _is_embedding(module: Any) -> bool:
    return isinstance(module, (nn.Embedding, mint.nn.Embedding))


class _Linear(GraphCell):
    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.hold("_weight", weight)
        self.has_bias = bias is not None
        if self.has_bias:
            self.hold("_bias", bias)

    def construct(self, x: Tensor) -> Tensor:
        if self.has_bias:
            return mint.nn.functional.linear(x, self._weight, self._bias)
        return mint.nn.functional.linear(x, self._weight)


class _Embedding(GraphCell):
    """An embedding lookup. If the rows are sharded, ids on other ranks give zeros."""

    def __init__(self, module: Any, how: Program, own: dict[str, Any]) -> None:
        super().__init__(own)
        special = getattr(module, "use_one_hot", False) or getattr(module, "max_norm", None) is not None
        if isinstance(module, mint.nn.Embedding):
            special = special or module.padding_idx is not None or module.scale_grad_by_freq
        if len(own) != 1 or special:
            raise NotTracedError("this kind of module, or an embedding with other options, is not traced")
        self.looks_up = original_class(module) is nn.Embedding
        if self.looks_up:
            self.hold("_table", *own.values())  # the cell's own code would expect the full number of features
        else:
            self.body = _body(module, own, Same)
        self.has_all = how.gives != SUMMANDS
        self.first, self.count = sum(how.sizes[: how.rank]), how.sizes[how.rank]

    def look_up(self, ids: Tensor) -> Tensor:
        return ops.gather(self._table, ids, 0) if self.looks_up else self.body(ids)

    def construct(self, ids: Tensor) -> Tensor:
        if self.has_all:
            return self.look_up(ids)
        elsewhere = ops.logical_or(ids < self.first, ids >= self.first + self.count)
        y = self.look_up(ops.masked_fill(ids - self.first, elsewhere, 0))
        return ops.masked_fill(y, elsewhere.expand_dims(-1), 0.0)


def _weight(self: Any) -> Any:
    return self.read_weight()


def _bias(self: Any) -> Any:
    return self.read_bias()


def _gamma(self: Any) -> Any:
    return self.read_gamma()


def _beta(self: Any) -> Any:
    return self.read_beta()


def _embedding_table(self: Any) -> Any:
    return self.read_embedding_table()


#: Readers of parameters by name. Each is written out as a function, because the parser reads its source.
_READERS: dict[str, Callable] = {
    "weight": _weight,
    "bias": _bias,
    "gamma": _gamma,
    "beta": _beta,
    "embedding_table": _embedding_table,
}


class _Parameter(GraphCell):
    """A parameter as the module's own code reads it."""

    def __init__(self, p: Any, read: nn.Cell) -> None:
        super().__init__()
        self.hold("_parameter", p)
        self.read = read

    def construct(self) -> Tensor:
        return self.read(self._parameter)


def _body(module: Any, own: dict[str, Any], read: Callable[[], nn.Cell]) -> nn.Cell:
    """Return a cell with the code and attributes of ``module``, which reads local tensors as its parameters."""
    unknown = [name for name in own if name not in _READERS]
    if unknown or module._cells:
        raise NotTracedError(
            f"it holds {', '.join(map(repr, unknown or module._cells))}, which is not supported in graphs"
        )
    cls: Any = original_class(module)
    namespace = {"__module__": cls.__module__, **{name: property(_READERS[name]) for name in own}}
    own_class: Any = type(cls.__name__, (cls,), namespace)
    new: Any = own_class.__new__(own_class)
    nn.Cell.__init__(new, auto_prefix=False)
    object.__setattr__(new, "_stands_in", True)
    fresh = set(vars(new))
    for name, value in vars(module).items():
        if name not in fresh and name not in own and not name.startswith(("_hyper_parallel", "_replaced_forward")):
            object.__setattr__(new, name, value)
    for name, p in own.items():
        object.__setattr__(new, f"read_{name}", _Parameter(p, read()))
    return new
