"""Description of a styled module for a compiler that traces it: the second forward of a plan.

Where a framework compiles Python code, DTensors are in the way: a compiler sees local tensors that claim to be larger.
So a backend with a compiler builds, from a style's data, a forward of plain local tensors. It also builds two autograd
functions and collectives that the compiler can see. A backend without a compiler ignores the data.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

__all__ = [
    "ClassShards",
    "CompiledLosses",
    "Comparison",
    "CompiledForward",
    "CompiledInputs",
    "CompilerRole",
    "Conversion",
    "Cut",
]

#: Placement of a tensor on a 1-D mesh: the dimension that is sharded in consecutive shards, None if replicated.
Cut: TypeAlias = "int | None"
#: ``compare(module, shape)`` raises on all ranks if plain shards passed to a module differ in shape between ranks.
#: ``module`` is its name in messages. Functions that compare in the same way are equal.
Comparison: TypeAlias = Callable[[str, tuple[int, ...]], None]


@dataclass(frozen=True)
class CompiledForward:
    """Module as its style runs it.

    Attributes:
        kind: the kind of the module and of its parameters.

            - ``"column"``: a linear layer or embedding whose output features are sharded. The input is replicated, and
              each rank computes a partial gradient of it.
            - ``"row"``: a linear layer whose input features are sharded, or an embedding whose rows are; the bias is
              replicated. The output is a partial sum.
            - ``"parts"``: a module, such as a norm, that treats each shard as the full input. Its parameters are
              replicated, and their gradients are partial sums. The output has the placement of the input.
            - ``"alike"``: a module that computes the same on all ranks.
            - ``"distributed"``: a module whose own forward runs on distributed inputs and parameters. A backend traces
              it where no operation of it communicates in forward.
        mesh: 1-D mesh of core.
        group: process group of the mesh.
        size, rank: size of the mesh, and this rank's index in it.
        given: placement of a plain input.
        wanted: placement of the output.
        local: whether the output is plain, not a DTensor.
        layouts: layouts by name of the parameters that the module itself holds; None for a plain parameter.
        sizes: for ``"column"`` and ``"row"``: how many of the features or rows each rank has.
        packed: whether the weight packs several matrices, each sharded separately.
        normalized: for ``"parts"``: how many of the last input dimensions must be unsharded.
        partial_features: for ``"alike"`` with a plain output: the number of last features whose gradient is a partial
            sum; -1 for all.
        compare: checks plain inputs whose size no weight fixes; None where ranks need not compare them.
    """

    kind: str
    mesh: Any
    group: Any
    size: int
    rank: int
    given: Cut
    wanted: Cut
    local: bool
    layouts: Mapping[str, Any]
    sizes: tuple[int, ...] = ()
    packed: bool = False
    normalized: int = 0
    partial_features: int = 0
    compare: Comparison | None = None

    @property
    def key(self) -> tuple:
        """Return a key of the other fields. Modules with equal keys on one mesh share compiled code."""
        shape = self.kind, self.given, self.wanted, self.local, self.sizes, self.packed, self.normalized
        return (*shape, self.partial_features, self.compare, tuple(self.layouts.items()))


@dataclass(frozen=True)
class Conversion:
    """One input or output of a module that a hook converts to another layout.

    Attributes:
        key: position or keyword of the argument.
        given: placement of a plain argument.
        wanted: placement after the conversion.
        compare: as in `CompiledForward`.
    """

    key: Any
    given: Cut
    wanted: Cut
    compare: Comparison | None = None


@dataclass(frozen=True)
class CompiledInputs:
    """Conversions of a hook of a style: inputs of a module, or outputs.

    Attributes:
        mesh, group, size, rank: see `CompiledForward`.
        conversions: in order.
        count: required number of outputs, or least number of positional inputs.
        local: whether the results are plain, not DTensors.
        of_outputs: whether the hook converts outputs.
    """

    mesh: Any
    group: Any
    size: int
    rank: int
    conversions: tuple[Conversion, ...]
    count: int
    local: bool
    of_outputs: bool

    @property
    def key(self) -> tuple:
        """Return the key of the compiled program, as `CompiledForward.key` does."""
        return self.conversions, self.count, self.local, self.of_outputs


@dataclass(frozen=True)
class ClassShards:
    """Shard of the classes of logits that this rank holds.

    Attributes:
        group: group of ranks that share the classes.
        size: number of ranks in the group.
        total: total number of classes.
        first, count: first class of this rank, and number of its classes; every rank has at least one.
        compare: check of the shape of local logits.
    """

    group: Any
    size: int
    total: int
    first: int
    count: int
    compare: Comparison


class CompiledLosses(Protocol):
    """Services for a backend with a compiler about losses of sharded logits; a part of `Core`."""

    def watch_losses_of_shards(self, watcher: Callable[[Callable[..., Any]], None]) -> None:
        """Call ``watcher`` with each function of the library that computes a loss of plain logits with sharded classes.
        The call happens now, or when the function's module is imported."""
        ...

    def class_shards(
        self, mesh: Any, own: int, dim: int | None = None, vocab_size: int | None = None
    ) -> ClassShards | None:
        """Return the shard of the classes that this rank holds in plain local logits. Communicates nothing.

        Args:
            mesh: mesh that shards the classes.
            own: number of classes that this rank has.
            dim, vocab_size: arguments of such a loss.

        Returns:
            None where some rank has no class; `ClassShards.compare` reports shards that do not fit.
        """

    def mesh_with_id(self, number: int) -> Any:
        """Return the mesh whose ``id()`` is ``number``, for a compiler that passes numbers."""
        ...

    def is_loss_parallel(self) -> bool:
        """Return whether the caller is inside ``loss_parallel``."""
        ...


class CompilerRole(ABC):  # noqa: B024 - a framework without a compiler brings nothing
    """Verbs for a framework with a compiler. The defaults do nothing: there is no compiler, or DTensors are kept from
    it."""

    def set_compiled_forward(self, module: Any, how: CompiledForward | None) -> None:
        """Let a compiler trace the forward that ``how`` describes, not the one that `ModuleRole.replace_forward` gave
        ``module``. With None, the module stays outside compiled code."""
        return

    def compiled_hook(self, hook: Callable, how: CompiledInputs | None) -> Callable:
        """Return ``hook``, which a style is about to register, or a replacement for compilers. The replacement does the
        work that ``how`` describes where a compiler traces it. With None, the hook stays outside compiled code."""
        return hook

    def share_compiled_inputs(self, module: Any) -> None:
        """Announce that several column-parallel modules inside ``module`` may read one of its inputs. Compiled code
        then sums their partial gradients of it with one collective, as eager mode does."""
        return
