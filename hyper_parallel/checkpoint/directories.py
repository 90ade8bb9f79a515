"""Search for checkpoints in a directory, and replacement of an old checkpoint by a new one."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hyper_parallel.checkpoint import disk, writers
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.index import INDEX, Index, read_index
from hyper_parallel.checkpoint.writers import DRAFT, hidden_in, hidden_name, new_token, parse
from hyper_parallel.platform.terminal import printable

__all__ = ["Draft", "checkpoints_in", "latest", "locate", "remove_old", "run_of", "set_run"]

#: Endings of hidden directories: of a checkpoint that is being replaced, and of a directory through which ranks
#: communicate.
_REPLACED, _EXCHANGE = ".replaced", ".ranks"
#: directory -> the run of this process that saves there: the run of a checkpoint that it has loaded, or a new one.
_RUNS: dict[Path, str] = {}


def run_of(directory: Path) -> str:
    """Return the identifier of this process's run for checkpoints in ``directory``."""
    return _RUNS.setdefault(directory.resolve(), uuid.uuid4().hex)


def set_run(directory: Path, run: str) -> None:
    """Record that later saves of this process into ``directory`` belong to the run ``run``."""
    _RUNS[directory.resolve()] = run


def checkpoints_in(directory: Path) -> list[tuple[Path, Index]]:
    """Return the complete checkpoints in a directory, the oldest first. Damaged ones are left out."""
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        # A hidden checkpoint that is being replaced counts until the new one has its name.
        if path.name.startswith(".") and not _is_in_use(path):
            continue
        try:
            index = read_index(path)
        except CheckpointError:
            continue
        if writers.wrong_file(path, index.files) is None:
            found.append((path, index))
    return sorted(found, key=lambda item: item[1].time)


def _is_in_use(path: Path) -> bool:
    """Return whether a hidden directory holds a checkpoint that was being replaced and has no successor yet."""
    hidden = parse(path)
    return hidden is not None and hidden.ending == _REPLACED and not (path.parent / hidden.name).exists()


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a key that changes when another checkpoint replaces the one at ``path``; None if nothing exists there."""
    return disk.stamp(path / INDEX) or disk.stamp(path)


def latest(directory: str | os.PathLike[str], run: str | None = None) -> Path | None:
    """Return the newest complete checkpoint in a directory; None if there is none.

    Incomplete checkpoints, and those whose index or file sizes show damage, are left out.

    Args:
        directory: directory in which `save` wrote checkpoints, such as ``"run"`` for ``"run/step-100"``.
        run: identifier of the run, needed if there are checkpoints of several runs.

    Raises:
        ValueError: if there are checkpoints of several runs and ``run`` is None.

    Example:
        >>> import tempfile
        >>> from hyper_parallel.checkpoint import latest, save
        >>> directory = tempfile.mkdtemp()
        >>> latest(directory) is None
        True
        >>> _ = save({"step": 1}, f"{directory}/step-1"), save({"step": 2}, f"{directory}/step-2")
        >>> latest(directory).name
        'step-2'
    """
    found = checkpoints_in(Path(directory))
    newest = {index.run: path for path, index in found}
    if run is not None:
        return newest.get(run)
    if len(newest) > 1:
        listed = ", ".join(f"{path.name!r} of run {name!r}" for name, path in newest.items())
        raise ValueError(
            f"{printable(directory)} holds checkpoints of {len(newest)} runs, the newest of each: {listed}. Name the "
            "run, latest(directory, run=...), or load a checkpoint by its path. Save each run into its own directory"
        )
    return next(iter(newest.values()), None)


def locate(path: Path) -> Path:
    """Return the directory of the checkpoint at ``path``. If a crash interrupted its replacement, return the hidden
    directory with the old checkpoint.

    Raises:
        CheckpointError: for the draft of an interrupted save.
    """
    if path.name.startswith(".") and path.name.endswith(DRAFT):
        raise CheckpointError(
            f"{path} is the draft of an interrupted save, and not a checkpoint: load a checkpoint that was completed"
        )
    if not os.path.exists(path):  # also where the system takes no such name
        for beside in hidden_in(path.parent, _REPLACED, name=path.name):
            return beside.path
    return path


class Draft:
    """A checkpoint that is being written, in a hidden directory next to its final path.

    Args:
        path: final path of the checkpoint.
        token: token that no other draft has; the same on all ranks.
    """

    def __init__(self, path: Path, token: str) -> None:
        self.path, self._token = path, token
        self.directory, self.exchange, self._replaced = (
            path.with_name(hidden_name(path.name, token, ending)) for ending in (DRAFT, _EXCHANGE, _REPLACED)
        )
        self._before: tuple[int, int] | None = None

    def open(self, exchange: bool, overwrite: bool) -> None:
        """Create the directories, on one rank, and remove directories of saves whose writers have ended.

        Args:
            exchange: whether to create the directory through which ranks communicate, too.
            overwrite: whether to replace the checkpoint that exists at the path now.
        """
        self._before = _stamp(self.path) if overwrite else None
        disk.make_directory(self.directory)
        if exchange:
            disk.make_directory(self.exchange)
        writers.remove_abandoned(self.path.parent, self._now(), DRAFT, _EXCHANGE)

    def _now(self) -> float:
        """Return the time of the file system, read from the directory that this save has just created."""
        return self.directory.stat().st_mtime

    def check(self) -> None:
        """Raise CheckpointError if this rank does not see the directory that another rank has created."""
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{self.path.parent} is not the same directory on this rank: save to a file system that all ranks share"
            )

    def publish(self, files: Mapping[str, int]) -> None:
        """Rename the complete draft to its final name, on one rank. All data is on disk then.

        Args:
            files: files of the checkpoint, with the sizes that were written.

        Raises:
            CheckpointError: if a file is missing, or another save has used the name meanwhile.
        """
        disk.sync_directory(self.directory)
        now = self._now()
        writers.check_whole(self.path, self.directory, files, self._others)
        try:
            if self._before is None:
                disk.rename(self.directory, self.path)
            else:
                with disk.alone_in(self.path.parent):
                    self._replace()
        except OSError as error:
            if isinstance(error, (FileExistsError, FileNotFoundError)) or error.errno == errno.ENOTEMPTY:
                raise self._late() from error
            raise
        disk.sync_directory(self.path.parent)
        if self._before is not None:
            writers.remove(self._replaced)
        writers.remove_abandoned(self.path.parent, now, _REPLACED, name=self.path.name)

    def _replace(self) -> None:
        """Replace the checkpoint that existed at the start of this save."""
        self._check_is_before(self.path)
        disk.rename(self.path, self._replaced)
        try:
            self._check_is_before(self._replaced)  # programs on other machines need not see the lock
            disk.rename(self.directory, self.path)
        except (OSError, CheckpointError):
            disk.rename(self._replaced, self.path)
            raise

    def _check_is_before(self, place: Path) -> None:
        """Raise CheckpointError if another program has changed the checkpoint at ``place`` since this save began."""
        if _stamp(place) != self._before:
            raise self._late()

    def _late(self) -> CheckpointError:
        """Return the error that names the program that changed the final path during this save."""
        place = self.path if self.path.exists() else self._replaced
        try:
            index = read_index(place)
            who = f"{index.writer or 'a process'} (run {index.run})"
        except CheckpointError:
            who = "another program"
        return CheckpointError(
            f"{self.path} was not saved: {who} created or removed this path while the checkpoint was being "
            f"written.{self._others()} Let one program at a time save there, or use a different directory for each "
            "program"
        )

    def _others(self) -> str:
        return writers.others_in(self.path.parent, self._token, DRAFT)

    def discard(self, exchange: bool) -> None:
        """Remove the incomplete checkpoint, on one rank. With ``exchange`` also remove the directory through which
        ranks communicate."""
        for directory in (self.directory, self.exchange) if exchange else (self.directory,):
            if directory.exists():
                disk.remove_tree(directory)


def remove_old(path: Path, run: str, keep: int) -> None:
    """Remove old checkpoints of a run. Keep the newest ``keep`` ones, including the just saved ``path``."""
    directory = path.parent
    stamps = {place: _stamp(place) for place in directory.iterdir()}
    older = [place for place, index in checkpoints_in(directory) if index.run == run and place != path]
    for place in older[: max(len(older) - keep + 1, 0)]:
        # Rename first, so that a half-removed checkpoint is never found.
        hidden = place.with_name(hidden_name(place.name, new_token(), DRAFT))
        with suppress(FileNotFoundError):  # another save of the run has removed it
            disk.rename(place, hidden)
            if _stamp(hidden) == stamps.get(place):
                disk.remove_tree(hidden)
            else:
                disk.rename(hidden, place)  # another save has replaced it meanwhile
