"""Description of a styled module for a compiler that traces it: the second forward of a plan.

Where a framework compiles Python code, DTensors are in the way: a compiler sees local tensors that claim to be
larger. So a backend with a compiler builds, from a style's data, a forward of plain local tensors. It also builds two
autograd functions and collectives that the compiler can see. A backend without one takes the data and does nothing.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hyper_parallel.platform.contract.programs import Comparison, Cut, Program

__all__ = [
    "ClassShards",
    "CompiledLosses",
    "CompiledInputs",
    "CompilerRole",
    "Conversion",
]


@dataclass(frozen=True)
class Conversion:
    """One input or output of a module that a hook brings to another layout.

    Attributes:
        key: its position, or its keyword.
        given: how a plain one lies.
        wanted: how it is to lie.
        compare: as in `Program`.
    """

    key: Any
    given: Cut
    wanted: Cut
    compare: Comparison | None = None


@dataclass(frozen=True)
class CompiledInputs:
    """Conversions of a hook of a style: inputs of a module, or outputs.

    Attributes:
        mesh, group, size, rank: see `Program`.
        conversions: in order.
        count: how many there must be: outputs, or at least so many positional inputs.
        local: whether the results are plain, not DTensors.
        of_outputs: whether they are outputs.
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
        """The key of the compiled program, as `Program.key`."""
        return self.conversions, self.count, self.local, self.of_outputs


@dataclass(frozen=True)
class ClassShards:
    """The classes that this rank has of logits.

    Attributes:
        group: of the ranks that share the classes.
        size: how many they are.
        total: how many classes.
        first, count: those of this rank, at least one, as of all ranks.
        compare: for local logits.
    """

    group: Any
    size: int
    total: int
    first: int
    count: int
    compare: Comparison


class CompiledLosses(Protocol):
    """Questions of a backend with a compiler about losses of sharded logits; a part of `Core`."""

    def watch_losses_of_shards(self, watcher: Callable[[Callable[..., Any]], None]) -> None:
        """Call ``watcher`` with each function of the library that computes a loss of sharded classes. Their logits are
        plain, with some classes on each rank. It is called now, or when the function's module is imported."""
        ...

    def class_shards(
        self, mesh: Any, own: int, dim: int | None = None, vocab_size: int | None = None
    ) -> ClassShards | None:
        """Return the classes that this rank has of plain local logits. Communicates nothing.

        Args:
            mesh: that shards them.
            own: how many classes this rank has.
            dim, vocab_size: arguments of such a loss.

        Returns:
            None where some rank has none; `ClassShards.compare` reports parts that do not fit.
        """

    def mesh_with_id(self, number: int) -> Any:
        """The mesh of which ``id()`` is ``number``, for a compiler that passes numbers."""
        ...

    def is_loss_parallel(self) -> bool:
        """Return whether the caller is inside ``loss_parallel``."""
        ...


class CompilerRole(ABC):  # noqa: B024 - a framework without a compiler brings nothing
    """Verbs of a framework with a compiler. By default they do nothing: there is no compiler, or DTensors are kept
    from it."""

    def set_compiled_forward(self, module: Any, how: Program | None) -> None:
        """Let a compiler trace the forward that ``how`` describes in place of the one that `ModuleRole.replace_forward`
        gave ``module``. With None the module stays outside of compiled code."""
        return

    def compiled_hook(self, hook: Callable, how: CompiledInputs | None) -> Callable:
        """Return ``hook``, which a style is about to register, or a hook for compilers in its place. That one does the
        work that ``how`` describes where a compiler traces it. With None, the hook stays outside of compiled code."""
        return hook

    def share_compiled_inputs(self, module: Any) -> None:
        """Inside of ``module`` several column-parallel modules may read one of its inputs: in compiled code one
        collective is to sum their parts of its gradient, as in eager mode."""
        return
