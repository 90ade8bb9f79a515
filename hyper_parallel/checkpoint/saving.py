"""`save` and `async_save`: one job, which runs at once, or in a thread on copies in host memory."""

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
    """Save a training job, or a part of it, into a directory. All ranks of the world, or of ``mesh``, call it with the
    same arguments.

    Every rank writes the shards that only it holds. Ranks that hold the same data share the work. The checkpoint gets
    its name when all data is on disk. Until then, and after a crash, the previous checkpoint exists. A checkpoint can
    be loaded on any mesh, with any number of ranks, any placements, and either framework.

    Args:
        state: a module, an optimizer, or a nest (dicts, lists, tuples) of these and of tensors, DTensors, numbers,
            strings, None, NumPy's arrays, and objects with ``state_dict()`` and ``load_state_dict()``, such as
            schedulers and samplers. All must be the same on all ranks, except objects with the attribute ``per_rank``,
            such as `RandomState`.
        path: directory that does not exist yet, on a file system that all ranks share. Parent directories are created.
        keep: number of this run's checkpoints to keep in the parent directory; older ones are removed. None keeps all.
        overwrite: whether to replace a checkpoint at ``path``. Any other file or directory there is never replaced.
        checksums: whether to store the CRC-32 of each piece of data, which `load` compares.
        mesh: mesh of the ranks that save; None stands for all ranks of the world.

    Returns:
        ``path``.

    Raises:
        TypeError: for a part of ``state`` that a checkpoint cannot store.
        ValueError: if ranks differ, ``path`` exists, a tensor is `Partial`, or a tensor has no values (meta).
        CheckpointError: if the checkpoint cannot be written, on any rank.

    Every error is raised on all ranks.

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
    """Handle of a running save, which `async_save` returns.

    If the save fails and `result` is never called, the next `save`, `async_save` or `load` raises the error. Without
    such a call, a warning reports the error at the end of the program.
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
        """Return whether the save has ended, with or without success."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the end of the save; return the path of the checkpoint.

        Args:
            timeout: maximum seconds to wait; None means no limit.

        Raises:
            CheckpointError: if the checkpoint could not be written, on all ranks.
            TimeoutError: if the save still runs after ``timeout`` seconds; it continues.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"{self._path} is still being written after {timeout:g} seconds: call result() again, or with a "
                "longer timeout"
            )
        self._told = True
        if self._failure is not None:
            raise self._failure
        return self._path


#: The pending save of this process, or a completed one whose result has not been asked for.
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
    """Save as `save` does, but return when all data is copied into host memory. Writing runs in parallel to the
    training, without collectives. The call first waits for the previous save.

    Args:
        state: as in `save`; it may be changed as soon as this returns.
        path: as in `save`.
        keep: as in `save`.
        overwrite: as in `save`.
        checksums: as in `save`.
        mesh: as in `save`.

    Raises:
        TypeError, ValueError, CheckpointError: as `save` raises, for problems that are found before writing. Also the
            error of the previous save, unless its `AsyncSave.result` was called.

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
    """Wait for the pending save.

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
            f"an asynchronous save has failed: {error}. Call its result() before the program ends: result() raises "
            "the error",
            stacklevel=1,
        )
