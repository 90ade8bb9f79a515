"""The parameters of one unit of `fully_shard`: their sharded and unsharded state, and where modules find them.

While the unit runs, in forward and in backward, its parameters are unsharded: views of the storage of `FlatBuffer`s.
Backward frees them when their cotangents have arrived. If some are frozen, it also waits for the input's cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, current_module, run_in_module
from hyper_parallel.core.data_parallel.agreement import Steps
from hyper_parallel.core.data_parallel.batches import whole_for_all
from hyper_parallel.core.data_parallel.call import Call, Leaves, ModuleGroup, chosen, writes_to
from hyper_parallel.core.data_parallel.flat_buffer import FlatBuffer
from hyper_parallel.core.data_parallel.gradients import Gradients, leave_unsummed, with_summed
from hyper_parallel.core.data_parallel.places import Places, Writes, counts_of
from hyper_parallel.core.data_parallel.reduction import CustomCollectives
from hyper_parallel.core.data_parallel.unit_facts import Settings, UnitFacts
from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["UnitParameters"]

_REQUIRES_GRAD = attrgetter("requires_grad")


class UnitParameters:
    """The parameters of a unit.

    Args:
        facts: facts of the unit.
        modules: modules of the unit, which are not kept alive.
        what: name of the unit in messages.

    Attributes:
        facts, what: the arguments.
        settings: settings of the unit.
        steps: events of the unit that ranks compare.
        gradients: reduction of its gradients.
        group: modules of the unit, and the call that they share.
        buffers: one for each dtype.
        members: for each buffer, the indices of its parameters.
        places: slots where modules look for the parameters.
        scope: module that is recorded with the all-gather, even if another unit starts it; None until known.
        collectives: the collectives of the buffers.
    """

    def __init__(self, facts: UnitFacts, modules: Sequence[Any], what: str) -> None:
        self.facts, self._platform, self.what = facts, facts.mesh.platform, what
        self.settings, self.steps = Settings(facts), Steps(facts.mesh, modules)
        self.gradients = Gradients(facts.mesh, facts.stored if facts.moves_shards else None)
        self.group = ModuleGroup(len(modules))
        self.places = Places(self._platform, modules, facts.slots, what)
        self.buffers: list[FlatBuffer] = []
        self.members: list[list[int]] = []
        self.scope: str | None = None
        self.collectives = CustomCollectives()
        self._writes = Writes(facts, what)
        self._dtypes: list[Any] | None = None
        self._asked: list[bool] | None = None
        self._trained: tuple[list[list[int]], int | None] = [], None
        #: For each buffer, its flat storage of unsharded parameters; None while the unit is sharded.
        self._values: list[Any] | None = None
        self._whole_at: Any = None  # `writes_to` the shards of parameters that stay unsharded until `reshard`
        self._is_stale = False  # whether `_values` lack values that a forward wrote, because these are elsewhere
        self._read_again = False  # whether later passes may read frozen parameters, and no function of a call tells
        self._pending = False  # whether an all-gather is pending
        self._sent: Any = None  # the shards of the pending all-gather
        self._sent_at: Any = None  # `writes_to` them when it started, if a forward or `unshard` will take it
        self._read: list[Any] | None = None  # the shards that the last forward gathered
        self._shown: list[Any] = []  # the unsharded parameters that modules find since `unshard`
        self._put: list[Any] = []  # arguments of `Places.take_back`, innermost last
        self._open = 0  # number of nested backward passes that need the unsharded parameters
        self._awaited = -1  # number of cotangents to wait for before the parameters can be freed; negative: unknown
        self._leaves: Leaves | None = None
        self._leaves_of: Any = None  # the buffers that `_leaves` were made for
        self._unsummed: list[Any] = []  # `Call.unsummed` of the leaves

    def shards(self) -> list[Any]:
        """Return the parameters and create the buffers; while an all-gather is pending, return the shards that it
        sends. If the program has written to these shards since, the all-gather is stale and discarded."""
        if self._pending and self._sent is not None:
            if self._sent_at is None or self._sent_at == writes_to(self._sent):
                return self._sent
            self.drop()
        parameters = self.places.parameters()
        dtypes = [*map(self._platform.dtype_of, parameters)]
        if self._dtypes != dtypes:
            self.drop()
            self.places.check_values(parameters)
            self.buffers, self.members = self.facts.buffers(parameters)
            for buffer in self.buffers:
                buffer.collectives = self.collectives
            self._dtypes, self._asked = dtypes, None
        return parameters

    def trained(self, parameters: Sequence[Any]) -> tuple[list[list[int]], int | None]:
        """Return the indices of the trained parameters of each buffer, and the index of one trained parameter.

        That one index suffices to check whether gradients are recorded. Callers must not change the lists.
        """
        asked = list(map(_REQUIRES_GRAD, parameters))
        if asked != self._asked:
            found = [[i for i in members if asked[i]] for members in self.members]
            self._asked, self._trained = asked, (found, next((i for of_buffer in found for i in of_buffer), None))
        return self._trained

    def as_read(self, xs: list[Any], unsummed: list[Any], one_loss: bool) -> list[Any]:
        """Return ``xs`` itself, with DTensors in place of parameters that modules read as DTensors.

        Args:
            xs: unsharded parameters by index, as new plain tensors.
            unsummed: list to which `coalesce_gradients` appends cotangents that tensor-parallel ranks must still sum.
            one_loss: whether the batch is distributed.
        """
        wrap = self._platform.wrap
        for i, layout, is_shared in self.facts.distributed:
            xs[i] = x = wrap(xs[i], layout)
            if is_shared:
                x._collect = partial(leave_unsummed, unsummed, i)
        for i in self.facts.plain if one_loss else ():
            xs[i] = whole_for_all(xs[i], self.facts.mesh)
        return xs

    def _views(self, values: Sequence[Any]) -> list[Any]:
        """Return new views of the unsharded parameters by index, from the storage of each buffer."""
        pairs = zip(self.buffers, self.members, values, strict=True)
        found = {i: x for buffer, members, flat in pairs for i, x in zip(members, buffer.views(flat), strict=True)}
        return [found[i] for i in range(len(found))]

    def show(self, wholes: Sequence[Any], shards: list[Any] | None = None) -> None:
        """Let modules find ``wholes`` in place of the shards, until `hide`."""
        if self._shown and not self._put:
            self.places.take_beside()
        self._put.append(self.places.put(wholes, shards))
        self._platform.stand_for(wholes, self.places.parameters())

    def take_writes(self, call: Call, wholes: Sequence[Any], versions: Sequence[int]) -> None:
        """Copy values that a forward has written to the unsharded parameters into the shards.

        Args:
            call: call of the unit.
            wholes: the unsharded parameters that modules have read.
            versions: `counts_of` these tensors before the forward.

        Raises:
            ValueError: if the forward has replaced a parameter.
        """
        self.places.check_shown()
        with self._platform.no_dispatch():
            written = self._writes.arrive(wholes, versions, call.parameters, self.buffers, self.members)
            if written:
                call.versions = writes_to(call.parameters)
                self._whole_at = self._whole_at and call.versions
            stays = self._whole_at is not None or not self.settings.reshard_after_backward
            if stays and self._values is not None and self._left_storage(wholes, written, versions):
                self._is_stale, self._whole_at = True, None
                self.take_over()

    def _left_storage(self, wholes: Sequence[Any], written: bool, versions: Sequence[int]) -> bool:
        """Return whether a forward has written values outside of the storage of the unsharded parameters."""
        if not self._platform.counts_writes:
            return written or counts_of(wholes) != versions
        return not all(0 in self._platform.shape_of(whole) or self.frees(whole) for whole in wholes)

    def hide(self) -> None:
        """Let modules find the tensors that were in place before `show`."""
        self.places.take_back(self._put.pop())
        if self._shown and not self._put:
            self.places.put_beside(self._shown)

    def stay_whole(self) -> None:
        """Keep the parameters unsharded until `reshard`."""
        self._whole_at = writes_to(self.places.parameters())

    def check_stale(self, shards: Sequence[Any]) -> None:
        """Raise RuntimeError if unsharded parameters are stale because the shards have changed."""
        if self._whole_at is not None and not self._is_current(shards):
            raise RuntimeError(
                f"{self.what}: a parameter changed while it was unsharded: call reshard() before the optimizer's step"
            )

    def _is_current(self, shards: Sequence[Any]) -> bool:
        is_same = self._whole_at == writes_to(shards)
        if not is_same or self._platform.counts_writes or self._values is None:
            return is_same
        with self._platform.no_dispatch():
            pairs = zip(self.buffers, self.members, self._values, strict=True)
            return all(buffer.is_current(values, chosen(shards, members)) for buffer, members, values in pairs)

    # ---------------------------------------------------------------------- whole and sharded
    def start_early(self) -> bool:
        """Start the all-gather for a later forward or `unshard`, unless a forward or backward of the unit is running.

        Parameters are unsharded there already. Values gathered before the end of a forward would also lack the values
        that it writes.

        Returns:
            Whether the all-gather was started.
        """
        if self._put or not self.start():
            return False
        self._sent_at = writes_to(self._sent)
        return True

    def start(self, parameters: list[Any] | None = None, again: bool = False) -> bool:
        """Start the all-gather; return False if there is nothing to do.

        Args:
            parameters: a fresh result of `shards`, if the caller has one.
            again: whether this is for a backward. It gathers from the parts that `shrink` saved on fewer ranks, if any.
        """
        if self._values is not None or not self.facts.slots or self._pending:
            return False
        self.steps.gather()
        with self._platform.no_dispatch():
            # Backward needs the shards that forward has gathered; `show` checks that modules still hold them.
            again = again and self._read is not None
            if parameters is None:
                parameters = self._read if again else self.shards()
            given: Any = parameters
            self._sent, self._sent_at, self._read = given, None, given
            if LISTENERS:
                run_in_module(current_module() if self.scope is None else self.scope, lambda: self._begin(given, again))
            else:
                self._begin(given, again)
        self._pending = True
        return True

    def _begin(self, parameters: Sequence[Any], again: bool) -> None:
        for buffer, members in zip(self.buffers, self.members, strict=True):
            if again and buffer.part is not None:
                buffer.start_from_part()
            else:
                buffer.start(chosen(parameters, members), again)

    def drop(self) -> None:
        """Discard the pending all-gather, if there is one."""
        if self._pending:
            self._pending, self._sent = False, None
            for buffer in self.buffers:
                buffer.drop()

    def unshard(self) -> None:
        """Gather the parameters, and let modules find the unsharded ones until `reshard`, or until the unit has run.
        Within its forward or backward this does nothing, because the parameters are unsharded already."""
        if not self.facts.slots or self._put or self._shown:
            return
        platform = self._platform
        with platform.no_dispatch():
            parameters = self.shards()
            self.places.check_there(parameters)
            self.check_stale(parameters)
            values = self.gather(self.is_freed, parameters)
            self._values, self._whole_at = values, writes_to(parameters)
            wholes = self._views(values)
            for i, layout, _ in self.facts.distributed:
                wholes[i] = platform.wrap(wholes[i], layout)
        self._shown = wholes
        self.places.put_beside(wholes)

    def take_over(self) -> None:
        """Let modules find shards again, so that `free` also frees parameters that `unshard` has gathered."""
        if self._shown:
            self._shown, self._whole_at = [], None
            self.places.take_beside()

    def reshard(self) -> None:
        """Undo `unshard`, and free parameters that stayed unsharded after backward."""
        self.drop()
        self.take_over()
        self._whole_at = None
        self.free()

    def gather(self, keep: bool, parameters: list[Any] | None = None) -> list[Any]:
        """Return the flat storage of each buffer; with ``keep``, the storage that `free` frees."""
        if self._values is not None and (self._open or self._whole_at is not None):
            return self._values
        values, self._values = self._values, None
        self.start(parameters)
        self._pending, self._sent = False, None
        found = [b.take(keep) for b in self.buffers]
        self._values, self._is_stale = found if keep else values, self._is_stale and not keep
        return found

    def shrink(self, mesh: DeviceMesh) -> None:
        """Save a part of the unsharded parameters on each rank of the last dimension of ``mesh``, before `free`."""
        if self._values is not None and not self._open and self._whole_at is None and self.is_freed:
            with self._platform.no_grad(), self._platform.no_dispatch():
                for buffer in self.buffers:
                    buffer.shrink(mesh)

    def drop_parts(self) -> None:
        """Discard the parts of the unsharded parameters that `shrink` has saved."""
        for buffer in self.buffers:
            buffer.part = None

    def frees(self, x: Any) -> bool:
        """Return whether a plain tensor is stored in memory that `free` frees."""
        return any(buffer.holds(x) for buffer in self.buffers)

    def free(self) -> None:
        """Free the unsharded parameters, unless they shall stay."""
        if self._values is not None and not self._open and self._whole_at is None:
            self._values = None
            for buffer in self.buffers if self.is_freed and not self.settings.keeps_storage else ():
                buffer.free()

    # ---------------------------------------------------------------------- backward
    @property
    def is_freed(self) -> bool:
        """Return whether the platform can free unsharded parameters after forward, and gather them for backward."""
        return self._platform.frees_storage

    @property
    def reopens(self) -> bool:
        """Return whether backward unshards the parameters."""
        return self.is_freed and bool(self.facts.slots) and self.settings.whole_in_backward

    def open(self, call: Call, one_loss: bool) -> None:
        """Start the backward: gather the parameters, for saved tensors and for recomputed forwards."""
        if not self.reopens:
            return
        if self._open:
            self._open += 1
            return
        if self._values is None:
            self.start(again=True)
            self.gather(True)
        self._awaited = sum(map(bool, call.trained)) + (not call.runs_in_order(self._platform))
        self._read_again = call.again and not any(call.trained)
        if self._leaves is None or self._leaves_of is not self.buffers or self._leaves.trained != call.trained:
            found = self._views([buffer.whole for buffer in self.buffers])
            self._leaves = Leaves(self.as_read(found, self._unsummed, False), call.trained)
            self._leaves_of = self.buffers
        leaves = self._leaves.xs
        if one_loss:
            with self._platform.no_dispatch(), self._platform.with_grad():
                leaves = self.as_read(list(leaves), self._unsummed, True)
        self.show(leaves, call.parameters)
        self._writes.begin_again(leaves)
        self._open = 1

    def is_last_awaited(self) -> bool:
        """Record the arrival of the cotangents of one buffer, or of the input. Return whether they were the last."""
        self._awaited -= 1
        return self._awaited == 0

    def with_leaves(self, indices: Sequence[int], cotangents: Sequence[Any]) -> Sequence[Any]:
        """Return ``cotangents`` plus the gradients of a recomputed forward, which are cleared."""
        if not self._open or self._leaves is None:
            return cotangents
        with self._platform.no_dispatch():
            return with_summed(self._unsummed, indices, self._leaves.add(indices, cotangents))

    def close(self, recomputes: bool) -> list[tuple[int, Sequence[int], Sequence[Any]]]:
        """End a backward. At the end of the outermost one the parameters are resharded, unless they shall stay.

        Args:
            recomputes: whether a recomputed forward may have had its own backward.

        Returns:
            Gradients of such a forward that are still to be reduced: tuples of the number of the buffer, indices and
            cotangents.
        """
        if self._open != 1:
            self._open = max(self._open - 1, 0)
            return []
        self._awaited = -1
        if self._writes.arrive_again(self.places.parameters(), self.buffers, self.members):
            self._leaves_of = None  # a leaf may have other memory now
        self.hide()
        found = []
        for b, trained in enumerate(self._leaves.trained if recomputes and self._leaves is not None else ()):
            cotangents = self.with_leaves(trained, [None] * len(trained))
            if any(g is not None for g in cotangents):
                found.append((b, trained, cotangents))
        self._open = 0
        self.drop_parts()
        if self._is_stale or (self.settings.reshard_after_backward and not self._read_again):
            self.take_over()
            self.free()
        else:
            self.stay_whole()
        return found

    def abandon(self) -> None:
        """Discard the state of a failed backward. A backward in which it was nested continues."""
        if self._open > 1:
            self._open -= 1
        elif self._open:
            self._open = 0
            self.hide()
            self._unsummed.clear()
            if self._leaves is not None and self._platform.accumulates_gradients:
                self._leaves.clear()
            self.free()
