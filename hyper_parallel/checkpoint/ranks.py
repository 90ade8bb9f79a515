"""Communication of the ranks of a save or a load, which exchange results and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hyper_parallel.checkpoint import disk
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.core.communication.collectives import all_gather_object
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform import Platform
from hyper_parallel.platform.terminal import printable, printable_lines
from hyper_parallel.platform.timeout import timeout_seconds

__all__ = ["LOADING", "Alone", "Collective", "ThroughFiles", "Ranks", "all_ranks", "together"]

T = TypeVar("T")
#: The global ranks that load a checkpoint, while objects get their state; None at any other time.
LOADING: ContextVar[tuple[int, ...] | None] = ContextVar("hyper_parallel_loading", default=None)
#: Seconds to wait for other ranks if the program has set no timeout. Torch has the same default.
_PATIENCE = 1800.0
#: Errors of a call, by their names.
_OF_CALLS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


class Ranks(Protocol):
    """The ranks that take part in a save or a load.

    Attributes:
        rank: this rank, as a global rank.
        members: all participating global ranks; the first one does the tasks that one rank does for all.
    """

    rank: int
    members: tuple[int, ...]

    def gather(self, value: Any) -> list[Any]:
        """Return a value of each rank, in the order of ``members``. The value must consist of types that JSON has. All
        ranks must call this method."""
        ...


class Alone:
    """One process without a process group."""

    rank: int = 0
    members: tuple[int, ...] = (0,)

    def gather(self, value: Any) -> list[Any]:
        disk.step("barrier", Path())
        return [value]


class Collective:
    """Communication of all ranks of a mesh by collectives."""

    def __init__(self, mesh: DeviceMesh) -> None:
        mesh.require_member("saving or loading a checkpoint")
        self.rank, self.members = mesh.get_rank(), tuple(int(rank) for rank in mesh.ranks.reshape(-1))
        self._mesh = mesh

    def gather(self, value: Any) -> list[Any]:
        disk.step("barrier", Path())
        values = [value]
        for mesh_dim in reversed(range(self._mesh.ndim)):
            values = [x for part in all_gather_object(values, self._mesh, mesh_dim) for x in part]
        return values


class ThroughFiles:
    """Communication of ranks by small files in a directory that all ranks see.

    An asynchronous save uses it in its thread, because collectives there would interleave with those of the training.

    Args:
        directory: directory that exists and is empty.
        ranks: this rank, and all ranks.
    """

    def __init__(self, directory: Path, ranks: Ranks) -> None:
        self.rank, self.members, self._directory = ranks.rank, ranks.members, directory
        self._step, self._lost = 0, False
        self._limit = timeout_seconds(None) or _PATIENCE

    def gather(self, value: Any) -> list[Any]:
        disk.step("barrier", self._directory)
        self._tell(value)
        return [self._read(self._directory / f"{self._step}.{rank}", rank) for rank in self.members]

    def leave(self) -> None:
        """End the communication. The first rank removes the directory when all ranks have read its files."""
        if self.rank != self.members[0]:
            with suppress(CheckpointError):  # the save has failed, and the error was raised already
                self._tell(None)
            return
        if not self._lost:
            self.gather(None)
        disk.remove_tree(self._directory)

    def _tell(self, value: Any) -> None:
        self._step += 1
        mine = self._directory / f"{self._step}.{self.rank}"
        hidden = mine.with_name(f".{mine.name}")
        try:
            hidden.write_text(json.dumps(value))
            hidden.rename(mine)  # other ranks find the complete file, or none
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the other ranks have abandoned an asynchronous save, because rank {self.rank} did not respond in time"
            ) from error
        except OSError as error:
            self._lost = True  # others wait for a file that cannot be written
            raise CheckpointError(f"{mine} cannot be written: {error.strerror or error}") from error

    def _read(self, path: Path, rank: int) -> Any:
        began, pause = time.monotonic(), 0.001
        while True:
            try:
                return json.loads(path.read_text())
            except FileNotFoundError:
                if time.monotonic() - began > self._limit:
                    self._lost = True
                    raise CheckpointError(
                        f"rank {rank} did not reach the next step of an asynchronous save within {self._limit:g} "
                        "seconds: the rank has ended, or it cannot read the directory of the checkpoint"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, 0.2)


def all_ranks(platform: Platform, mesh: DeviceMesh | None) -> Ranks:
    """Return the ranks of the mesh, or for None the ranks of the world. Without a process group that is this process
    alone."""
    if mesh is not None:
        return Collective(mesh)
    if platform.world() is None or platform.world_size() == 1:
        return Alone()
    return Collective(DeviceMesh(None, range(platform.world_size())))


def together(ranks: Ranks, what: str, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on each rank; return the results of all ranks, in the order of the ranks.

    Args:
        ranks: the ranks, all of which call this.
        what: description of the action in messages, such as "writing ...".
        action: function that returns a value that JSON supports.

    Raises:
        ValueError, TypeError: on all ranks, if every failed rank raised this type.
        CheckpointError: on all ranks, if a rank failed in another way.
    """
    failure: Exception | None = None
    mine: tuple[Any, list[str] | None]
    try:
        mine = (action(), None)
    except Exception as error:
        failure = error
        mine = (None, [type(error).__name__, str(error)])
    results: Sequence[Any] = ranks.gather(mine)
    errors = {rank: error for rank, (_, error) in zip(ranks.members, results, strict=True) if error is not None}
    if not errors:
        return [value for value, _ in results]
    raise _joined(errors, what, len(ranks.members)) from failure


def _joined(errors: dict[int, Sequence[str]], what: str, size: int) -> Exception:
    first, (kind, text) = next(iter(errors.items()))
    if kind in _OF_CALLS and len(errors) == size and len({tuple(e) for e in errors.values()}) == 1:
        return _OF_CALLS[kind](printable_lines(text))
    same = all(error[1] == text for error in errors.values())
    who = "" if same and len(errors) == size else f" on rank {first}" if len(errors) == 1 else f" on ranks {[*errors]}"
    said = printable_lines(text)
    message = said if kind in _OF_CALLS or kind == "CheckpointError" else f"{kind}: {'; '.join(said.splitlines())}"
    if len({e[0] for e in errors.values()}) == 1 and kind in _OF_CALLS:
        return _OF_CALLS[kind](f"{message} ({printable(what)}{who})" if who else message)
    return CheckpointError(f"{what} failed{who}: {message}")
