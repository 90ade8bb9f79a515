"""Programs of modules with styles, and the table of steps that programs are made of.

A step changes the placement of a tensor on a mesh dimension. Core, torch's tracer and MindSpore's graph cells each
implement the same steps. All three look up here which step converts a tensor, and which step converts its cotangent.
`core.communication.transitions` has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

__all__ = [
    "KEPT",
    "STEPS",
    "SUMMANDS",
    "Comparison",
    "Conversions",
    "Cut",
    "Program",
    "Verb",
    "are_planned",
    "step_between",
]

#: How a tensor is held on a 1-D mesh: the dimension that is sharded into consecutive shards, or None for replicated.
Cut: TypeAlias = "int | None"
#: ``compare(module, shape)`` raises, on all ranks, where the plain shards for a module differ in shape between ranks.
#: ``module`` is the module's name in messages. Functions that make the same comparison are equal.
Comparison: TypeAlias = Callable[[str, tuple[int, ...]], None]
#: In place of a `Cut`: the tensor is partial, each rank holds a summand.
SUMMANDS: Final = "summands"
#: In place of a `Cut`: the tensor stays as it is held.
KEPT: Final = "kept"


class Verb(NamedTuple):
    """A row of `STEPS`.

    Attributes:
        moves: the movement of data in forward.
        back: the step of the cotangent.
    """

    moves: str
    back: str


#: Steps by name. After a step that ends on ``for_parts``, each consumer returns a summand of the cotangent.
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
    """Return the step from ``source`` to ``target``, or None where no step is needed.

    Args:
        source, target: how the tensor is held before and after: a `Cut` or `SUMMANDS`.
        for_parts: whether each consumer returns a summand of the cotangent of a replicated tensor.
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


def are_planned(own: Mapping[str, Any], planned: Iterable[tuple[str, Any]], distributed: type[Any]) -> bool:
    """Return whether a module still has the parameters that its style distributed. Layouts are compared by identity.

    Args:
        own: direct parameters of the module, by name.
        planned: items of `Program.layouts`.
        distributed: class of DTensors.
    """
    for name, layout in planned:
        p = own.get(name)
        if p is None or layout is None:
            if p is not layout:
                return False
        elif not isinstance(p, distributed) or p._layout is not layout:
            return False
    return True


@dataclass(frozen=True)
class Program:
    """A module with a style: a step for its input, its operation on local tensors, and a step for its output.

    `step_between` names the steps. A hook that converts one tensor is a program without operation and without
    parameters.

    Attributes:
        mesh: 1-D mesh of core.
        group: process group of the mesh.
        size, rank: number of ranks in the mesh, and this rank.
        given: how a plain input is held.
        takes: how the operation needs its input. `KEPT` is for a module that treats a shard like a full input.
        gives: how the output of the operation is held; `SUMMANDS` where each rank computes a summand of the output.
        wanted: how the style converts the output.
        local: whether the output is plain, not a DTensor.
        layouts: layouts by name of the module's direct parameters; None for a plain parameter.
        input_for_parts: whether each rank computes a summand of the gradient of the input, which is replicated.
        parameters_for_parts: whether each rank computes a summand of the gradients of all parameters.
        distributed: whether the operation is the module's own forward on DTensors. A backend traces it where none of
            its operations needs communication in forward.
        features: required size of the input's last dimension; None where no weight determines it.
        sizes: size of each rank's shard of a sharded weight, in features or in rows of an embedding.
        packed: whether the weight packs several matrices, each sharded separately.
        whole_dims: with `KEPT`, number of last dimensions of the input that must be unsharded.
        partial_features: number of last features of a plain output whose gradients are partial, and are all-reduced. -1
            for all features.
        compare: check of plain inputs whose size no weight determines; None where ranks need not compare them.
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
        """Return whether all shards of the weight are equal in size."""
        return not self.sizes or min(self.sizes) == max(self.sizes)

    @property
    def key(self) -> tuple:
        """All facts of the program except the mesh and its group. Equivalent modules have equal keys, and share
        compiled code."""
        facts = {**vars(self), "layouts": tuple(self.layouts.items())}
        return tuple(facts[name] for name in facts if name not in ("mesh", "group"))


@dataclass(frozen=True)
class Conversions:
    """Programs of a hook of a style, which converts the inputs or the outputs of a module.

    Attributes:
        mesh: mesh of the programs.
        programs: position or keyword of each converted tensor, and the program that converts it, in order.
        count: required number of outputs, or least number of positional inputs.
        of_outputs: whether the hook converts outputs.
    """

    mesh: Any
    programs: tuple[tuple[Any, Program], ...]
    count: int
    of_outputs: bool

    @property
    def key(self) -> tuple:
        """Key of the compiled hook, as `Program.key`."""
        return tuple((key, program.key) for key, program in self.programs), self.count, self.of_outputs
