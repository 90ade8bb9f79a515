"""Programs of modules with styles, and the list of the steps that they are made of.

A step leads the ranks of a mesh dimension from one way of holding a tensor to another.

Core, torch's tracer and MindSpore's graph cells each bring the same movements of data. All read here which step leads
from one way to another, and which step its cotangent takes. `core.communication.transitions` has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

__all__ = ["KEPT", "STEPS", "SUMMANDS", "Comparison", "Cut", "Program", "Verb", "step_between"]

#: How a tensor lies on a 1-D mesh: the dimension that is cut into consecutive parts, or None where all have all of it.
Cut: TypeAlias = "int | None"
#: ``compare(module, shape)`` raises, on all ranks, where plain shards for a module differ in shape between them;
#: ``module`` is its name in messages. Functions that compare in the same way are equal.
Comparison: TypeAlias = Callable[[str, tuple[int, ...]], None]
#: In place of a `Cut`: each rank has a summand.
SUMMANDS: Final = "summands"
#: In place of a `Cut`: as the tensor lies already.
KEPT: Final = "kept"


class Verb(NamedTuple):
    """A row of `STEPS`.

    Attributes:
        moves: the movement of data in forward.
        back: the step of the cotangent.
    """

    moves: str
    back: str


#: By name. A step ending on ``for_parts`` has consumers each of which returns a summand of the cotangent.
STEPS: Mapping[str, Verb] = MappingProxyType(
    {
        "read_for_parts": Verb("keep", "sum"),  # Megatron's f
        "sum": Verb("sum", "read_for_parts"),  # Megatron's g
        "gather": Verb("gather", "slice"),
        "gather_for_parts": Verb("gather", "scatter"),
        "slice": Verb("slice", "gather"),
        "scatter": Verb("scatter", "gather_for_parts"),
        "exchange": Verb("exchange", "exchange"),
        "one_summand": Verb("one_summand", "summand_gradient"),
        "summand_gradient": Verb("keep", "one_summand"),
    }
)


def step_between(source: int | str | None, target: int | str | None, for_parts: bool = False) -> str | None:
    """The step from ``source`` to ``target``, None where there is nothing to do. Each is a `Cut` or `SUMMANDS`.

    Args:
        source, target: before and after.
        for_parts: whether each consumer returns a summand of the cotangent of a whole tensor.
    """
    if target is None:
        if source is None:
            return "read_for_parts" if for_parts else None
        if source == SUMMANDS:
            return "sum"
        return "gather_for_parts" if for_parts else "gather"
    if source == target:
        return None
    if target == SUMMANDS:
        return "one_summand"
    if source is None:
        return "slice"
    return "scatter" if source == SUMMANDS else "exchange"


@dataclass(frozen=True)
class Program:
    """A module with a style: a step of its input, its operation on local tensors, a step of the result.

    `step_between` names the steps.

    Attributes:
        mesh: 1-D mesh of core.
        group: of its ranks.
        size, rank: how many they are, and which one this is.
        given: how a plain input lies.
        takes: how the operation needs it. `KEPT` is for a module that treats the parts of its input as the whole.
        gives: how the result of the operation lies; `SUMMANDS` where each rank computes a summand of it.
        wanted: how the output is to lie.
        local: whether the output is plain, not a DTensor.
        layouts: of the parameters that the module itself holds, by name, None for one that is plain.
        input_for_parts: whether each rank computes a summand of the gradient of the input, which is whole.
        parameters_for_parts: the same of all parameters.
        distributed: whether the operation is the module's own forward on DTensors. A backend traces it where each
            operation of it is one that needs no communication in forward.
        features: how many features, which come last, the weight takes; None where no weight says it.
        sizes: how many of the features, or of the rows of an embedding, each rank has, where the weight is cut.
        packed: whether these are several matrices in one, each cut by itself.
        whole_dims: with `KEPT`, how many of the last dimensions of the input must be whole.
        partial_features: of how many of the last features of a plain output each rank computes a summand of the
            gradient, which is added up; -1 of all.
        compare: for plain inputs of which no weight knows the size; None where the ranks need not compare them.
    """

    mesh: Any
    group: Any
    size: int
    rank: int
    given: Cut
    takes: int | str | None
    gives: int | str | None
    wanted: int | str | None
    local: bool
    layouts: Mapping[str, Any]
    input_for_parts: bool = False
    parameters_for_parts: bool = False
    distributed: bool = False
    features: int | None = None
    sizes: tuple[int, ...] = ()
    packed: bool = False
    whole_dims: int = 0
    partial_features: int = 0
    compare: Comparison | None = None

    @property
    def even(self) -> bool:
        """Tell whether the parts of the weight are equal in size."""
        return not self.sizes or min(self.sizes) == max(self.sizes)

    @property
    def key(self) -> tuple:
        """All that tells it from others on its mesh: equivalent modules have equal keys, and share compiled code."""
        facts = {**vars(self), "layouts": tuple(self.layouts.items())}
        return tuple(facts[name] for name in facts if name not in ("mesh", "group"))
