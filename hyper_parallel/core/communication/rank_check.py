"""`check_ranks`: a comparison of the next step of all ranks, before each collective.

Without it, ranks that run different collectives hang or compute wrong numbers. Ranks exchange a digest of each step.
Only if digests differ do they exchange the step itself, to report the difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.core.communication.errors import (
    CollectiveError,
    RankMismatchError,
    describe_dim,
    explain,
    names_of,
)
from hyper_parallel.core.communication.recorder import LISTENERS, CollectiveEvent
from hyper_parallel.core.layouts.placement_types import Placement
from hyper_parallel.core.mesh.first_use import join_world
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.platform import Platform, get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

Facts = Mapping[str, str]


class _Step(NamedTuple):
    """The step that one rank is about to do. ``facts`` must be equal on all ranks, and ``row_facts`` only on the ranks
    in ``row``."""

    rank: int
    facts: Facts
    row: tuple[int, ...]
    row_facts: Facts


class Check:
    """A comparison of steps over some ranks.

    Args:
        platform: the platform whose collectives exchange the steps.
        axes: (group, global ranks of the group) pairs. Gathering along each of them in turn reaches all ranks.

    Attributes:
        count: number of compared collectives.
        at_end: comparisons to repeat when the context ends, by their subject.
    """

    def __init__(self, platform: Platform, axes: Sequence[tuple[Any, tuple[int, ...]]]) -> None:
        self._platform = platform
        self._axes = [(group, ranks) for group, ranks in axes if len(ranks) > 1]
        self.count = 0
        self.at_end: dict[Any, Callable[[], None]] = {}

    def agree(
        self,
        step: str,
        facts: Facts | None = None,
        row: Sequence[int] = (),
        row_facts: Facts | None = None,
        remedy: str = "",
    ) -> None:
        """Wait until all ranks report their next step, and return if all steps are equal.

        Args:
            step: the next step.
            facts: values that must be equal on all ranks, by name, in the order in which to compare.
            row: global ranks on which ``row_facts`` must be equal. Each of these ranks must pass the same tuple.
            row_facts: values that must be equal on the ranks in ``row``, by name.
            remedy: the end of the message if ``row_facts`` differ.

        Raises:
            RankMismatchError: on all ranks, when something differs.
        """
        if self._platform.sends_nothing:
            return  # a dry run has one rank, which agrees with itself
        shared = {"the next step": step, **(facts or {})}
        mine = _Step(self._platform.rank(), shared, tuple(row), row_facts or {})
        digest = mine._replace(facts=_digest(mine.facts), row_facts=_digest(mine.row_facts))
        steps = self._gather(digest)
        alike = all(step[1:] == digest[1:] for step in steps)  # fast for many ranks
        if not alike and _first_difference(steps) is not None:
            raise _mismatch(self._gather(mine), step, remedy)

    def compare(self, event: CollectiveEvent) -> None:
        """Compare a collective, unless another check is open inside this one."""
        if CHECKS[-1] is not self:
            return
        self.count += 1
        where = describe_dim(event.mesh, event.mesh_dim)
        facts = {"the module": event.module or "none", "the direction": event.direction, "op": event.op}
        if event.dtype is not None:
            sizes = ["any" if dim == event.uneven_dim else str(n) for dim, n in enumerate(event.shape)]
            facts["the dtype of the local tensor"] = str(event.dtype)
            facts["the shape of the local tensor"] = f"({', '.join(sizes)})"
        facts |= {name: str(value) for name, value in event.details.items()}
        step = f"{event.kind} {where} (collective {self.count} inside check_ranks())"
        self.agree(step, None, event.mesh.ranks_along(event.mesh_dim), facts)

    def _gather(self, value: Any) -> list[Any]:
        values = [value]
        for group, ranks in self._axes:
            try:
                gathered = self._platform.all_gather_object(values, group, len(ranks))
            except RuntimeError as error:
                explain(error, "check_ranks", "the comparison of check_ranks()", self._platform, group, ranks)
                raise
            values = [item for part in gathered for item in part]
        return values


@contextmanager
def check_ranks(mesh: DeviceMesh | None = None) -> Iterator[None]:
    """Context manager in which ranks compare their next steps. All ranks raise if one differs, instead of hanging.

    The following steps are compared.

    * Each collective: its kind, module, mesh dimension and direction, shape and dtype of the local tensors, and other
      arguments.
    * Each new `DeviceMesh`.
    * Each plan that `parallelize_module` applies, with the names, shapes, dtypes and ``requires_grad`` of the model's
      parameters.
    * Leaving the context, also by an exception. The other ranks report the exception of one rank.

    Values that must be equal on all ranks are compared bit by bit:

    * Parameters and buffers that a model's plan leaves plain or replicates. The comparison happens when the plan is
      applied, at the first call of the model inside, and at the end.
    * Plain inputs that a style or `DTensor.from_local` treats as replicated.
    * Generator states of a mesh on which random numbers were drawn.

    Where a mesh dimension shards a batch unevenly, shapes may differ. They are compared between the ranks of one
    collective only.

    Use it to find a mistake, not in production: each comparison is an additional collective on the host.

    Args:
        mesh: mesh whose ranks all run the same program; None for all ranks of the world. Each stage of a pipeline needs
            its own mesh.

    Raises:
        RankMismatchError: a ValueError that names the ranks that differ, and the first difference with both values.
        CollectiveError: when a rank does not reach the comparison within the time-out of the process group.

    Example:
        >>> from hyper_parallel import check_ranks, init_device_mesh
        >>> with check_ranks():
        ...     mesh = init_device_mesh("cpu", (1,))
    """
    if mesh is not None and mesh.get_coordinate() is None:
        yield
        return
    check = _check_of_world() if mesh is None else check_of(mesh)
    CHECKS.append(check)
    LISTENERS.insert(0, check.compare)  # before listeners that count the collective
    try:
        yield
    except (RankMismatchError, CollectiveError):
        raise
    except Exception as error:
        _report_exception(check, error)
        raise
    else:
        for compare in check.at_end.values():
            compare()
        check.agree("the end of check_ranks()")
    finally:
        CHECKS.remove(check)
        LISTENERS.remove(check.compare)


def check_values(values: Mapping[str, Any], mesh: DeviceMesh, mesh_dim: int, remedy: str) -> None:
    """Compare values that should be equal along a mesh dimension. Call it only while a check is active.

    Args:
        values: local tensors or bytes to compare, by their names in messages.
        mesh, mesh_dim: the mesh dimension whose ranks are compared.
        remedy: the end of the message.

    Raises:
        RankMismatchError: on all ranks, when one differs.
    """
    platform = mesh.platform
    facts = {}
    with platform.no_dispatch():
        for what, x in values.items():
            if isinstance(x, bytes):
                facts[f"the values of {what}"] = hashlib.sha256(x).hexdigest()[:12]
            elif platform.has_values(x):
                digest = hashlib.sha256(platform.bytes_of(x)).hexdigest()[:12]
                facts[f"the values of {what}"] = f"{x.dtype} {tuple(platform.shape_of(x))} with digest {digest}"
    step = f"the comparison of values that are the same on all ranks {describe_dim(mesh, mesh_dim)}"
    CHECKS[-1].agree(step, None, mesh.ranks_along(mesh_dim), facts, remedy)


def check_replicated(x: Any, mesh: DeviceMesh, placements: Sequence[Placement], what: str) -> None:
    """Compare a local tensor along the mesh dimensions on which it is replicated. Call it only while a check is
    active."""
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate() and mesh.shape[mesh_dim] > 1:
            check_values(
                {what: x},
                mesh,
                mesh_dim,
                "the tensor is assumed to be the same on every rank: pass the same tensor on all ranks, or declare "
                "its sharding with input_layouts=... or placements=...",
            )


def check_of(mesh: DeviceMesh) -> Check:
    """Return a `Check` over the ranks of a mesh that contains this rank."""
    return Check(mesh.platform, [(mesh.platform_group(d), mesh.ranks_along(d)) for d in range(mesh.ndim)])


def _check_of_world() -> Check:
    platform = get_platform()
    join_world(platform)
    ranks = tuple(range(platform.world_size()))
    return Check(platform, [(platform.new_group([list(ranks)]), ranks)])


def _report_exception(check: Check, error: Exception) -> None:
    """Report to the other ranks the exception with which this rank leaves the context. The resulting
    `RankMismatchError` is ignored, so that this rank raises the original exception."""
    try:
        check.agree(f"leaving check_ranks() with {type(error).__name__}: {error}")
    except (RankMismatchError, CollectiveError):
        return


def _digest(facts: Facts) -> Facts:
    return {"digest": hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()}


def _mismatch(steps: Sequence[_Step], step: str, remedy: str) -> RankMismatchError:
    """Return the error that reports the first difference between unequal steps."""
    what, values = _first_difference(steps) or ("the compared facts", {"": [s.rank for s in steps]})
    usual = max(values, key=lambda value: (len(values[value]), -min(values[value])))
    odd = tuple(sorted(r for value, ranks in values.items() if value != usual for r in ranks))
    parts = [f"{names_of(ranks)}: {value}" for value, ranks in values.items() if value != usual]
    place = "" if what == "the next step" else f"before {step}, "
    message = f"{place}{names_of(odd)} and {names_of(values[usual])} differ in {what}. "
    message += "; ".join([*parts, f"{names_of(values[usual])}: {usual}"])
    remedied = remedy and any(what in s.row_facts for s in steps)
    return RankMismatchError(f"{message}: {remedy}" if remedied else message, odd)


def _first_difference(steps: Sequence[_Step]) -> tuple[str, dict[str, list[int]]] | None:
    """Return the first fact that differs, and a mapping from its values to the ranks with each value. Return None if
    all facts agree."""
    rows = {s.rank: s.row for s in steps}
    clashing = {r for s in steps for other in s.row if rows.get(other, s.row) != s.row for r in (s.rank, other)}
    to_compare: list[dict[int, Facts]] = [
        {s.rank: s.facts for s in steps},
        {rank: {"the ranks of the mesh dimension": str(rows[rank])} for rank in clashing},
        *({s.rank: s.row_facts for s in steps if s.row == row} for row in sorted(set(rows.values()))),
    ]
    for facts_of in to_compare:
        for name in dict.fromkeys(name for _, facts in sorted(facts_of.items()) for name in facts):
            ranks_of: dict[str, list[int]] = {}
            for rank, facts in sorted(facts_of.items()):
                ranks_of.setdefault(facts.get(name, "nothing"), []).append(rank)
            if len(ranks_of) > 1:
                return name, ranks_of
    return None
