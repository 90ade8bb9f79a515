"""Initialisation of the world of ranks, process groups, and reports about lost ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["GroupRole", "NativeGroup", "NativeMesh"]

Group = Any


@dataclass(frozen=True)
class NativeMesh:
    """Description of a mesh of the framework.

    Attributes:
        ranks: array of global ranks.
        names: names of the dimensions, or None.
        groups: this rank's group along each dimension, as `GroupRole.new_group` returns it; None along a dimension
            where this rank is in no group.
        root: the framework's mesh that this mesh is a slice of, or None.
    """

    ranks: np.ndarray
    names: tuple[str, ...] | None
    groups: tuple[Group | None, ...]
    root: Any


@dataclass(frozen=True)
class NativeGroup:
    """Description of a process group of the framework.

    Attributes:
        ranks: global ranks, in the order of the group.
        group: the group as `GroupRole.new_group` returns it.
        key: value that is equal only for descriptions of the same group.
    """

    ranks: tuple[int, ...]
    group: Group
    key: Any


class GroupRole(ABC):
    """The world of ranks, and process groups."""

    @abstractmethod
    def init_process_group(self, timeout: float | None = None) -> None:
        """Initialise the default group from the launcher's environment, and select this rank's device.

        The variables are torchrun's ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, or msrun's ``MS_*``.
        Without a launcher, the world has one rank. Does nothing if a default group exists. ``timeout`` is how many
        seconds ranks wait for each other before they raise. The time-out applies when the ranks meet, and in each
        collective of all groups. None is the environment variable ``HYPER_PARALLEL_TIMEOUT``, or else the framework's
        default. See `hyper_parallel.platform.timeout.timeout_seconds`.
        """

    @abstractmethod
    def world(self) -> Any:
        """Return an object that identifies the initialised default process group, or None before initialisation. Each
        initialisation has a new object. Core holds the object weakly and compares by identity."""

    @abstractmethod
    def rank(self) -> int:
        """Return this rank's index in the default group."""

    @abstractmethod
    def world_size(self) -> int:
        """Return the size of the default group."""

    @abstractmethod
    def new_group(self, rank_lists: Sequence[Sequence[int]], backend: str | None = None, options: Any = None) -> Group:
        """Make one group for each list of ranks. Returns the group that contains this rank, or None. Called with the
        same lists on every rank of the world. A list of all ranks in ascending order may give the default group.
        Collectives use the ranks in the order of the list. A backend that cannot keep this order raises ValueError.

        Args:
            rank_lists: global ranks; none is in two of the lists.
            backend: name of another communication backend of the framework; None is the platform's default.
            options: the framework's options for these groups.
        """

    def native_group(self, group: Group) -> Any:
        """Return the object that the framework's own functions take for ``group``. Users get this object from
        ``mesh.get_group()``, and pass it to these functions."""
        return group

    def describe_group(self, native: Any) -> NativeGroup:
        """Invert `native_group`: describe a process group of the framework. Raises TypeError for any other object."""
        raise TypeError(f"{type(self).__name__} cannot make a mesh of existing process groups")

    def native_mesh(
        self, ranks: np.ndarray, names: tuple[str, ...] | None, groups: Sequence[Group], root: Any = None
    ) -> Any:
        """Return the framework's own mesh of these global ranks, with the same groups.

        Raises TypeError in a framework without meshes.

        Args:
            ranks: array that contains this rank.
            names: names of the dimensions.
            groups: this rank's group along each dimension.
            root: the framework's mesh to slice by ``names``, if this mesh is a slice.
        """
        raise TypeError(f"{type(self).__name__} cannot convert meshes: its framework has no meshes")

    def describe_native_mesh(self, native: Any) -> NativeMesh:
        """Invert `native_mesh`: describe a mesh of the framework. Makes no groups. Raises TypeError for any other
        object."""
        raise TypeError(f"{type(self).__name__} cannot convert meshes: its framework has no meshes")

    def describe_native_placement(self, native: Any) -> tuple[Any, ...] | None:
        """Describe a placement of the framework's own DTensors that has a counterpart in core. The description is the
        name of core's class and its arguments, such as ``("Shard", 0)``. None for everything else, and in a framework
        without placements."""
        return None

    def is_communication_failure(self, error: Exception) -> bool:
        """Return whether a collective raised ``error`` because a rank did not take part: it died, hangs or does
        something else. Such an error reaches the user as a `CollectiveError`. A backend that cannot know answers False,
        and its own errors reach the user as they are."""
        return False

    def find_missing_ranks(
        self, group: Group, ranks: Sequence[int], report: str
    ) -> tuple[dict[int, str], tuple[int, ...]] | None:
        """Find the missing ranks after a collective on ``group`` failed.

        Let the collectives fail in which other ranks of the group wait. Leave ``report`` for the other ranks of the
        world, and wait a few seconds for their reports. Returns the reports by rank, and the ranks that did not fail in
        this group. The reports of these ranks say where else they failed. The group may be unusable afterwards. Never
        raises. Returns None where a backend cannot find out.

        Args:
            group: group of the failed collective.
            ranks: global ranks of the group.
            report: what this rank was doing.
        """
        return None

    def exchange_texts(self, ranks: Sequence[int], place: str, text: str) -> dict[int, str] | None:
        """Leave ``text`` for ``ranks`` in the store of the world, and wait for their texts. The wait is at most as long
        as in a collective. No collective is needed, so other ranks may be waiting in a collective. Returns the texts by
        rank. Returns None where ranks have no store: core then assumes that the texts are equal.

        Args:
            ranks: global ranks, the same on all of them.
            place: key of these texts, a new one each time.
            text: text of this rank.
        """
        return None

    def tell_of_failure(self, groups: Sequence[Group], ranks: Sequence[int], report: str) -> None:
        """Report to ``ranks`` that this rank failed outside a collective, and will not take part in the next one.

        If all ``ranks`` make this call within a few seconds, all have failed in the same way. Nothing more is done
        then. Otherwise leave ``report`` for `find_missing_ranks`, and make the ranks that wait in ``groups`` fail. The
        groups may be unusable afterwards. Never raises. In a backend without such reports, the other ranks wait for the
        time-out.

        Args:
            groups: groups through which ``ranks`` communicate.
            ranks: global ranks, the same on all of them.
            report: what this rank was doing, and the error that it raised.
        """
        return None
