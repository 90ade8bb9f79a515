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
    """How the gradients of a unit are reduced, and what of them waits for a later backward.

    Attributes:
        reduce_gradients: whether backward reduces gradients; otherwise they are kept, whole, and added to the next.
        all_reduce_gradients: whether it does so over the mesh dimension that replicates.
        divide_factor: by what sums of gradients are divided, in place of the number of ranks.
        under_way: how many reductions may be under way at a time, each of which holds a buffer as large as the unit.
        force_sum: whether collectives sum where an average is wanted, which is divided after.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._platform = plan, plan.mesh.platform
        self.reduce_gradients = self.all_reduce_gradients = True
        self.divide_factor: float | None = None
        self.force_sum = False
        self.under_way = 1
        #: Of a buffer, cotangents by the index of the parameter, None for what this rank has not used; and the indices
        #: of a row that was reduced over shards alone, with that.
        self._sums: dict[FlatBuffer, dict[int, Any]] = {}
        self._rows: dict[FlatBuffer, tuple[Sequence[int], Any]] = {}

    @property
    def has_kept(self) -> bool:
        """Return whether cotangents or rows wait to be reduced."""
        return bool(self._sums or self._rows)

    def forget(self) -> None:
        """Drop what waits."""
        self._sums.clear()
        self._rows.clear()

    def kept(self, buffer: FlatBuffer) -> Sequence[int]:
        """The parameters of a buffer whose cotangents wait for a backward that does as this one, the same on all
        ranks."""
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
            cotangents: one each, None where there is none.
            delay: add the results to the gradients that the parameters have when the backward pass is over.

        Returns:
            The shards of the gradients; None each with ``delay``, for what is kept, and for what no rank has used.
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
        # Mostly all of them.
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
        """The operation by which gradients are reduced, and what the result is to be divided by."""
        if model.one_loss:
            return "sum", 1.0
        if self.divide_factor is not None:
            return "sum", self.divide_factor
        # What a program brings may know sums alone, as gloo does.
        force_sum = self.force_sum or buffer.comms.reduce_scatter is not None
        return ("sum", float(self._plan.mesh.size())) if force_sum else ("avg", 1.0)


def _add_to_gradients(parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
    for p, g in zip(parameters, gradients, strict=True):
        if g is not None:
            p.grad = g if p.grad is None else p.grad + g


def add_gradients(leaves: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Sums of cotangents and the gradients of as many leaves, which lose them; None where neither is there."""
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
    """Cotangents of the parameters ``indices``, with the sums of those among ``waiting``, which are taken out."""
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
