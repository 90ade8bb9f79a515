"""Agreement of ranks on the order of units, so that each collective belongs to the same unit on all ranks.

If ranks ran different units, an all-gather of one unit would meet the all-gather of another, and mix up parameters. So
ranks compare an event when it follows a history of events for the first time. Histories that all ranks have agreed on
are stored as a tree. While only one event has followed a history, a rank that repeats the event compares nothing. If
several events have followed a history, ranks compare each time. A rank with a new event does not know whether the other
ranks have it too. The others may be waiting in a collective of the usual event already. So the rank asks the rendezvous
store of the process group. Inside `check_ranks` ranks always compare.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.errors import RankMismatchError, names_of
from hyper_parallel.core.communication.rank_check import Check
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.tensor_parallel.program.planned_parameters import UNIT

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["Agreement", "Event", "Steps", "agreements_below"]

_REMEDY = (
    "all ranks must run the units of fully_shard in the same order. If ranks choose different modules, such as "
    "experts by their own tokens, apply fully_shard to the module around the choice. Or call each expert on every "
    "rank, with no rows if need be"
)
#: id of a unit's module -> weak reference to the module, which detects a reused id, and the module's path in the model.
Paths = Mapping[int, tuple[weakref.ref, str]]

#: Ranks -> numbers of their next questions, because texts remain in the store, and several meshes may have the same
#: ranks.
_QUESTIONS: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(count)
#: Maximum number of events that an `Agreement` stores. Beyond it, the agreement starts again with no history.
_MOST = 1 << 14


class Event:
    """An event of a unit that ranks compare, such as a gather. The text of an event is the same on all ranks.

    Args:
        kind: name of the event, for messages.
        steps: the steps of the event's unit, which are not kept alive.

    Attributes:
        trees: set for the event of a forward, by `Agreement`: the agreement's count of restarts, the place of the first
            event within this forward, and the place after this forward.
    """

    __slots__ = ("_kind", "_steps", "trees")

    def __init__(self, kind: str, steps: Steps) -> None:
        self._kind, self._steps = kind, weakref.ref(steps)
        self.trees: dict[Agreement, tuple[int, _Place, _Place]] = {}

    def text(self, paths: Paths) -> str:
        """Return a description of the event, with the paths of modules from ``paths``."""
        steps = self._steps()
        return f"the {self._kind} of {'a unit that is gone' if steps is None else steps.unit_in_words(paths)}"


class Steps:
    """The events of one unit that ranks compare.

    Args:
        mesh: data-parallel mesh.
        modules: the modules of the unit, which are not kept alive.

    Attributes:
        forward, end, end_of_backward: events that only an outermost unit has.
    """

    def __init__(self, mesh: DeviceMesh, modules: Sequence[Any]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self.forward, self.end = Event("forward", self), Event("end of the forward", self)
        self.end_of_backward = Event("end of the backward", self)
        self._gather, self._reduction = Event("gather", self), Event("reduction of gradients", self)
        of_dims = [agreement_of(mesh, dim) for dim in range(mesh.ndim)]
        self._gathers = [x for x in of_dims[-1:] if x is not None]  # the last dimension is the one that shards
        self._reduces = [x for x in reversed(of_dims) if x is not None]

    def gather(self) -> None:
        """Make ranks agree that the parameters of the unit are gathered next. `Agreement.comes` compares."""
        for agreement in self._gathers:
            agreement.comes(self._gather)

    def outside(self) -> None:
        """Discard the last forward from the comparison, when the program gathers the unit by hand outside of any
        forward.

        Some ranks may have deleted the model of the last forward, so ranks must not compare this forward.
        """
        for agreement in self._reduces:
            agreement.forward = None

    def reduce(self) -> None:
        """Make ranks agree that gradients of the unit are reduced or accumulated next."""
        for agreement in self._reduces:
            agreement.comes(self._reduction)

    def unit_in_words(self, paths: Paths) -> str:
        """Return the name of the unit in messages; ``paths`` as for `Event.text`."""
        found = []
        for module in (ref() for ref in self._modules):
            known = paths.get(id(module))
            path = known[1] if known is not None and known[0]() is module else ""
            found.append(f"{path!r} ({type(module).__name__})" if path else type(module).__name__)
        return " and ".join(found)


class _Place:
    """A node in the tree of histories. A node stores the events that have followed a history, usually one, each with
    the next node."""

    __slots__ = ("event", "next", "others")

    def __init__(self) -> None:
        self.event: Event | None = None
        self.next: Any = None
        self.others: dict[Event, _Place] = {}

    def lead(self, event: Event) -> tuple[_Place, bool]:
        """Return the node that follows an event, and whether the event is new at this node."""
        found = self.next if self.event is event else self.others.get(event)
        if found is not None:
            return found, False
        found = _Place()
        if self.event is None:
            self.event, self.next = event, found
        else:
            self.others[event] = found
        return found, True


class Agreement:
    """A record of the events of units, which is the same on all ranks of one mesh dimension.

    Args:
        mesh: data-parallel mesh.
        mesh_dim: the mesh dimension.

    Attributes:
        forward: event of the outermost unit's forward that started last, until a collective runs in it; then None.
        paths: paths of the units' modules in the running model, by the ids of the modules.
    """

    def __init__(self, mesh: DeviceMesh, mesh_dim: int) -> None:
        self._platform, self._ranks = mesh.platform, mesh.ranks_along(mesh_dim)
        self._group = mesh.platform_group(mesh_dim)
        self._check = Check(mesh.platform, [(self._group, self._ranks)])
        self.forward: Event | None = None
        self.paths: Paths = {}
        self._beginnings = self._size = 0
        self._after, self._at = _Place(), _Place()

    def comes(self, event: Event) -> None:
        """Make all ranks agree that ``event`` comes next.

        Raises:
            RankMismatchError: on all ranks, if they do not agree.
        """
        if self.forward is not None:
            forward, self.forward = self.forward, None
            self._compare(self._after, forward)
            tree = forward.trees.get(self)
            if tree is None or tree[0] != self._beginnings:
                tree = forward.trees[self] = self._beginnings, _Place(), _Place()
            _, self._at, self._after = tree
        self._at = self._compare(self._at, event)

    def begin_anew(self) -> None:
        """Discard the full history, for example after an error. All ranks must call this method."""
        self._size, self._beginnings, self.forward = 0, self._beginnings + 1, None
        self._after, self._at = _Place(), _Place()

    def _compare(self, at: _Place, event: Event) -> Any:
        """Make all ranks agree on ``event``, and return the node that follows it."""
        if at.event is event and not at.others and not CHECKS:
            return at.next
        try:
            if CHECKS or at.event is None or at.others:
                facts = {"what comes": event.text(self.paths)}
                self._check.agree("what a unit does", None, self._ranks, facts, _REMEDY)
            else:
                self._ask(event, at.event)
        except RankMismatchError:
            self.begin_anew()
            raise
        found, is_new = at.lead(event)
        self._size += is_new
        if self._size > _MOST:  # on all ranks at the same event
            self.begin_anew()
        return found

    def _ask(self, event: Event, usual: Event) -> None:
        """Ask the store whether all ranks do ``event`` in place of ``usual``, the only event here so far."""
        place, mine = f"units/{'_'.join(map(str, self._ranks))}/{next(_QUESTIONS[self._ranks])}", event.text(self.paths)
        found = self._platform.exchange_texts(self._ranks, place, mine)
        if found is None or (len(found) == len(self._ranks) and set(found.values()) == {mine}):
            return
        me = self._platform.rank()
        others = [f"rank {rank}: {text}" for rank, text in sorted(found.items()) if rank != me]
        absent = tuple(rank for rank in self._ranks if rank not in found)
        if absent:
            others.append(f"{names_of(absent)}: probably {usual.text(self.paths)}, as in earlier steps")
        error = RankMismatchError(
            f"ranks are about to run different units. Rank {me}: {mine}; {'; '.join(others)}: {_REMEDY}",
            (me,),
        )
        self._platform.tell_of_failure([self._group], self._ranks, str(error))
        raise error


#: (mesh, dimension) -> its `Agreement`, as long as the mesh is in use.
_AGREEMENTS: Table = Table(lambda key: Agreement(*key), 1 << 12, "agreements of ranks on units")


def agreement_of(mesh: DeviceMesh, mesh_dim: int) -> Agreement | None:
    """Return the `Agreement` of all units along a mesh dimension; None for a dimension of one rank."""
    found: Agreement | None = _AGREEMENTS[mesh, mesh_dim] if mesh.shape[mesh_dim] > 1 else None
    return found


def agreements_below(module: Any, platform: Any) -> tuple[Paths, list[Agreement]]:
    """Return the paths of all modules of units at and below ``module``, by the ids of the modules.

    Also return the agreements of these units.
    """
    below = [(m, path, getattr(m, UNIT, None)) for path, m in platform.named_modules(module)]
    paths = {id(m): (weakref.ref(m), path) for m, path, facts in below if facts is not None}
    meshes = dict.fromkeys(facts.mesh for _, _, facts in below if facts is not None)
    found = [agreement_of(mesh, dim) for mesh in meshes for dim in range(mesh.ndim)]
    return paths, [agreement for agreement in found if agreement is not None]
