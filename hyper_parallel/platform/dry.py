"""A backend whose collectives send nothing: for one rank of a world whose other ranks are not there.

`dry_platform` makes it of any backend. Groups are names, collectives give tensors of the shapes that they would have,
and everything else is the backend's own: core runs on it as it runs on many processes. The values of tensors mean
nothing; where the framework has tensors without data (`Platform.dry_class`), they have none.
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
    """A world of which there is one rank."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank


#: (size, rank) -> the world, as long as something refers to it: then the meshes in it are still known.
_WORLDS: WeakValueDictionary[tuple[int, int], _World] = WeakValueDictionary()


class SendsNothing:
    """The roles "groups" and "collectives" of a world whose other ranks are not there."""

    _world: _World | None = None
    sends_nothing = True
    # Nothing is compiled, and a compiler is told of groups.
    set_compiled_forward = CompilerRole.set_compiled_forward
    compiled_hook = CompilerRole.compiled_hook
    share_compiled_inputs = CompilerRole.share_compiled_inputs

    def init_process_group(self, timeout: float | None = None) -> None:
        """There is one, inside `dry_world`."""

    def world(self) -> _World | None:
        """See `Platform.world`."""
        return self._world

    def rank(self) -> int:
        """See `Platform.rank`."""
        return self._need_world().rank

    def world_size(self) -> int:
        """See `Platform.world_size`."""
        return self._need_world().size

    def new_group(self, rank_lists: Sequence[Sequence[int]], backend: str | None = None, options: Any = None) -> str:
        """See `Platform.new_group`. It costs the same for any number of ranks."""
        return "no group"

    def native_group(self, group: Any) -> Any:
        """See `Platform.native_group`.

        Raises:
            RuntimeError: there is none.
        """
        raise RuntimeError(
            "a dry run has no process groups that functions of the framework could use: call collectives of DTensors "
            "(redistribute, full_tensor), or leave this part of the program out of the dry run"
        )

    def native_mesh(self, *args: Any) -> Any:
        """See `Platform.native_mesh`.

        Raises:
            RuntimeError: there is none, as of groups.
        """
        return self.native_group(None)

    def is_communication_failure(self, error: Exception) -> bool:
        """Nothing is communicated."""
        return False

    def tell_of_failure(self, groups: Sequence[Any], ranks: Sequence[int], report: str) -> None:
        """Do nothing: there are no other ranks."""

    # ------------------------------------------------------------------------------------------------ collectives
    def all_reduce(self, local: Any, op: str, group: Any) -> Any:
        """See `Platform.all_reduce`."""
        return local

    def all_gather(self: Any, local: Any, group: Any, size: int) -> Any:
        """See `Platform.all_gather`."""
        first, *rest = self.shape_of(local)
        return self.zeros((size * first, *rest), local)

    def reduce_scatter(self: Any, local: Any, op: str, group: Any, size: int) -> Any:
        """See `Platform.reduce_scatter`."""
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
        """See `Platform.all_to_all`."""
        rows, *rest = self.shape_of(local)
        return self.zeros((rows if received is None else sum(received), *rest), local)

    def shift(self, local: Any, group: Any, size: int) -> Any:
        """See `Platform.shift`."""
        return local

    def broadcast(self, local: Any, src: int, group: Any) -> Any:
        """See `Platform.broadcast`."""
        return local

    def scatter(self, out: Any, parts: Sequence[Any] | None, src: int, group: Any) -> Any:
        """See `Platform.scatter`."""
        return out

    def start_collective(self, collective: str, out: Any, local: Any, op: str, group: Any, size: int) -> Work:
        """See `Platform.start_collective`."""
        return FINISHED

    def all_gather_object(self, value: Any, group: Any, size: int) -> list[Any]:
        """Every rank has the same value as this one."""
        return [value] * size

    def barrier(self, group: Any) -> None:
        """Return at once: there are no other ranks."""

    def _need_world(self) -> _World:
        if self._world is None:
            raise RuntimeError("the dry run is over: its meshes and models can only be looked at")
        return self._world


_PLATFORMS: dict[tuple[type, type, bool], Any] = {}


def dry_platform(platform: Platform) -> Any:
    """The backend that works as ``platform`` does and sends nothing, made once."""
    cls: Any = type(platform)
    if platform.dry_class is not None:
        module, _, name = platform.dry_class.partition(":")
        cls = getattr(importlib.import_module(module), name)
    key = cls, type(platform), platform.fast is None
    if key not in _PLATFORMS:
        # The native collectives, and so the supported ones, are those of the backend that it stands for.
        own = {"name": f"dry-{platform.name}", "supports": staticmethod(platform.supports)}
        made = type(f"Dry{cls.__name__}", (SendsNothing, cls), own)()
        if platform.fast is None:
            made.fast = None  # the short ways differ in which module a collective is counted for
        _PLATFORMS[key] = made
    return _PLATFORMS[key]


def is_dry(platform: Any) -> bool:
    """Return whether collectives on ``platform`` send nothing."""
    return isinstance(platform, SendsNothing)


@contextmanager
def dry_world(size: int, rank: int = 0) -> Iterator[Any]:
    """Inside, this process is one rank of a world of any size whose other ranks are not there: the selected platform is
    that of `dry_platform`, so meshes, plans and models are made as ever and nothing is sent.

    Args:
        size: number of ranks.
        rank: which one this process stands for. Of uneven sizes the first rank has the most.

    Raises:
        ValueError: for a rank outside the world.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(
            f"a world of {size} rank(s) has no rank {rank}: give a size of at least 1, and a rank below it"
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
