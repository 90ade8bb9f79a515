"""How ranks find one another: starting, groups of ranks, and reports about lost ranks."""

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
    """Description of a mesh of the framework's own.

    Attributes:
        ranks: array of global ranks.
        names: of the dimensions, or None.
        groups: this rank's group along each dimension, as `GroupRole.new_group` gives it; None where it is in none.
        root: the framework's mesh that it was sliced from, None where it was not.
    """

    ranks: np.ndarray
    names: tuple[str, ...] | None
    groups: tuple[Group | None, ...]
    root: Any


@dataclass(frozen=True)
class NativeGroup:
    """Description of a group of the framework's own.

    Attributes:
        ranks: global ranks, in its order.
        group: as `GroupRole.new_group` gives it.
        key: equal for the same group alone.
    """

    ranks: tuple[int, ...]
    group: Group
    key: Any


class GroupRole(ABC):
    """The world of ranks, and groups of them."""

    @abstractmethod
    def init_process_group(self, timeout: float | None = None) -> None:
        """Initialise the default group from the launcher's environment, and select this rank's device.

        The variables are torchrun's ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, or msrun's ``MS_*``.
        Without a launcher: a world of one rank. Does nothing when there is a default group already. ``timeout`` is how
        many seconds ranks wait for each other before they raise. It applies when they meet, and in each collective of
        all groups. None is the environment variable ``HYPER_PARALLEL_TIMEOUT``, or else the framework's own time. See
        `hyper_parallel.platform.timeout.timeout_seconds`.
        """

    @abstractmethod
    def world(self) -> Any:
        """An object that stands for the initialised default process group, a new one after each initialisation;
        None before. Core holds it weakly and compares by identity."""

    @abstractmethod
    def rank(self) -> int:
        """Rank in the default group."""

    @abstractmethod
    def world_size(self) -> int:
        """Size of the default group."""

    @abstractmethod
    def new_group(self, rank_lists: Sequence[Sequence[int]], backend: str | None = None, options: Any = None) -> Group:
        """Make one group for each list of ranks. Returns the one that this rank is in, None if in none. Called with
        the same lists on every rank of the world. A list of all ranks in ascending order may give the default group.
        Collectives take the ranks in the order of the list. A backend that cannot do so raises ValueError.

        Args:
            rank_lists: global ranks; none is in two of the lists.
            backend: name of another communication backend of the framework; None is the platform's own.
            options: of the framework, for these groups.
        """

    def native_group(self, group: Group) -> Any:
        """Return the object that the framework's own functions take for ``group``. It serves users who call them on
        ``mesh.get_group()``."""
        return group

    def describe_group(self, native: Any) -> NativeGroup:
        """Do the reverse: describe a group of the framework's own. Raises TypeError for any other object."""
        raise TypeError(f"{type(self).__name__} takes no groups that others have made")

    def native_mesh(
        self, ranks: np.ndarray, names: tuple[str, ...] | None, groups: Sequence[Group], root: Any = None
    ) -> Any:
        """The framework's own mesh of these global ranks, with the same groups. A framework without meshes has none to
        give.

        Args:
            ranks: array, with this rank in it.
            names: of its dimensions.
            groups: this rank's along each dimension.
            root: the framework's mesh to slice by ``names``, where this mesh is a slice of another one.
        """
        raise TypeError(f"{type(self).__name__} has no meshes of its own")

    def describe_native_mesh(self, native: Any) -> NativeMesh:
        """Do the reverse. Makes no groups. Raises TypeError for an object that is no mesh of the framework's."""
        raise TypeError(f"{type(self).__name__} has no meshes of its own")

    def describe_native_placement(self, native: Any) -> tuple[Any, ...] | None:
        """Describe a placement of the framework's own DTensors that has a counterpart in core. The description is the
        name of core's class and its arguments, such as ``("Shard", 0)``. None for everything else, and where a
        framework has none."""
        return None

    def is_communication_failure(self, error: Exception) -> bool:
        """Return whether a collective raised ``error`` because a rank did not do its part: it died, hangs or does
        something else. Such an error reaches the user as a `CollectiveError`. A backend that cannot tell answers False,
        and its own errors reach the user as they are.
        """
        return False

    def find_missing_ranks(
        self, group: Group, ranks: Sequence[int], report: str
    ) -> tuple[dict[int, str], tuple[int, ...]] | None:
        """Find out who is missing after a collective on ``group`` failed.

        Make the ranks that wait in the group fail. Leave ``report`` for the other ranks of the world, and wait a few
        seconds for theirs. Returns the reports by rank, and the ranks that did not fail in this group. A report of
        these tells where else they failed. The group may be unusable afterwards. Never raises; None where ranks have no
        way to find out.

        Args:
            group: of the failed collective.
            ranks: global ranks of the group.
            report: what this rank was doing.
        """
        return None

    def exchange_texts(self, ranks: Sequence[int], place: str, text: str) -> dict[int, str] | None:
        """Leave ``text`` for ``ranks`` where the ranks of the world have met, and wait for theirs. The wait is at most
        that of a collective. No collective is needed, so other ranks may wait in one. Returns the texts by rank. None
        where ranks have no such place: then they are taken to have the same text.

        Args:
            ranks: global ranks, the same on all of them.
            place: under which texts are left, another one each time.
            text: of this rank.
        """
        return None

    def tell_of_failure(self, groups: Sequence[Group], ranks: Sequence[int], report: str) -> None:
        """Tell ``ranks`` that this one has failed outside a collective, and does not come to the next one.

        Wait a few seconds for all of them to call this too: then all have failed in the same way, and no more is done.
        Otherwise leave ``report`` where `find_missing_ranks` finds it, and make the ranks that wait in ``groups``
        fail. The groups may be unusable afterwards. Never raises. A backend that cannot do so does nothing: the others
        wait for the time-out.

        Args:
            groups: those through which ``ranks`` communicate.
            ranks: global ranks, the same on all of them.
            report: what this rank was doing, and the error that it raised.
        """
        return None
