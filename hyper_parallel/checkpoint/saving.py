"""`save` and `async_save`: the same job, done at once, or in a thread from copies in the memory of the host."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint.jobs import Job, prepare, write
from hyper_parallel.checkpoint.ranks import ThroughFiles, all_ranks
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform import get_platform

__all__ = ["AsyncSave", "async_save", "save", "wait_for_saves"]


def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    overwrite: bool = False,
    checksums: bool = True,
    mesh: DeviceMesh | None = None,
) -> Path:
    """Save a training job, or a part of it, into a directory. All ranks of the world call it with the same arguments,
    or all of ``mesh``.

    Every rank writes the shards that it alone holds, and ranks that hold the same share the work. The checkpoint
    appears under its name when all of it is on the disk. Until then, and after a crash, the checkpoint of before is
    there. It can be loaded on any mesh, by any number of ranks, with other placements, and on the other framework.

    Args:
        state: a module, an optimizer, or a nest (dicts, lists, tuples) of these and of tensors, DTensors, numbers,
            strings, None, NumPy's arrays, and objects with ``state_dict()`` and ``load_state_dict()``, such as
            schedulers and samplers. All must be the same on all ranks, except objects with the attribute ``per_rank``,
            such as `RandomState`.
        path: of a directory that does not exist yet, on a file system that all ranks share. Directories above it are
            made.
        keep: how many checkpoints of this run to keep in the directory above; older ones are removed. None keeps all.
        overwrite: whether a checkpoint at ``path`` is replaced. Any other file or directory there never is.
        checksums: whether to store the CRC-32 of each piece of data, which `load` compares.
        mesh: whose ranks save; None is all of the world.

    Returns:
        ``path``.

    Raises:
        TypeError: for something that a checkpoint does not take.
        ValueError: where ranks differ, ``path`` is there, a tensor is `Partial`, or has no values (meta).
        CheckpointError: when it cannot be written, on any rank.

    Each is raised on all ranks.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.checkpoint import load, save
        >>> model = torch.nn.Linear(4, 6)
        >>> path = save({"model": model, "step": 2}, f"{tempfile.mkdtemp()}/step-2")
        >>> load({"model": model, "step": 0}, path)["step"]
        2
    """
    platform = get_platform()
    wait_for_saves()
    ranks = all_ranks(platform, mesh)
    job = prepare(state, Path(path), ranks, platform, keep, overwrite, checksums, exchange=False)
    write(job, ranks)
    return job.draft.path


class AsyncSave:
    """A save that is under way, from `async_save`.

    Without a call of `result`, the next `save`, `async_save` or `load` raises its failure. At the end of the program a
    warning tells it.
    """

    def __init__(self, run: Callable[[], None], path: Path) -> None:
        self._path, self._told = path, False
        self._failure: BaseException | None = None

        def work() -> None:
            try:
                run()
            except BaseException as error:  # raised to the caller of `result`
                self._failure = error

        self._thread = threading.Thread(target=work, name="hyper_parallel.checkpoint")
        self._thread.start()

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the end; returns the path of the checkpoint.

        Args:
            timeout: seconds to wait at most; None is as long as it takes.

        Raises:
            CheckpointError: when it could not be written, on all ranks.
            TimeoutError: when it is still being written after so many seconds; it goes on.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._path} is still being written after {timeout:g} seconds")
        self._told = True
        if self._failure is not None:
            raise self._failure
        return self._path


#: The pending save of this process, or one whose result has not been asked for.
_UNDER_WAY: list[AsyncSave] = []


def async_save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    overwrite: bool = False,
    checksums: bool = True,
    mesh: DeviceMesh | None = None,
) -> AsyncSave:
    """Save as `save` does, but return when all is copied into the memory of the host. The rest happens parallel to the
    training, without collectives. It first waits for the save before it.

    Args:
        state: as in `save`; it may be changed as soon as this returns.
        path: as in `save`, and so are the other arguments.
        keep: see there.
        overwrite: see there.
        checksums: see there.
        mesh: see there.

    Raises:
        TypeError, ValueError, CheckpointError: as `save`, for problems that are known before writing; also the error of
            the save before it, unless its `AsyncSave.result` was asked for.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.checkpoint import async_save, latest
        >>> directory = tempfile.mkdtemp()
        >>> under_way = async_save({"weight": torch.ones(4)}, f"{directory}/step-1")
        >>> under_way.result() == latest(directory)
        True
    """
    platform = get_platform()
    wait_for_saves()
    ranks = all_ranks(platform, mesh)
    job: Job = prepare(state, Path(path), ranks, platform, keep, overwrite, checksums, exchange=True)
    beside = ThroughFiles(job.draft.exchange, ranks)

    def run() -> None:
        try:
            write(job, beside)
        finally:
            beside.leave()

    under_way = AsyncSave(run, job.draft.path)
    _UNDER_WAY.append(under_way)
    return under_way


def wait_for_saves() -> None:
    """Return when the save that is under way has ended.

    Raises:
        CheckpointError: the error of that save, unless its result was asked for.
    """
    while True:
        try:
            before = _UNDER_WAY.pop()
        except IndexError:  # also where another thread has just taken it
            return
        told = before._told
        try:
            before.result()
        except Exception:
            if not told:
                raise


@atexit.register
def _at_exit() -> None:
    try:
        wait_for_saves()
    except Exception as error:
        warnings.warn(
            f"an asynchronous save has failed: {error}. Ask for its result() before the program ends: that raises",
            stacklevel=1,
        )
