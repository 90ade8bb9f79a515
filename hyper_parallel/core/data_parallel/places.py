"""Slots of modules that hold the parameters of a unit, the tensors put there, and writes to these tensors.

Values that a forward writes are copied to the shards: each rank saves its part. Frameworks and hooks of the platform
count most writes. Uncounted writes (`p.data.mul_()`) are found by comparing values. Values are compared in the first
forwards of a unit, and inside `check_ranks`. A parameter with an uncounted write is compared in every later forward.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem, is_, setitem
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.observers import CHECKS

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.flat_buffer import FlatBuffer
    from hyper_parallel.core.data_parallel.unit_facts import UnitFacts

__all__ = ["Places", "Slot", "Writes", "counts_of", "found_there"]

_LAYOUT, _VERSION = attrgetter("_layout"), attrgetter("_version")
#: Number of first forwards of a unit that compare values.
_FIRST = 2


@dataclass(frozen=True)
class Slot:
    """An attribute of a module that holds a parameter. A shared parameter has several slots.

    Attributes:
        path: path from the unit's module to the module that holds the parameter.
        root: index of the unit's module among the modules of the unit.
        name: name of the parameter in the module that holds it.
        index: index of the parameter in the unit. Modules that share a parameter have slots of the same index.
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
    """The slots of a unit's module objects. Their tables of parameters are kept alive, but the modules are not.

    Args:
        modules: the modules of the unit.
        slots: all slots of the unit.
        what: name of the unit in messages.
        applied: name of the function that created the unit.
    """

    def __init__(
        self, platform: Any, modules: Sequence[Any], slots: Sequence[Slot], what: str, applied: str = "fully_shard"
    ) -> None:
        self._platform, self._what, self._applied, self._described = platform, what, applied, slots
        holders = [_module_at(modules[slot.root], slot.path) for slot in slots]
        #: For each slot: the parameter table of its module, which never changes while the module lives; the name in
        #: that table; the layout of the shard; the index of the parameter. `_indices` is None if each parameter has one
        #: slot, in order.
        self._tables = [platform.own_parameters(holder) for holder in holders]
        self._names, self._layouts = [slot.name for slot in slots], [slot.layout for slot in slots]
        indices = [slot.index for slot in slots]
        self._indices = None if indices == list(range(len(slots))) else indices
        self._gone: list[Any] = []
        self._holders = [weakref.ref(holder, self._gone.append) for holder in holders]
        self._count = 1 + max((slot.index for slot in slots), default=-1)
        #: Modules inside the unit that hold its parameters, or contain such modules. Backward may recompute and
        #: differentiate these modules separately, as MindSpore's ``recompute`` does.
        self._inside: list[tuple[Any, str]] = []
        if platform.differentiates_again is not None and applied == "fully_shard":
            paths = [(slot.root, f"{slot.path}.") for slot in slots]
            self._inside = [
                (weakref.ref(m), path)
                for i, module in enumerate(modules)
                for path, m in platform.named_modules(module)
                if path and any(root == i and holder.startswith(f"{path}.") for root, holder in paths)
            ]
        self.take_beside()  # remove attributes that a copy of a module has inherited
        #: The shards by index, while other tensors are put in their place, and those other tensors.
        self._shards: list[Any] | None = None
        self._shown: Sequence[Any] = ()

    @property
    def holds_others(self) -> bool:
        """Return whether other tensors are in the place of the shards now."""
        return self._shards is not None

    def parameters(self) -> list[Any]:
        """Return the shards in the order of their indices, even while other tensors are in their place.

        Raises:
            ValueError: if something else has replaced a parameter, or a module is gone.
        """
        if self._shards is not None:
            return self._shards
        self._check_holders()
        try:
            found = list(map(getitem, self._tables, self._names))
            as_planned = all(map(is_, map(_LAYOUT, found), self._layouts))
        except (KeyError, AttributeError):  # the entry is missing, or has no layout
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
        """Return the tensor in each slot, or None for an empty slot."""
        return [table.get(name) for table, name in zip(self._tables, self._names, strict=True)]

    def _check_holders(self) -> None:
        if self._gone:
            raise self._taken([holder() is None for holder in self._holders], [False] * len(self._holders))

    def _taken(self, found: Sequence[Any], wanted: Sequence[Any]) -> ValueError:
        """Return the error for the first slot in which ``found`` and ``wanted`` differ."""
        at = next(i for i, (x, y) in enumerate(zip(found, wanted, strict=True)) if x is not y)
        return ValueError(
            f"{self._what}: the parameter {self._described[at]} was replaced after {self._applied}. Copy values into "
            "the existing parameter, and replace modules before "
            f"{self._applied}{found_there(self._platform, self._found()[at])}"
        )

    def check_recompute(self) -> None:
        """Raise ValueError if backward will recompute a part of the unit and differentiate that part separately.

        The recomputation asks for gradients of the shards. It reads unsharded parameters, which are not connected to
        the shards.
        """
        for ref, path in self._inside:
            module = ref()
            if module is not None and self._platform.differentiates_again(module):
                raise ValueError(
                    f"{self._what}: {path!r} is recomputed in backward. Recomputation gives no gradients of "
                    f"parameters that belong to an outer unit. Apply fully_shard to {path!r} before the outer module, "
                    "or call its recompute(use_reentrant=False)"
                )

    def check_values(self, parameters: Sequence[Any]) -> None:
        """Raise ValueError if one of the shards has no values, because it is on meta."""
        for slot in self._described if self._platform.needs_values else ():
            if self._platform.is_meta(parameters[slot.index]):
                raise ValueError(
                    f"{self._what}: parameter {slot} has no values: initialise it on this rank's device before "
                    "calling the module, with to_empty() and reset_parameters()"
                )

    def put(self, tensors: Sequence[Any], parameters: list[Any] | None = None) -> Any:
        """Let modules find ``tensors`` in place of the shards; return the argument for `take_back`.

        Args:
            tensors: one tensor for each parameter, by index.
            parameters: an earlier result of `parameters`, if the caller has one.

        Raises:
            ValueError: as `parameters` raises.
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
        """Raise ValueError if a module is gone, or its table does not hold ``tensors``, which are ordered by index."""
        self._check_holders()
        wanted = self._by_slot(tensors)
        try:
            unchanged = all(map(is_, map(getitem, self._tables, self._names), wanted))
        except KeyError:
            unchanged = False
        if not unchanged:
            raise self._taken(self._found(), wanted)

    def check_shown(self) -> None:
        """Raise ValueError if other code has replaced a tensor from `put`."""
        self.check_there(self._shown)

    def keep_exchanged(self, addresses: Sequence[int], inner: Sequence[Layout | None]) -> bool:
        """Copy values to shards if a forward gave a tensor from `put` new memory, by ``p.data = x`` or ``p.set_(x)``.
        Return whether any tensor got new memory. Interception is off.

        Args:
            addresses: `Platform.addresses` of these tensors after `put`.
            inner: for each parameter, its tensor-parallel layout, or None.

        Raises:
            ValueError: if other code has replaced a tensor from `put`, or has changed its shape, dtype or placements.
        """
        self.check_shown()
        platform, now, parameters = self._platform, self._platform.addresses(self._shown), self.parameters()
        if now == addresses:
            return False
        for slot in self._described:
            x, p = self._shown[slot.index], parameters[slot.index]
            other = getattr(x, "_layout", None) not in (None, inner[slot.index] or p._layout)
            if other or platform.shape_of(x) != platform.shape_of(p) or x.dtype != p.dtype:
                raise ValueError(
                    f"{self._what}: its forward has changed the shape, dtype or placement of the parameter {slot}, "
                    f"which had shape {tuple(p.shape)} and dtype {p.dtype}: write values of the same shape, dtype and "
                    "placement"
                )
        with platform.no_grad():
            for x, p, before, after in zip(self._shown, parameters, addresses, now, strict=True):
                if before != after:
                    # The framework does not count such a write. The new memory may overlap the old.
                    platform.write(platform.counted_apart(platform.detach(p)), platform.clone(platform.detach(x)))
        return True

    def take_back(self, before: Any) -> None:
        """Let modules find the tensors that were in place before a `put`."""
        found: Any = self._shards if before[0] is None else before[1]
        self._shards, self._shown = before
        self._write(found)

    def put_beside(self, tensors: Sequence[Any]) -> None:
        """Set ``tensors``, ordered by index, as attributes of the modules.

        The modules' parameter tables still hold the shards, because frameworks look for parameters in the tables.
        """
        for holder, name, x in zip(self._holders, self._names, self._by_slot(tensors), strict=True):
            module = holder()
            if module is not None:
                vars(module)[name] = x

    def take_beside(self) -> None:
        """Remove the attributes that `put_beside` has set."""
        for holder, table, name in zip(self._holders, self._tables, self._names, strict=True):
            module = holder()
            if module is not None and vars(module) is not table:
                vars(module).pop(name, None)

    def _write(self, tensors: Sequence[Any]) -> None:
        # `setitem` returns None each time, so `any` goes through all of them, without a loop in Python.
        any(map(setitem, self._tables, self._names, self._by_slot(tensors)))


class Writes:
    """Detection of writes to the parameters of one unit, and copies of the written values to the shards.

    Args:
        facts: facts of the unit.
        what: name of the unit in messages.
    """

    def __init__(self, facts: UnitFacts, what: str) -> None:
        self._facts, self._platform, self._what = facts, facts.mesh.platform, what
        self._forwards = 0
        self._again: tuple[Sequence[Any], Sequence[int], dict[int, bytes]] = (), (), {}  # recorded by `begin_again`
        self._uncounted: set[int] = set()  # indices of parameters with uncounted writes

    def arrive(
        self,
        wholes: Sequence[Any],
        versions: Sequence[int],
        parameters: Sequence[Any],
        buffers: Sequence[FlatBuffer],
        members: Sequence[Sequence[int]],
    ) -> bool:
        """Copy the values that a forward has written into the shards; return whether any value was written.
        Interception is off.

        Args:
            wholes: the unsharded parameters that modules have read, by index.
            versions: `counts_of` these tensors before the forward.
            parameters: the shards.
            buffers, members: buffers of the unit, and the indices of their parameters.
        """
        again, uncounted = wholes is self._again[0], self._uncounted
        if again:  # another forward may have left these tensors behind
            uncounted = {i for i, before in self._again[2].items() if self._bytes(wholes[i]) != before}
        self._forwards += not again
        counted, seen = counts_of(wholes), self._platform.seen_writes(wholes)
        looks = not again and (self._forwards <= _FIRST or bool(CHECKS)) and self._platform.needs_values
        if counted == versions and not looks and not uncounted and not seen:
            return False
        written = bool(seen)  # the same answer on ranks whose shard has no new values
        with self._platform.no_grad():
            for buffer, indices in zip(buffers, members, strict=True):
                for place, i in enumerate(indices):
                    is_counted = counted[i] != versions[i] or i in seen
                    if (is_counted or looks or i in uncounted) and self._take(buffer, place, wholes[i], parameters[i]):
                        written = True
                        if not is_counted:
                            self._uncounted.add(i)
            if CHECKS and looks:
                self._compare(wholes)
        return written

    def begin_again(self, wholes: Sequence[Any]) -> None:
        """Record the unsharded parameters that a backward has put in place, for forwards that it recomputes."""
        with self._platform.no_dispatch():
            self._again = wholes, counts_of(wholes), {i: self._bytes(wholes[i]) for i in self._uncounted}

    def arrive_again(self, *of_unit: Any) -> bool:
        """Call `arrive` at the end of a backward, for writes of recomputed forwards. ``of_unit`` are the last arguments
        of `arrive`."""
        with self._platform.no_dispatch():
            written, self._again = self.arrive(*self._again[:2], *of_unit), ((), (), {})
        return written

    def _take(self, buffer: FlatBuffer, place: int, whole: Any, parameter: Any) -> bool:
        """Write this rank's part of an unsharded parameter to its shard; return False if the shard has these values
        already."""
        platform, block = self._platform, buffer.blocks[place]
        if not block.local_count:
            return False
        part, sent = platform.clone(block.part_of(platform.detach(whole))), buffer.sent(parameter)
        if platform.bytes_of(part) == platform.bytes_of(sent):
            return False
        shard = platform.detach(parameter)
        if part.dtype != shard.dtype:
            # The parameter was gathered in another dtype: elements that were not written keep their full precision.
            kept = platform.masked_fill(platform.to_device(shard), part != sent, 0.0)
            part = kept + platform.masked_fill(platform.to_dtype(part, shard.dtype), part == sent, 0.0)
        platform.write(shard, self._facts.stored(part))
        return True

    def _bytes(self, whole: Any) -> bytes:
        return self._platform.bytes_of(self._platform.clone(self._platform.detach(whole)))

    def _compare(self, wholes: Sequence[Any]) -> None:
        """Make ranks compare the values of the unsharded parameters, including values that forwards have written."""
        mesh, facts = self._facts.mesh, {}
        for slot in self._facts.slots:
            values = self._bytes(wholes[slot.index])
            facts[f"the values written to {slot}"] = f"digest {hashlib.sha256(values).hexdigest()[:12]}"
        for mesh_dim in range(mesh.ndim):
            if mesh.shape[mesh_dim] > 1:
                CHECKS[-1].agree(
                    f"the end of the forward of {self._what}",
                    None,
                    mesh.ranks_along(mesh_dim),
                    facts,
                    "each rank keeps its shard of the values: write the same values on all ranks",
                )


def counts_of(wholes: Sequence[Any]) -> list[int]:
    """Return the counted writes to each tensor."""
    try:
        return list(map(_VERSION, wholes))
    except RuntimeError:  # torch's inference mode counts nothing
        return [0] * len(wholes)


def found_there(platform: Any, x: Any) -> str:
    """Return the end of a message, which describes a tensor ``x`` of an unsupported class; empty for other tensors."""
    foreign = platform.foreign_tensor(x)
    return "" if foreign is None else f". There is {foreign}"


def _module_at(module: Any, path: str) -> Any:
    return attrgetter(path)(module) if path else module
