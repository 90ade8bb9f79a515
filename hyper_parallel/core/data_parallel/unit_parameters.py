"""The parameters of one unit of `fully_shard`: sharded, gathered, and where modules find them.

While the unit runs, in forward and in backward, its parameters are whole: views of the storage of `FlatBuffer`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, current_module, run_in_module
from hyper_parallel.core.data_parallel.agreement import Steps
from hyper_parallel.core.data_parallel.call import Call, chosen, versions_of
from hyper_parallel.core.data_parallel.flat_buffer import FlatBuffer
from hyper_parallel.core.data_parallel.gradients import leave_unsummed
from hyper_parallel.core.data_parallel.places import Places, Writes, counts_of
from hyper_parallel.core.data_parallel.plan import Plan
from hyper_parallel.core.data_parallel.reduction import CustomCollectives
from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["UnitParameters"]

_REQUIRES_GRAD = attrgetter("requires_grad")


class UnitParameters:
    """Parameters of a unit.

    Args:
        plan: plan of the unit.
        modules: modules of the unit. They are not kept alive.
        what: the unit, for messages.
        steps: steps of the unit, which ranks compare.

    Attributes:
        buffers: one for each dtype.
        members: for each buffer, the indices of its parameters.
        places: where modules look for the parameters.
        is_open: whether a backward needs the whole parameters.
        scope: the module that is recorded with the all-gather, also where another unit begins it; None until known.
        keeps_storage: whether the storage of whole parameters is never freed, so that its address stays.
        collectives: the collectives of the buffers.
    """

    def __init__(self, plan: Plan, modules: Sequence[Any], what: str, steps: Steps) -> None:
        self._plan, self._platform, self._what, self._steps = plan, plan.mesh.platform, what, steps
        self.places = Places(self._platform, modules, plan.slots, what)
        self.buffers: list[FlatBuffer] = []
        self.members: list[list[int]] = []
        self.is_open = self.keeps_storage = False
        self.scope: str | None = None
        self.collectives = CustomCollectives()
        self._writes = Writes(plan, what)
        self._dtypes: list[Any] | None = None
        self._asked: list[bool] | None = None
        self._trained: tuple[list[list[int]], int | None] = [], None
        #: For each buffer, the flat storage that is whole now; None while the unit is sharded.
        self._values: list[Any] | None = None
        self._whole_at: Any = None  # versions of the shards, of a unit that stays whole until it is told otherwise
        self._under_way = False  # whether an all-gather is pending
        self._sent: Any = None  # the shards of the pending all-gather
        self._read: list[Any] | None = None  # the shards that the last forward has read
        self._shown: list[Any] = []  # the whole parameters that modules find since `unshard`
        self._put: list[Any] = []  # arguments of `Places.take_back`, innermost last

    def shards(self) -> list[Any]:
        """Return the parameters, and make buffers for them when there are none for their dtypes. While an all-gather is
        pending, return the shards of that: `show` finds out whether they are still there."""
        if self._under_way and self._sent is not None:
            return self._sent
        parameters = self.places.parameters()
        dtypes = [*map(self._platform.dtype_of, parameters)]
        if self._dtypes != dtypes:
            self.drop()
            self.buffers, self.members = self._plan.buffers(parameters)
            for buffer in self.buffers:
                buffer.collectives = self.collectives
            self._dtypes, self._asked = dtypes, None
        return parameters

    def memory(self) -> list[Any]:
        """Return the memory of the shards, as plain tensors."""
        with self._platform.no_dispatch(), self._platform.no_grad():
            return [*map(self._platform.detach, self.places.parameters())]

    def move(self, before: Sequence[Any] = ()) -> None:
        """Move the shards of each buffer into one storage, which is gathered without copies. Called before the program
        can hold any of them: from then on they stay where they are.

        Args:
            before: an earlier result of `memory`. A shard that still has its memory may be held, and then all stay.
        """
        platform = self._platform
        if not self._plan.slots:
            return
        with platform.no_dispatch(), platform.no_grad():
            parameters = self.places.parameters()
            if any(map(platform.is_meta, parameters)):
                return
            pairs = zip(before, parameters, strict=True) if before else ()
            if any(0 not in platform.shape_of(x) and platform.same_memory(x, p) for x, p in pairs):
                return
            parameters = self.shards()
            for buffer, members in zip(self.buffers, self.members, strict=True):
                buffer.move(chosen(parameters, members))

    def trained(self, parameters: Sequence[Any]) -> tuple[list[list[int]], int | None]:
        """Return for each buffer the indices of trained ``parameters``, and the index of one trained parameter. That
        one tells for all whether gradients are recorded now. The lists must not be changed."""
        asked = list(map(_REQUIRES_GRAD, parameters))
        if asked != self._asked:
            found = [[i for i in members if asked[i]] for members in self.members]
            self._asked, self._trained = asked, (found, next((i for of_buffer in found for i in of_buffer), None))
        return self._trained

    def as_planned(self, xs: list[Any], unsummed: list[Any]) -> list[Any]:
        """Return ``xs`` itself, with DTensors where a tensor-parallel style has made the parameters such.

        Args:
            xs: whole parameters by index, as new plain tensors.
            unsummed: takes cotangents that `coalesce_gradients` leaves to be summed over tensor-parallel ranks.
        """
        wrap = self._platform.wrap
        for i, layout, is_shared in self._plan.distributed:
            xs[i] = x = wrap(xs[i], layout)
            if is_shared:
                x._collect = partial(leave_unsummed, unsummed, i)
        return xs

    def show(self, wholes: Sequence[Any], shards: list[Any] | None = None) -> None:
        """Let modules find these tensors, until `hide`."""
        if self._shown and not self._put:
            self.places.take_beside()
        self._put.append(self.places.put(wholes, shards))
        self._platform.stand_for(wholes, self.places.parameters())

    def take_writes(self, call: Call, wholes: Sequence[Any], versions: Sequence[int]) -> None:
        """Copy values that a forward has written to ``wholes`` into the shards.

        Args:
            call: call of the unit.
            wholes: the tensors that modules have found.
            versions: their `counts_of` before the forward.

        Raises:
            ValueError: where the forward has put something in the place of a parameter.
        """
        self.places.check_shown()
        with self._platform.no_dispatch():
            written = self._writes.arrive(wholes, versions, call.parameters, self.buffers, self.members)
            if written:
                call.versions = versions_of(call.parameters)
                if self._whole_at is not None:
                    self._whole_at = call.versions
            if self._whole_at is None or self._values is None or self._platform.counts_writes:
                return
            if written or counts_of(wholes) != versions:
                self._follow(wholes, self._values)

    def _follow(self, wholes: Sequence[Any], before: Sequence[Any]) -> None:
        """Copy values that a forward has written to the parameters that stay whole until `reshard`.

        A backend that does not count writes may have put them into other memory.

        Args:
            wholes: the tensors that modules have found.
            before: the storage of each buffer, as it was gathered.
        """
        platform = self._platform
        with platform.no_grad():
            found = [platform.detach(whole) for whole in wholes]
            stored = zip(self.buffers, self.members, before, strict=True)
            self._values = [buffer.joined(values, chosen(found, members)) for buffer, members, values in stored]
            for shown, whole in zip(self._shown, found, strict=False):
                platform.write(shown, whole)

    def hide(self) -> None:
        """Let modules find the tensors that they found before `show`."""
        self.places.take_back(self._put.pop())
        if self._shown and not self._put:
            self.places.put_beside(self._shown)

    def stay_whole(self) -> None:
        """Stay whole until `reshard`."""
        self._whole_at = versions_of(self.places.parameters())

    def check_stale(self, shards: Sequence[Any]) -> None:
        """Raise RuntimeError where parameters that have stayed whole are stale: the shards have changed since."""
        if self._whole_at is not None and not self._is_current(shards):
            raise RuntimeError(
                f"{self._what}: a parameter was changed while it was whole: call reshard() before the optimizer's step"
            )

    def _is_current(self, shards: Sequence[Any]) -> bool:
        if self._whole_at != versions_of(shards):
            return False
        if self._platform.counts_writes or self._values is None:
            return True
        with self._platform.no_dispatch():
            pairs = zip(self.buffers, self.members, self._values, strict=True)
            return all(buffer.is_current(values, chosen(shards, members)) for buffer, members, values in pairs)

    # ---------------------------------------------------------------------- whole and sharded
    def start_by_hand(self) -> None:
        """Begin the all-gather, unless a forward or backward of the unit runs.

        There the parameters are whole anyway, and values gathered before the end of a forward lack its writes.
        """
        if not self._put:
            self.start()

    def start(self, parameters: list[Any] | None = None, again: bool = False) -> bool:
        """Begin the all-gather; returns False where nothing is to be done.

        Args:
            parameters: the result of `shards`, where that was just called.
            again: whether this is for a backward: it gathers from parts that were kept on fewer ranks, if any.
        """
        if self._values is not None or not self._plan.slots or self._under_way:
            return False
        self._steps.gather()
        with self._platform.no_dispatch():
            # Backward needs the shards that forward has read; `show` finds out whether they are still there.
            again = again and self._read is not None
            if parameters is None:
                parameters = self._read if again else self.shards()
            given: Any = parameters
            self._sent = self._read = given
            if LISTENERS:
                scope = current_module() if self.scope is None else self.scope
                run_in_module(scope, lambda: self._begin(given, again))
            else:
                self._begin(given, again)
        self._under_way = True
        return True

    def _begin(self, parameters: Sequence[Any], again: bool) -> None:
        for buffer, members in zip(self.buffers, self.members, strict=True):
            if again and buffer.part is not None:
                buffer.start_from_part()
            else:
                buffer.start(chosen(parameters, members), again)

    def drop(self) -> None:
        """Discard the pending all-gather, if there is one."""
        if self._under_way:
            self._under_way, self._sent = False, None
            for buffer in self.buffers:
                buffer.drop()

    def unshard(self) -> None:
        """Make the parameters whole, and let modules find them until `reshard`. The unit also frees them after its
        forward or backward. Within these it does nothing: they are whole anyway."""
        if not self._plan.slots or self._put or self._shown:
            return
        platform = self._platform
        with platform.no_dispatch():
            parameters = self.shards()
            self.places.check_there(parameters)
            self.check_stale(parameters)
            values = self.gather(platform.frees_storage, parameters)
            self._values, self._whole_at = values, versions_of(parameters)
            wholes: list[Any] = [None] * len(parameters)
            for buffer, members, flat in zip(self.buffers, self.members, values, strict=True):
                for i, x in zip(members, buffer.views(flat), strict=True):
                    wholes[i] = x if self._plan.inner[i] is None else platform.wrap(x, self._plan.inner[i])
        self._shown = wholes
        self.places.put_beside(wholes)

    def take_over(self) -> None:
        """Let modules find shards again, and let `free` act as if `unshard` had not been called."""
        if self._shown:
            self._shown, self._whole_at = [], None
            self.places.take_beside()

    def reshard(self) -> None:
        """Undo `unshard`, and free parameters that have stayed whole after backward."""
        self.drop()
        self.take_over()
        self._whole_at = None
        self.free()

    def gather(self, keep: bool, parameters: list[Any] | None = None) -> list[Any]:
        """Return the flat storage of each buffer, whole. With ``keep`` it is the storage that `free` frees.
        ``parameters`` as for `start`."""
        if self._values is not None and (self.is_open or self._whole_at is not None):
            return self._values
        values, self._values = self._values, None
        self.start(parameters)
        self._under_way, self._sent = False, None
        found = [b.take(keep) for b in self.buffers]
        self._values = found if keep else values
        return found

    def open(self) -> None:
        """Begin a backward: the parameters are whole until `is_open` is False again."""
        if self._values is None:
            self.start(again=True)
            self.gather(True)
        self.is_open = True

    def shrink(self, mesh: DeviceMesh) -> None:
        """Keep a part of the whole parameters on each rank of the last dimension of ``mesh``, before `free`."""
        if self._values is not None and not self.is_open and self._whole_at is None and self._platform.frees_storage:
            with self._platform.no_grad(), self._platform.no_dispatch():
                for buffer in self.buffers:
                    buffer.shrink(mesh)

    def drop_parts(self) -> None:
        """Discard the parts that `shrink` has kept."""
        for buffer in self.buffers:
            buffer.part = None

    def frees(self, x: Any) -> bool:
        """Return whether a plain tensor lies in memory that `free` frees."""
        return any(buffer.holds(x) for buffer in self.buffers)

    def free(self) -> None:
        """Free the whole parameters, unless they are to stay."""
        if self._values is not None and not self.is_open and self._whole_at is None:
            self._values = None
            for buffer in () if self.keeps_storage else self.buffers:
                buffer.free()
