"""Groups of ranks that must draw the same random numbers, and the saved state that each group resumes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.undistributed import planned_meshes

__all__ = ["assign", "groups_alike", "groups_saved"]


def groups_alike(ranks: Sequence[int]) -> list[int]:
    """Return, for each of the global ``ranks``, the index of the first rank in its group. Ranks of a group must draw
    the same numbers.

    The ranks of a mesh with a plan form a group. Groups of several meshes that share ranks are merged.
    """
    place = {rank: i for i, rank in enumerate(ranks)}
    first = [*range(len(ranks))]
    for mesh in planned_meshes():
        for row in mesh.rows():
            leaders = {first[place[rank]] for rank in row if rank in place}
            first = [min(leaders) if leader in leaders else leader for leader in first]
    return first


def groups_saved(states: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the group of each rank that saved. In a checkpoint of an older version, which lacks groups, ranks with
    equal states form a group."""
    said = [_numbers(x) if "alike" not in x else tuple(x["alike"]) or i for i, x in enumerate(states)]
    return [said.index(x) for x in said]


def assign(states: Sequence[Mapping[str, Any]], now: Sequence[int]) -> tuple[list[int | None], bool]:
    """Return, for each rank that loads, the index of the state to resume, or None for a new seed. The second value
    reports whether random numbers are the same as in a run without interruption.

    Args:
        states: states of the ranks that saved.
        now: `groups_alike` of the ranks that load.
    """
    saved, numbers = groups_saved(states), [_numbers(state) for state in states]
    if saved == [*now]:
        sources = [i if numbers[i] == numbers[first] else first for i, first in enumerate(saved)]
        return [*sources], sources == [*range(len(now))]
    groups, before = sorted(set(now)), sorted(set(saved))
    place = [groups.index(first) for first in now]
    if len(set(numbers)) == 1:
        # One state for groups of which each would have its own, had there been several: they draw the same now.
        has_groups = len(before) < len(states) or len(groups) < len(now)
        goes_on = len(before) > 1 or len(groups) == 1 or not has_groups
        return [before[min(i, len(before) - 1)] for i in place], goes_on
    goes_on = len(groups) == len(before) and all(numbers[i] == numbers[first] for i, first in enumerate(saved))
    return [before[i] if i < len(before) else None for i in place], goes_on


def _numbers(state: Mapping[str, Any]) -> bytes:
    """Serialize the states of the generators."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written)
    pickler.fast = True  # the same bytes whether or not two parts are one object
    pickler.dump((state["platform"], state["device"], state["host"]))
    return written.getvalue()
