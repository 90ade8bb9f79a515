"""Gradients of a unit: accumulated, scaled, reduced over data-parallel ranks, and added to the parameters'
gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.communication.coalesce import sum_together
from hyper_parallel.core.data_parallel.call import chosen

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.flat_buffer import FlatBuffer
    from hyper_parallel.core.data_parallel.reduction import Reduction
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["Gradients", "Pending", "leave_unsummed", "with_summed"]

#: Pending reductions, each with a function that waits for it and delivers the gradients.
Pending = list[tuple["Reduction", Callable[[], None]]]


class Gradients:
    """Reduction of the gradients of a unit, and gradients that are accumulated for a later backward.

    Args:
        mesh: data-parallel mesh.
        store: function that copies a gradient to where its parameter's shard is stored; None if no copy is needed.

    Attributes:
        reduce_gradients: whether backward reduces gradients. If not, unsharded gradients are accumulated.
        all_reduce_gradients: whether backward also reduces gradients over the mesh dimension that replicates.
        divide_factor: divisor of summed gradients, in place of the number of ranks.
        max_pending: maximum number of pending reductions. Each holds a buffer as large as the unit.
        force_sum: whether collectives sum and divide afterwards, in place of collectives that average.
        one_loss: whether the batches with accumulated gradients are distributed.
    """

    def __init__(self, mesh: DeviceMesh, store: Callable[[Any], Any] | None = None) -> None:
        self._mesh, self._platform, self._store = mesh, mesh.platform, store
        self.reduce_gradients = self.all_reduce_gradients = True
        self.divide_factor: float | None = None
        self.force_sum = False
        self.max_pending = 1
        #: Index of a parameter -> accumulated cotangent, or None if this rank has not used the parameter. All ranks
        #: have the same indices.
        self._sums: dict[int, Any] = {}
        #: Buffer -> indices of parameters, and their row of gradients, reduced over the sharding mesh dimension only.
        self._rows: dict[FlatBuffer, tuple[Sequence[int], Any]] = {}
        self.one_loss = False

    @property
    def has_accumulated(self) -> bool:
        """Return whether accumulated cotangents, or accumulated rows of flat buffers, are still to be reduced."""
        return bool(self._sums or self._rows)

    def forget(self) -> None:
        """Discard accumulated gradients."""
        self._sums.clear()
        self._rows.clear()

    def check_kind(self, one_loss: bool, what: str) -> None:
        """Raise ValueError if the accumulated gradients come from the other kind of batch, distributed or plain. Sums
        of distributed batches must not be added to averages of plain batches.

        Args:
            one_loss: whether the batch is distributed.
            what: name of the called module in messages.
        """
        if self.has_accumulated and self.one_loss is not one_loss:
            now, before = ("distributed", "plain") if one_loss else ("plain", "distributed")
            raise ValueError(
                f"{what} is called with {now} inputs, but has accumulated gradients of {before} inputs that were not "
                f"all-reduced. Run a backward of {before} inputs with gradient synchronisation first"
            )

    def accumulated(self, buffer: FlatBuffer, members: Sequence[int]) -> Sequence[int]:
        """Return the parameters of a buffer whose accumulated gradients must be reduced now.

        The result depends on settings that are equal on all ranks, so all ranks return the same indices.

        Args:
            buffer: the buffer.
            members: the indices of its parameters.
        """
        if not self.reduce_gradients:
            return ()
        found = [i for i in members if i in self._sums]
        if not found and self.all_reduce_gradients and buffer in self._rows:
            return self._rows[buffer][0]
        return found

    def accumulate(self, indices: Sequence[int], cotangents: Sequence[Any], one_loss: bool) -> None:
        """Add cotangents to the accumulated gradients, for a later backward.

        Args:
            indices: indices of parameters, the same on all ranks.
            cotangents: one cotangent for each index, or None.
            one_loss: whether the batch is distributed.
        """
        self.one_loss = one_loss
        for i, g in zip(indices, cotangents, strict=True):
            before = self._sums.get(i)
            if g is not None:
                # Autograd may share this tensor with other nodes, which may change it.
                before = self._platform.clone(g) if before is None else before + g
            self._sums[i] = before

    def with_accumulated(self, indices: Sequence[int], cotangents: Sequence[Any]) -> Sequence[Any]:
        """Return ``cotangents`` plus the accumulated gradients of the same parameters. The accumulated gradients are
        discarded."""
        if not self._sums:
            return cotangents
        found = []
        for i, g in zip(indices, cotangents, strict=True):
            before = self._sums.pop(i, None)
            found.append(g if before is None else before if g is None else before + g)
        return found

    def scale(self, one_loss: bool, only_sums: bool = False) -> tuple[str, float]:
        """Return the operation that reduces gradients, and the divisor of its result.

        Args:
            one_loss: whether the batch is distributed, so that all ranks have one loss.
            only_sums: whether the collective supports only sums.
        """
        if one_loss:
            return "sum", 1.0
        if self.divide_factor is not None:
            return "sum", self.divide_factor
        return ("sum", float(self._mesh.size())) if self.force_sum or only_sums else ("avg", 1.0)

    def reduce(
        self,
        buffer: FlatBuffer,
        members: Sequence[int],
        parameters: Sequence[Any],
        indices: Sequence[int],
        cotangents: Sequence[Any],
        one_loss: bool,
        pending: Pending,
        delay: bool,
    ) -> list[Any]:
        """Reduce cotangents of unsharded parameters.

        Args:
            buffer: the buffer of the parameters.
            members: the indices of all parameters of the buffer.
            parameters: all parameters of the unit.
            indices: indices of parameters whose gradients are required, the same on all ranks.
            cotangents: one cotangent for each index, or None.
            one_loss: whether the batch is distributed.
            pending: the reductions of all units.
            delay: append to ``pending``. The results are added to the parameters' gradients when backward is over.

        Returns:
            The shards of the gradients. None with ``delay``, for accumulated gradients, and for parameters that no rank
            has used.
        """
        platform, nothing, dtype = self._platform, [None] * len(indices), buffer.reduce_dtype
        if self._sums or not self.reduce_gradients:
            cotangents = [None if g is None else platform.to_dtype(g, dtype) for g in cotangents]
        if not self.reduce_gradients:
            self.accumulate(indices, cotangents, one_loss)
            return nothing
        cotangents = self.with_accumulated(indices, cotangents)
        # A custom reduce-scatter may support only sums, as gloo does.
        op, divisor = self.scale(one_loss, buffer.collectives.reduce_scatter is not None)
        if len(pending) >= self.max_pending:
            pending[-self.max_pending][0].row()
        # Usually all parameters of the buffer are trained.
        places = range(len(members)) if len(indices) == len(members) else [members.index(i) for i in indices]
        reduction = buffer.reduce(places, cotangents, op)
        if self._mesh.ndim > 1:
            _, row = self._rows.pop(buffer, (indices, None))
            if not self.all_reduce_gradients:
                self._rows[buffer] = indices, reduction.row() if row is None else row + reduction.row()
                self.one_loss = one_loss
                return nothing
            reduction.all_reduce(row)

        def shards() -> list[Any]:
            found, own = reduction.shards(divisor), parameters[members[0]].dtype
            if own != dtype:
                found = [None if g is None else platform.to_dtype(g, own) for g in found]
            return found if self._store is None else [None if g is None else self._store(g) for g in found]

        if not delay:
            return shards()

        def deliver() -> None:
            add = _add_to_gradients if platform.fast is None else platform.fast.add_to_gradients
            with platform.no_dispatch():
                add(chosen(parameters, indices), shards())

        pending.append((reduction, deliver))
        return nothing


def _add_to_gradients(parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
    for p, g in zip(parameters, gradients, strict=True):
        if g is not None:
            p.grad = g if p.grad is None else p.grad + g


def leave_unsummed(unsummed: list[Any], index: int, cotangent: Any, mesh: Any, mesh_dims: tuple[int, ...]) -> None:
    """Append the partial cotangent of an unsharded parameter to ``unsummed``, to be reduced later.

    This function is the ``_collect`` of unsharded parameters.
    """
    unsummed.append((index, cotangent, mesh, mesh_dims))


def with_summed(unsummed: list[Any], indices: Sequence[int], cotangents: Sequence[Any]) -> list[Any]:
    """Return ``cotangents`` of the parameters ``indices`` plus the partial cotangents of these parameters in
    ``unsummed``.

    The partial cotangents are all-reduced over tensor-parallel ranks, and removed from ``unsummed``.
    """
    new = dict(zip(indices, cotangents, strict=True))
    groups: dict[Any, list[Any]] = {}
    taken = [entry for entry in unsummed if entry[0] in new]
    unsummed[:] = [entry for entry in unsummed if entry[0] not in new]
    for entry in taken:
        groups.setdefault((*entry[2:], entry[1].dtype), []).append(entry)
    for (mesh, mesh_dims, _), entries in groups.items():
        summed = sum_together([entry[1] for entry in entries], mesh, mesh_dims)
        for (i, *_), g in zip(entries, summed, strict=True):
            new[i] = g if new[i] is None else new[i] + g
    return list(new.values())
