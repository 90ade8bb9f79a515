"""Places where the modules of a unit look for its parameters, the tensors that are there, and writes to these.

Values that a forward writes go into the shards: each rank keeps its part. Frameworks and hooks of the platform count
most writes. Others (`p.data.mul_()`) are found by comparing values. Values are compared in the first forwards of a
unit, and inside `check_ranks`. A parameter with one such write is compared in every forward after it.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem, is_, setitem
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.call import versions_of
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.observers import CHECKS

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.flat_buffer import FlatBuffer
    from hyper_parallel.core.data_parallel.plan import Plan

__all__ = ["Places", "Slot", "Writes", "counts_of", "found_there"]

_LAYOUT = attrgetter("_layout")
#: Number of first forwards of a unit in which values are compared.
_FIRST = 2


@dataclass(frozen=True)
class Slot:
    """A parameter in one of the modules that hold it.

    Attributes:
        path: path of the module, from the module of the unit.
        root: index of that among the modules of the unit.
        name: name of the parameter in the module.
        index: index of the parameter in the unit. Modules that share one have slots of the same index.
        layout: layout of the shard.
    """

    path: str
    name: str
    index: int
    layout: Layout
    root: int = 0

    def __str__(self) -> str:
        return repr(f"{self.path}.{self.name}" if self.path else self.name)


class Places:
    """The slots of the module objects of a unit. It keeps their tables of parameters alive, but no modules.

    Args:
        modules: the modules of the unit.
        slots: all slots of the unit.
        what: the unit, for messages.
        applied: the function that made it a unit.
    """

    def __init__(
        self, platform: Any, modules: Sequence[Any], slots: Sequence[Slot], what: str, applied: str = "fully_shard"
    ) -> None:
        self._platform, self._what, self._applied, self._described = platform, what, applied, slots
        holders = [_module_at(modules[slot.root], slot.path) for slot in slots]
        #: By slot: the parameter table of its module, the same one as long as the module lives; the name there; the
        #: layout of the shard; the index of the parameter. Indices are None where each has one slot, in their order.
        self._tables = [platform.own_parameters(holder) for holder in holders]
        self._names, self._layouts = [slot.name for slot in slots], [slot.layout for slot in slots]
        indices = [slot.index for slot in slots]
        self._indices = None if indices == list(range(len(slots))) else indices
        self._gone: list[Any] = []
        self._holders = [weakref.ref(holder, self._gone.append) for holder in holders]
        self._count = 1 + max((slot.index for slot in slots), default=-1)
        #: Modules inside of the unit that hold parameters of it, or contain some that do: those that backward may
        #: recompute and differentiate on their own, as MindSpore's ``recompute`` does.
        self._inside: list[tuple[Any, str]] = []
        if platform.differentiates_again is not None and applied == "fully_shard":
            paths = [(slot.root, f"{slot.path}.") for slot in slots]
            self._inside = [
                (weakref.ref(m), path)
                for i, module in enumerate(modules)
                for path, m in platform.named_modules(module)
                if path and any(root == i and holder.startswith(f"{path}.") for root, holder in paths)
            ]
        self.take_beside()  # attributes that a copy of a module has inherited
        #: The shards by index, while other tensors are in their place, and these.
        self._shards: list[Any] | None = None
        self._shown: Sequence[Any] = ()

    @property
    def holds_others(self) -> bool:
        """Return whether other tensors are in the place of the parameters now."""
        return self._shards is not None

    def parameters(self) -> list[Any]:
        """Return the shards in the order of their indices, also while other tensors are in their place.

        Raises:
            ValueError: where something has taken the place of one since, or a module is gone.
        """
        if self._shards is not None:
            return self._shards
        self._check_holders()
        try:
            found = list(map(getitem, self._tables, self._names))
            as_planned = all(map(is_, map(_LAYOUT, found), self._layouts))
        except (KeyError, AttributeError):  # nothing is there, or something plain
            as_planned = False
        if not as_planned:
            raise self._taken([getattr(x, "_layout", None) for x in self._found()], self._layouts)
        if self._indices is None:
            return found
        by_index: list[Any] = [None] * self._count
        for i, x in zip(self._indices, found, strict=True):
            by_index[i] = x
        return by_index

    def _by_slot(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return tensors if self._indices is None else [tensors[i] for i in self._indices]

    def _found(self) -> list[Any]:
        """Return the entry of each slot, None where there is none."""
        return [table.get(name) for table, name in zip(self._tables, self._names, strict=True)]

    def _check_holders(self) -> None:
        if self._gone:
            raise self._taken([holder() is None for holder in self._holders], [False] * len(self._holders))

    def _taken(self, found: Sequence[Any], wanted: Sequence[Any]) -> ValueError:
        """Return the error for the first slot in which the two differ."""
        at = next(i for i, (x, y) in enumerate(zip(found, wanted, strict=True)) if x is not y)
        return ValueError(
            f"{self._what}: something has taken the place of its parameter {self._described[at]}. Copy values into the "
            f"parameter that is there instead, and replace modules before {self._applied}"
            f"{found_there(self._platform, self._found()[at])}"
        )

    def check_recompute(self) -> None:
        """Raise ValueError where backward recomputes a part of the unit and differentiates that on its own.

        The recomputation asks for gradients of the shards. It reads whole parameters, which do not lead to the shards.
        """
        for ref, path in self._inside:
            module = ref()
            if module is not None and self._platform.differentiates_again(module):
                raise ValueError(
                    f"{self._what}: {path!r} is computed again in backward, which gives no gradients of parameters "
                    f"that belong to a unit around it: apply fully_shard to {path!r} as well, before the module "
                    "around it, or call its recompute(use_reentrant=False)"
                )

    def check_values(self, parameters: Sequence[Any]) -> None:
        """Raise ValueError where one of the shards has no values: it is on meta."""
        for slot in self._described if self._platform.needs_values else ():
            if self._platform.is_meta(parameters[slot.index]):
                raise ValueError(
                    f"{self._what}: parameter {slot} has no values: give it some on this rank's device before the "
                    "module is called, as to_empty() and reset_parameters() do"
                )

    def put(self, tensors: Sequence[Any], parameters: list[Any] | None = None) -> Any:
        """Let modules find these tensors, by index; returns the argument of `take_back`.

        Args:
            tensors: one for each parameter.
            parameters: an earlier result of `parameters`, if there is one.

        Raises:
            ValueError: as `parameters`.
        """
        before = self._shards, self._shown
        if self._shards is None:
            if parameters is None:
                parameters = self.parameters()
            else:
                self.check_there(parameters)
            self._shards = parameters
        self._shown = tensors
        self._write(tensors)
        return before

    def check_there(self, tensors: Sequence[Any]) -> None:
        """Raise ValueError where a module is gone, or its table has something else than ``tensors``, by index."""
        self._check_holders()
        wanted = self._by_slot(tensors)
        try:
            unchanged = all(map(is_, map(getitem, self._tables, self._names), wanted))
        except KeyError:
            unchanged = False
        if not unchanged:
            raise self._taken(self._found(), wanted)

    def check_shown(self) -> None:
        """Raise ValueError where something has taken the place of a tensor that `put` has put there."""
        self.check_there(self._shown)

    def take_back(self, before: Any) -> None:
        """Let modules find the tensors that they found before a `put`."""
        found: Any = self._shards if before[0] is None else before[1]
        self._shards, self._shown = before
        self._write(found)

    def put_beside(self, tensors: Sequence[Any]) -> None:
        """Let the attributes of modules be these tensors, by index. Parameters are looked for in the modules' tables,
        and there the shards stay."""
        for holder, name, x in zip(self._holders, self._names, self._by_slot(tensors), strict=True):
            module = holder()
            if module is not None:
                vars(module)[name] = x

    def take_beside(self) -> None:
        """Undo `put_beside`."""
        for holder, table, name in zip(self._holders, self._tables, self._names, strict=True):
            module = holder()
            if module is not None and vars(module) is not table:
                vars(module).pop(name, None)

    def _write(self, tensors: Sequence[Any]) -> None:
        # `setitem` returns None each time, so `any` goes through all of them, without a loop in Python.
        any(map(setitem, self._tables, self._names, self._by_slot(tensors)))


class Writes:
    """Writes to the parameters of one unit.

    Args:
        plan: plan of the unit.
        what: the unit, for messages.
    """

    def __init__(self, plan: Plan, what: str) -> None:
        self._plan, self._platform, self._what = plan, plan.mesh.platform, what
        self._forwards = 0
        self._uncounted: set[int] = set()  # parameters with writes that are not counted

    def arrive(
        self,
        wholes: Sequence[Any],
        versions: Sequence[int],
        parameters: Sequence[Any],
        buffers: Sequence[FlatBuffer],
        members: Sequence[Sequence[int]],
    ) -> bool:
        """Copy values that a forward has written into the shards; returns whether there were any. Interception is off.

        Args:
            wholes: the tensors that modules have found, by the index of the parameter.
            versions: their `counts_of` before the forward.
            parameters: the shards.
            buffers, members: buffers of the unit, and the indices of their parameters.
        """
        self._forwards += 1
        counted = counts_of(wholes)
        looks = (self._forwards <= _FIRST or bool(CHECKS)) and self._platform.needs_values
        if counted == versions and not looks and not self._uncounted:
            return False
        written = False
        with self._platform.no_grad():
            for buffer, indices in zip(buffers, members, strict=True):
                for place, i in enumerate(indices):
                    is_counted = counted[i] != versions[i]
                    if (is_counted or looks or i in self._uncounted) and self._take(
                        buffer, place, wholes[i], parameters[i]
                    ):
                        written = True
                        if not is_counted:
                            self._uncounted.add(i)
            if CHECKS and looks:
                self._compare(wholes)
        return written

    def _take(self, buffer: FlatBuffer, place: int, whole: Any, parameter: Any) -> bool:
        """Write this rank's part of a whole parameter to its shard; returns False where that has these values."""
        platform, block = self._platform, buffer.blocks[place]
        if not block.local_count:
            return False
        part, sent = platform.clone(block.part_of(platform.detach(whole))), buffer.sent(parameter)
        if platform.bytes_of(part) == platform.bytes_of(sent):
            return False
        shard = platform.detach(parameter)
        if part.dtype != shard.dtype:
            # Gathered in another dtype: elements that were not written keep their own precision.
            kept = platform.masked_fill(platform.to_device(shard), part != sent, 0.0)
            part = kept + platform.masked_fill(platform.to_dtype(part, shard.dtype), part == sent, 0.0)
        platform.write(shard, self._plan.stored(part))
        return True

    def _compare(self, wholes: Sequence[Any]) -> None:
        """Have ranks compare the whole parameters: gathered values, and values that they have written."""
        platform, mesh = self._platform, self._plan.mesh
        facts = {}
        for slot in self._plan.slots:
            values = platform.bytes_of(platform.clone(platform.detach(wholes[slot.index])))
            facts[f"the values written to {slot}"] = f"digest {hashlib.sha256(values).hexdigest()[:12]}"
        for mesh_dim in range(mesh.ndim):
            if mesh.shape[mesh_dim] > 1:
                CHECKS[-1].agree(
                    f"the end of the forward of {self._what}",
                    None,
                    mesh.ranks_along(mesh_dim),
                    facts,
                    "each rank keeps its part of written values: write the same on all ranks",
                )


def counts_of(wholes: Sequence[Any]) -> list[int]:
    """Return how often each tensor has been written to, as far as that is counted."""
    try:
        return versions_of(wholes)
    except RuntimeError:  # torch's inference mode counts nothing
        return [0] * len(wholes)


def found_there(platform: Any, x: Any) -> str:
    """Return the end of a message about ``x`` in the place of a parameter, where it cannot become a DTensor."""
    foreign = platform.foreign_tensor(x)
    return "" if foreign is None else f". There is {foreign}"


def _module_at(module: Any, path: str) -> Any:
    return attrgetter(path)(module) if path else module
