"""Description of a styled module for a compiler. Besides the eager forward, a style thus defines a forward for
compilers.

A compiler cannot handle DTensors, because they are local tensors with a global shape. So a backend with a compiler
builds a forward on plain local tensors from the data of a style. It also builds two autograd functions, and collectives
that the compiler can see. A backend without a compiler ignores the data.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hyper_parallel.platform.contract.programs import Comparison, Conversions, Program

__all__ = ["ClassShards", "CompiledLosses", "CompilerRole"]


@dataclass(frozen=True)
class ClassShards:
    """Shard of the classes of logits that this rank holds.

    Attributes:
        group: group of ranks that share the classes.
        ranks: number of ranks in the group.
        total: total number of classes.
        offset, size: first class of this rank, and number of its classes; every rank has at least one.
        compare: check of the shape of local logits.
    """

    group: Any
    ranks: int
    total: int
    offset: int
    size: int
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
            dim, vocab_size: arguments of the loss function.

        Returns:
            The shard, or None where some rank has no class. `ClassShards.compare` reports shards that do not fit.
        """

    def class_losses(
        self, verbs: Any, largest: Callable[[Any, Any], Any], sums: Callable[[list[Any], Any], list[Any]]
    ) -> Any:
        """Return the losses over sharded classes as functions that a compiler can trace: `core.rules.class_losses`.

        Args:
            verbs: object with the local verbs of `TensorRole` that the losses call, in a form that the compiler
                differentiates.
            largest: ``largest(x, classes)`` returns the largest logit of each sample over the ranks; not
                differentiated.
            sums: ``sums(parts, classes)`` does the step ``sum`` of `STEPS` for several tensors of one shape at once.
        """

    def mesh_with_id(self, number: int) -> Any:
        """Return the mesh whose ``id()`` is ``number``, for a compiler that passes numbers."""
        ...

    def is_loss_parallel(self) -> bool:
        """Return whether the caller is inside ``loss_parallel``."""
        ...


class CompilerRole(ABC):  # noqa: B024 - a framework without a compiler brings nothing
    """Verbs for a framework with a compiler. The default methods do nothing. They serve backends without a compiler,
    and backends that hide DTensors from the compiler."""

    def set_compiled_forward(self, module: Any, how: Program | None) -> None:
        """Let a compiler trace the forward that ``how`` describes, in place of the forward that
        `ModuleRole.replace_forward` has set. With None the module stays outside of compiled code."""
        return

    def compiled_hook(self, hook: Callable, how: Conversions | None) -> Callable:
        """Return ``hook``, which a style is about to register, or a replacement for compilers. The replacement runs
        the programs of ``how`` where a compiler traces it. With None, the hook stays outside compiled code."""
        return hook

    def share_compiled_inputs(self, module: Any) -> None:
        """Announce that several column-parallel modules inside ``module`` may read the same input of ``module``.
        Compiled code then sums their partial gradients of that input with one collective, as eager mode does."""
        return
