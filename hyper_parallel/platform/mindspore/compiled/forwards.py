"""Styled modules as MindSpore's graphs have them: cells of plain local tensors and collectives.

Made of a style's data (`CompiledForward`). Such a cell holds the very parameters of its module, under names that no
other code uses: only here the parser is given a distributed parameter, which is then its local tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, nn, ops

from hyper_parallel.platform.contract import CompiledForward
from hyper_parallel.platform.mindspore.compiled.functions import (
    Exchange,
    Gather,
    GatherForParts,
    Part,
    Ranks,
    ReadForParts,
    Same,
    Scatter,
    ScatterAndAdd,
    SumUp,
)
from hyper_parallel.platform.mindspore.compiled.shapes import ShapeCheck

__all__ = ["ColumnLinear", "GraphCell", "NotTracedError", "make_cell", "move_cell", "original_class", "read_cell"]


class NotTracedError(Exception):
    """Why a module cannot be in a graph."""


def original_class(module: nn.Cell) -> Any:
    """The class that a cell had before styles gave it one of their own."""
    return next(cls for cls in type(module).__mro__ if "_of_style" not in cls.__dict__)


class GraphCell(nn.Cell):
    """Cell that takes the place of another one in graphs. It registers no parameters: they belong to their own cell.

    Attributes:
        original: that cell, where its other attributes may be read.
        owned: the names of that cell's parameters. Other readers of these names get no answer.
    """

    original: nn.Cell | None = None

    def __init__(self, owned: Iterable[str] = ()) -> None:
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "owned", frozenset(owned))

    def hold(self, name: str, p: Any) -> None:
        """Let ``construct`` read a parameter as ``name``."""
        object.__setattr__(self, name, p)


def make_cell(module: nn.Cell, how: CompiledForward) -> GraphCell:
    """The cell that stands for ``module``, with the parameters that it has now.

    Raises:
        NotTracedError: where there is none.
    """
    if not how.local:
        raise NotTracedError("its output is a DTensor: give its style use_local_output=True")
    own = {name: p for name, p in module._params.items() if p is not None}
    for name, layout in how.layouts.items():
        if getattr(own.get(name), "_layout", None) is not layout:
            raise NotTracedError("its parameters are not those that the style has distributed")
    if how.kind == "row" and how.wanted == -1 and _outputs(own, how) % how.size:
        raise NotTracedError("its output would be cut along its features, into parts of unequal sizes")
    if how.kind in ("column", "row"):
        if original_class(module) in (nn.Dense, mint.nn.Linear):
            return _linear(module, how, own)
        return _embedding(module, how, own)
    if how.kind == "parts":
        return _Parts(module, how, own)
    return _Alike(module, how, own)


def _outputs(own: dict[str, Any], how: CompiledForward) -> int:
    """How many features the output of a row-parallel layer has: the dimension of its weight that is not cut."""
    weight = next(p for p in own.values() if len(p.shape) == 2)
    return int(weight.shape[1 - weight._layout.placements[0].dim])


# ------------------------------------------------------------------------------------------------ between the layouts
def move_cell(ranks: Ranks, cut: Any, wanted: int | None, sizes: tuple[int, ...] = ()) -> nn.Cell:
    """From one layout to another."""
    if cut == wanted or ranks.size == 1:
        return Same()
    if wanted is None:
        return Gather(ranks, cut, sizes)
    if cut is None:
        return Part(ranks, wanted)
    if sizes and min(sizes) != max(sizes):
        raise NotTracedError("its output would go from parts of unequal sizes to others")
    return Exchange(ranks, cut, wanted)


def read_cell(ranks: Ranks, cut: int | None) -> nn.Cell:
    """All of an input, for a consumer that returns a summand of the cotangent."""
    if ranks.size == 1:
        return Same()
    return ReadForParts(ranks) if cut is None else GatherForParts(ranks, cut)


def _add_up(ranks: Ranks, wanted: int | None) -> nn.Cell:
    """The sum of the ranks' summands."""
    if ranks.size == 1:
        return Same()
    return SumUp(ranks) if wanted is None else Scatter(ranks, wanted)


def _ranks(how: CompiledForward) -> Ranks:
    return Ranks(how.group, how.size, how.rank)


# ------------------------------------------------------------------------------------------------ linear layers
def _linear(module: Any, how: CompiledForward, own: dict[str, Any]) -> GraphCell:
    if getattr(module, "activation", None) is not None:
        raise NotTracedError("it is an nn.Dense with an activation of its own")
    return (ColumnLinear if how.kind == "column" else _RowLinear)(module, how, own)


class ColumnLinear(GraphCell):
    """A linear layer of which each rank has some output features."""

    def __init__(self, module: Any, how: CompiledForward, own: dict[str, Any]) -> None:
        super().__init__(own)
        ranks = _ranks(how)
        if how.wanted == -1:
            self.move = Same()
        elif how.packed:
            raise NotTracedError("it has several matrices in one, and its output is gathered")
        else:
            self.move = move_cell(ranks, -1, how.wanted, how.sizes)
        self.read = read_cell(ranks, how.given)
        self.check = ShapeCheck(module, how, output=how.wanted)
        self.hold("_weight", own["weight"])
        self.has_bias = own.get("bias") is not None
        if self.has_bias:
            self.hold("_bias", own["bias"])

    def construct(self, x: Tensor) -> Tensor:
        self.check(x.shape, x.dtype)
        x = self.read(x)
        if self.has_bias:
            y = mint.nn.functional.linear(x, self._weight, self._bias)
        else:
            y = mint.nn.functional.linear(x, self._weight)
        return self.move(y)


class _RowLinear(GraphCell):
    def __init__(self, module: Any, how: CompiledForward, own: dict[str, Any]) -> None:
        super().__init__(own)
        ranks = _ranks(how)
        if how.packed and how.given != -1:
            raise NotTracedError("it has several matrices in one, and its input is whole")
        if how.given is None:
            self.take: nn.Cell = Part(ranks, -1, how.sizes) if how.size > 1 else Same()
        elif how.given != -1 and min(how.sizes) != max(how.sizes):
            raise NotTracedError("its input would go from some parts to others of unequal sizes")
        else:
            self.take = move_cell(ranks, how.given, -1)
        self.add_up = _add_up(ranks, how.wanted)
        self.check = ShapeCheck(module, how, output=how.wanted)
        self.hold("_weight", own["weight"])
        self.bias_inside = own.get("bias") is not None and how.wanted is not None and how.size > 1
        self.bias_after = own.get("bias") is not None and not self.bias_inside
        if self.bias_inside:
            self.add_both = ScatterAndAdd(ranks, how.wanted)  # type: ignore[arg-type]
        if own.get("bias") is not None:
            self.hold("_bias", own["bias"])

    def construct(self, x: Tensor) -> Tensor:
        self.check(x.shape, x.dtype)
        y = mint.nn.functional.linear(self.take(x), self._weight)
        if self.bias_inside:
            return self.add_both(y, self._bias)
        y = self.add_up(y)
        if self.bias_after:
            y = y + self._bias
        return y


# ------------------------------------------------------------------------------------------------ other modules
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


#: The readers of a parameter of that name. They are functions of their own, because the parser reads their source.
_READERS: dict[str, Callable] = {
    "weight": _weight,
    "bias": _bias,
    "gamma": _gamma,
    "beta": _beta,
    "embedding_table": _embedding_table,
}


class _Parameter(GraphCell):
    """A parameter as the module's own code is to see it."""

    def __init__(self, p: Any, read: nn.Cell) -> None:
        super().__init__()
        self.hold("_parameter", p)
        self.read = read

    def construct(self) -> Tensor:
        return self.read(self._parameter)


def _body(module: Any, own: dict[str, Any], read: Callable[[], nn.Cell]) -> nn.Cell:
    """A cell with the code and the attributes of ``module``, which finds local tensors where its parameters are."""
    unknown = [name for name in own if name not in _READERS]
    if unknown or module._cells:
        raise NotTracedError(f"it holds {', '.join(map(repr, unknown or module._cells))}, which is not known there")
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


def _embedding(module: Any, how: CompiledForward, own: dict[str, Any]) -> GraphCell:
    simple = isinstance(module, (nn.Embedding, mint.nn.Embedding)) and len(own) == 1
    special = getattr(module, "use_one_hot", False) or getattr(module, "max_norm", None) is not None
    if isinstance(module, mint.nn.Embedding):
        special = special or module.padding_idx is not None or module.scale_grad_by_freq
    if not simple or special:
        raise NotTracedError("an embedding that does more than look rows up, or this kind of module, is not traced")
    return (_ColumnEmbedding if how.kind == "column" else _RowEmbedding)(module, how, own)


class _Embedding(GraphCell):
    def __init__(self, module: Any, how: CompiledForward, own: dict[str, Any]) -> None:
        super().__init__(own)
        ranks = _ranks(how)
        (table,) = own.values()
        self.looks_up = original_class(module) is nn.Embedding
        if self.looks_up:
            self.hold("_table", table)  # its own code knows how many features there are
        else:
            self.body = _body(module, own, Same)
        self.take = move_cell(ranks, how.given, None)
        self.check = ShapeCheck(module, how, output=how.wanted, output_dims=1)
        self.first, self.count = sum(how.sizes[: how.rank]), how.sizes[how.rank]
        if how.kind == "column":
            self.move = move_cell(ranks, -1, how.wanted, how.sizes)
        else:
            self.add_up = _add_up(ranks, how.wanted)


class _ColumnEmbedding(_Embedding):
    def construct(self, ids: Tensor) -> Tensor:
        self.check(ids.shape, ms.float32)
        ids = self.take(ids)
        y = ops.gather(self._table, ids, 0) if self.looks_up else self.body(ids)
        return self.move(y)


class _RowEmbedding(_Embedding):
    def construct(self, ids: Tensor) -> Tensor:
        self.check(ids.shape, ms.float32)
        ids = self.take(ids)
        elsewhere = ops.logical_or(ids < self.first, ids >= self.first + self.count)
        own = ops.masked_fill(ids - self.first, elsewhere, 0)
        y = ops.gather(self._table, own, 0) if self.looks_up else self.body(own)
        return self.add_up(ops.masked_fill(y, elsewhere.expand_dims(-1), 0.0))


class _Parts(GraphCell):
    """A norm of parts of its input, each of which gives a summand of its parameters' gradients."""

    def __init__(self, module: Any, how: CompiledForward, own: dict[str, Any]) -> None:
        super().__init__(own)
        ranks = _ranks(how)
        self.check = ShapeCheck(module, how)
        self.body = _body(module, own, lambda: read_cell(ranks, None))

    def construct(self, x: Tensor) -> Tensor:
        self.check(x.shape, x.dtype)
        return self.body(x)


class _Alike(GraphCell):
    """A module that computes the same on all ranks."""

    def __init__(self, module: Any, how: CompiledForward, own: dict[str, Any]) -> None:
        super().__init__(own)
        ranks = _ranks(how)
        self.take, self.move = move_cell(ranks, how.given, None), move_cell(ranks, None, how.wanted)
        self.check = ShapeCheck(module, how, output=how.wanted)
        self.body = _body(module, own, Same)
        self.partial_features = how.partial_features
        self.read = read_cell(ranks, None)

    def construct(self, x: Tensor) -> Tensor:
        self.check(x.shape, x.dtype)
        y = self.move(self.body(self.take(x)))
        n = self.partial_features
        if n == 0:
            return y
        if n < 0:
            return self.read(y)
        return mint.cat((y[..., :-n], self.read(y[..., -n:])), -1)
