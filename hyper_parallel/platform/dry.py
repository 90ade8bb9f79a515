"""A backend whose collectives send nothing: one rank of a world whose other ranks do not exist.

`dry_platform` derives the dry backend from any real backend. Groups are names, collectives return tensors of the right
shapes, and the real backend does everything else. So core runs as in a job of many processes. The values of tensors are
meaningless; where the framework has tensors without data (`Platform.dry_class`), they have no values.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.collectives import FINISHED, Work
from hyper_parallel.platform.contract.compiled import CompilerRole
from hyper_parallel.platform.registry import get_platform, selected

__all__ = ["dry_platform", "dry_world", "is_dry"]


class _World:
    """The world of a dry run: its size, and the rank that this process represents."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank


#: (size, rank) -> the world. It lives as long as something references it, so that its meshes stay valid.
_WORLDS: WeakValueDictionary[tuple[int, int], _World] = WeakValueDictionary()


class SendsNothing:
    """Implementation of the roles "groups" and "collectives" for a world whose other ranks do not exist."""

    _world: _World | None = None
    sends_nothing = True
    # Dry runs compile nothing: compiled code would need groups.
    set_compiled_forward = CompilerRole.set_compiled_forward
    compiled_hook = CompilerRole.compiled_hook
    share_compiled_inputs = CompilerRole.share_compiled_inputs

    def init_process_group(self, timeout: float | None = None) -> None:
        """Do nothing: `dry_world` defines the default group."""

    def world(self) -> _World | None:
        """Return the dry-run world of this process, or None outside `dry_world`."""
        return self._world

    def rank(self) -> int:
        """Return the rank that this process represents."""
        return self._need_world().rank

    def world_size(self) -> int:
        """Return the size of the dry-run world."""
        return self._need_world().size

    def new_group(self, rank_lists: Sequence[Sequence[int]], backend: str | None = None, options: Any = None) -> str:
        """Return a name that represents any group; the cost does not depend on the number of ranks."""
        return "no group"

    def native_group(self, group: Any) -> Any:
        """Raise: a dry run has no process groups.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a dry run has no process groups for the framework's own collectives: use methods of DTensors "
            "(redistribute, full_tensor), or leave this part of the program out of the dry run"
        )

    def native_mesh(self, *args: Any) -> Any:
        """Raise: a dry run has no meshes of the framework, as it has no groups.

        Raises:
            RuntimeError: always.
        """
        return self.native_group(None)

    def is_communication_failure(self, error: Exception) -> bool:
        """Return False: nothing is communicated."""
        return False

    def tell_of_failure(self, groups: Sequence[Any], ranks: Sequence[int], report: str) -> None:
        """Do nothing: there are no other ranks."""

    # ------------------------------------------------------------------------------------------------ collectives
    def all_reduce(self, local: Any, op: str, group: Any) -> Any:
        """Return ``local`` in place of the reduction."""
        return local

    def all_gather(self: Any, local: Any, group: Any, size: int) -> Any:
        """Return zeros of the gathered shape."""
        first, *rest = self.shape_of(local)
        return self.zeros((size * first, *rest), local)

    def reduce_scatter(self: Any, local: Any, op: str, group: Any, size: int) -> Any:
        """Return zeros of the shape of this rank's chunk."""
        first, *rest = self.shape_of(local)
        return self.zeros((first // size, *rest), local)

    def all_to_all(
        self: Any,
        local: Any,
        group: Any,
        size: int,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Any:
        """Return zeros of the received shape."""
        rows, *rest = self.shape_of(local)
        return self.zeros((rows if received is None else sum(received), *rest), local)

    def shift(self, local: Any, group: Any, size: int) -> Any:
        """Return ``local`` in place of the previous rank's tensor."""
        return local

    def broadcast(self, local: Any, src: int, group: Any) -> Any:
        """Return ``local`` in place of the tensor of ``src``."""
        return local

    def scatter(self, out: Any, parts: Sequence[Any] | None, src: int, group: Any) -> Any:
        """Return ``out`` unchanged."""
        return out

    def start_collective(self, collective: str, out: Any, local: Any, op: str, group: Any, size: int) -> Work:
        """Return a finished `Work`: nothing is sent."""
        return FINISHED

    def all_gather_object(self, value: Any, group: Any, size: int) -> list[Any]:
        """Return this rank's value for every rank."""
        return [value] * size

    def barrier(self, group: Any) -> None:
        """Return at once: there are no other ranks."""

    def _need_world(self) -> _World:
        if self._world is None:
            raise RuntimeError("the dry run has ended: its meshes and models can be inspected, but not run")
        return self._world


_PLATFORMS: dict[tuple[type, type, bool], Any] = {}


def dry_platform(platform: Platform) -> Any:
    """Return the backend that behaves like ``platform`` but sends nothing. The result is cached."""
    cls: Any = type(platform)
    if platform.dry_class is not None:
        module, _, name = platform.dry_class.partition(":")
        cls = getattr(importlib.import_module(module), name)
    key = cls, type(platform), platform.fast is None
    if key not in _PLATFORMS:
        # `supports` is that of the real backend, which has the native collectives.
        own = {"name": f"dry-{platform.name}", "supports": staticmethod(platform.supports)}
        made = type(f"Dry{cls.__name__}", (SendsNothing, cls), own)()
        if platform.fast is None:
            made.fast = None  # fast paths count a collective for a different module
        _PLATFORMS[key] = made
    return _PLATFORMS[key]


def is_dry(platform: Any) -> bool:
    """Return whether collectives on ``platform`` send nothing."""
    return isinstance(platform, SendsNothing)


@contextmanager
def dry_world(size: int, rank: int = 0) -> Iterator[Any]:
    """Run as one rank of a world of any size, whose other ranks do not exist. Inside this context, `dry_platform`
    replaces the selected platform. So meshes, plans and models are made as usual and nothing is sent.

    Args:
        size: number of ranks.
        rank: the rank that this process represents. With uneven shards, the first rank has the largest.

    Raises:
        ValueError: for a rank outside the world.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(
            f"a world of {size} rank(s) has no rank {rank}: pass a size of at least 1, and a rank below the size"
        )
    current = get_platform()
    platform: Any = current if is_dry(current) else dry_platform(current)
    world = _WORLDS.setdefault((size, rank), _World(size, rank))
    before, platform._world = platform._world, world
    try:
        with selected(platform):
            yield platform
    finally:
        platform._world = before
