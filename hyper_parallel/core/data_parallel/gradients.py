"""Reduction of the cotangents of whole parameters over data-parallel ranks, at once or later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.communication.coalesce import sum_together
from hyper_parallel.core.data_parallel.call import chosen

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.flat_buffer import FlatBuffer
    from hyper_parallel.core.data_parallel.model import Model
    from hyper_parallel.core.data_parallel.plan import Plan

__all__ = ["Gradients", "add_gradients", "let_wait", "with_waiting"]


class Gradients:
    """Reduction of the gradients of a unit, and gradients that are accumulated for a later backward.

    Attributes:
        reduce_gradients: whether backward reduces gradients. Otherwise whole ones are accumulated.
        all_reduce_gradients: whether it also reduces them over the mesh dimension that replicates.
        divide_factor: divisor of summed gradients, in place of the number of ranks.
        under_way: most reductions that may be pending at a time. Each holds a buffer as large as the unit.
        force_sum: whether collectives sum where an average is wanted, with a division after.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._platform = plan, plan.mesh.platform
        self.reduce_gradients = self.all_reduce_gradients = True
        self.divide_factor: float | None = None
        self.force_sum = False
        self.under_way = 1
        #: Buffer -> accumulated cotangents by the index of the parameter, None for one that this rank has not used.
        self._sums: dict[FlatBuffer, dict[int, Any]] = {}
        #: Buffer -> indices of parameters, and their row, which was reduced over the dimension that shards alone.
        self._rows: dict[FlatBuffer, tuple[Sequence[int], Any]] = {}

    @property
    def has_kept(self) -> bool:
        """Return whether accumulated cotangents or rows are still to be reduced."""
        return bool(self._sums or self._rows)

    def forget(self) -> None:
        """Discard accumulated gradients."""
        self._sums.clear()
        self._rows.clear()

    def kept(self, buffer: FlatBuffer) -> Sequence[int]:
        """Return the parameters of a buffer whose accumulated gradients a backward reduces with the present settings.

        All ranks return the same.
        """
        if not self.reduce_gradients:
            return ()
        if buffer in self._sums:
            return sorted(self._sums[buffer])
        return self._rows[buffer][0] if self.all_reduce_gradients and buffer in self._rows else ()

    def reduce(
        self,
        model: Model,
        buffer: FlatBuffer,
        members: Sequence[int],
        parameters: Sequence[Any],
        indices: Sequence[int],
        cotangents: Sequence[Any],
        delay: bool,
    ) -> list[Any]:
        """Reduce cotangents of whole parameters.

        Args:
            model: that of the unit.
            buffer: whose parameters they are.
            members: the indices of all parameters of the buffer.
            parameters: of the unit.
            indices: of the parameters that gradients are asked for, the same on all ranks.
            cotangents: one for each index, None where there is none.
            delay: add the results to the gradients of the parameters when the backward pass is over.

        Returns:
            The shards of the gradients. None with ``delay``, for accumulated ones, and where no rank has used them.
        """
        platform, nothing = self._platform, [None] * len(indices)
        kept: dict[int, Any] = self._sums.pop(buffer, {}) if self._sums else {}
        if kept or not self.reduce_gradients:
            dtype = buffer.reduce_dtype
            for i, g in zip(indices, cotangents, strict=True):
                before = kept.get(i)
                if g is not None:
                    g = platform.to_dtype(g, dtype)
                    before = g if before is None else before + g
                kept[i] = before
            if not self.reduce_gradients:
                self._sums[buffer] = kept
                return nothing
            cotangents = [kept.get(i) for i in indices]
        op, divisor = self._scale(model, buffer)
        if len(model.delayed) >= self.under_way:
            model.delayed[-self.under_way][0].row()
        # Usually all parameters of the buffer are trained.
        places = range(len(members)) if len(indices) == len(members) else [members.index(i) for i in indices]
        reduction = buffer.reduce(places, cotangents, op)
        if self._plan.mesh.ndim > 1:
            _, row = self._rows.pop(buffer, (indices, None))
            if not self.all_reduce_gradients:
                self._rows[buffer] = indices, reduction.row() if row is None else row + reduction.row()
                return nothing
            reduction.all_reduce(row)

        def shards() -> list[Any]:
            found, dtype = reduction.shards(divisor), parameters[members[0]].dtype
            if dtype != buffer.reduce_dtype or self._plan.moves_shards:
                found = [None if g is None else self._plan.kept(platform.to_dtype(g, dtype)) for g in found]
            return found

        if not delay:
            return shards()

        def deliver() -> None:
            add = _add_to_gradients if platform.fast is None else platform.fast.add_to_gradients
            with platform.no_dispatch():
                add(chosen(parameters, indices), shards())

        model.delayed.append((reduction, deliver))
        return nothing

    def _scale(self, model: Model, buffer: FlatBuffer) -> tuple[str, float]:
        """Return the operation that reduces gradients, and the divisor of its result."""
        if model.one_loss:
            return "sum", 1.0
        if self.divide_factor is not None:
            return "sum", self.divide_factor
        # A reduce-scatter of the program may support sums alone, as gloo does.
        force_sum = self.force_sum or buffer.comms.reduce_scatter is not None
        return ("sum", float(self._plan.mesh.size())) if force_sum else ("avg", 1.0)


def _add_to_gradients(parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
    for p, g in zip(parameters, gradients, strict=True):
        if g is not None:
            p.grad = g if p.grad is None else p.grad + g


def add_gradients(leaves: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Return sums of cotangents and the leaves' gradients, and clear these; None where neither is there."""
    found = []
    for leaf, g in zip(leaves, cotangents, strict=True):
        found.append(leaf.grad if g is None else g if leaf.grad is None else g + leaf.grad)
        leaf.grad = None
    return found


def let_wait(waiting: list[Any], index: int, cotangent: Any, mesh: Any, mesh_dims: tuple[int, ...]) -> None:
    """Keep the cotangent of a whole parameter until it is reduced. Whole parameters have this function as
    ``_collect``."""
    waiting.append((index, cotangent, mesh, mesh_dims))


def with_waiting(waiting: list[Any], indices: Sequence[int], cotangents: Sequence[Any]) -> list[Any]:
    """Return cotangents of the parameters ``indices`` with their waiting parts added.

    These parts are summed over tensor-parallel ranks, and taken out of ``waiting``.
    """
    new = dict(zip(indices, cotangents, strict=True))
    groups: dict[Any, list[Any]] = {}
    taken = [entry for entry in waiting if entry[0] in new]
    waiting[:] = [entry for entry in waiting if entry[0] not in new]
    for entry in taken:
        groups.setdefault((*entry[2:], entry[1].dtype), []).append(entry)
    for (mesh, mesh_dims, _), entries in groups.items():
        summed = sum_together([entry[1] for entry in entries], mesh, mesh_dims)
        for (i, *_), g in zip(entries, summed, strict=True):
            new[i] = g if new[i] is None else new[i] + g
    return list(new.values())
