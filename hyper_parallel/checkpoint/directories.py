"""Checkpoints in a directory: which is the newest, which belong to one run, and how a new one takes its place."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from hyper_parallel.checkpoint import disk
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.index import Index, read_index

__all__ = [
    "Draft",
    "checkpoints_in",
    "latest",
    "locate",
    "new_token",
    "remove_drafts",
    "remove_old",
    "run_of",
    "set_run",
]

#: What hidden directories end with: of one that is being written, and of one that is being replaced.
_DRAFT, _REPLACED, _EXCHANGE = ".draft", ".replaced", ".ranks"
#: directory -> the run of this process whose checkpoints are there: that of a checkpoint it has loaded, or a new one.
_RUNS: dict[Path, str] = {}


def run_of(directory: Path) -> str:
    """What identifies the run of this process among those whose checkpoints are in ``directory``."""
    return _RUNS.setdefault(directory.resolve(), uuid.uuid4().hex)


def set_run(directory: Path, run: str) -> None:
    """This process goes on with a run."""
    _RUNS[directory.resolve()] = run


def checkpoints_in(directory: Path) -> list[tuple[Path, Index]]:
    """The whole checkpoints in a directory, the oldest first. What is damaged is left out."""
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        name = path.name
        # Of what is hidden, one that was being replaced counts until the new one has its name.
        if name.startswith(".") and (not name.endswith(_REPLACED) or path.with_name(_visible(name)).exists()):
            continue
        try:
            index = read_index(path)
        except CheckpointError:
            continue
        if all((path / file).is_file() and (path / file).stat().st_size == n for file, n in index.files.items()):
            found.append((path, index))
    return sorted(found, key=lambda item: item[1].time)


def latest(directory: str | os.PathLike[str], run: str | None = None) -> Path | None:
    """The newest whole checkpoint in a directory, None where there is none.

    Left out are those that were never completed, and those whose index or size says that they are damaged.

    Args:
        directory: that `save` wrote checkpoints in, as ``"run/step-100"``.
        run: of which run, where checkpoints of several are there.

    Raises:
        ValueError: when checkpoints of several runs are there and ``run`` does not say which.

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
            f"{directory} holds checkpoints of {len(newest)} runs, the newest of each: {listed}. Say which, "
            "latest(directory, run=...), or load one of them by its path, and use a directory for each run"
        )
    return next(iter(newest.values()), None)


def locate(path: Path) -> Path:
    """Where the checkpoint of that name is: there, or beside, where a crash came while another one took its place.

    Raises:
        CheckpointError: for what a save has left that was cut short.
    """
    if path.name.startswith(".") and path.name.endswith(_DRAFT):
        raise CheckpointError(f"{path} is what a save has left that was cut short: it is no checkpoint")
    if not path.exists():
        for beside in path.parent.glob(f".{path.name}.*{_REPLACED}") if path.parent.is_dir() else ():
            if _visible(beside.name) == path.name:
                return beside
    return path


def _visible(name: str) -> str:
    """``.step-1.0123.replaced`` -> ``step-1``."""
    return name[1:].rsplit(".", 2)[0]


class Draft:
    """A checkpoint that is being written beside its place.

    Args:
        path: what it will be called.
        token: that no other draft has; the same on all ranks.
    """

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self.directory = path.with_name(f".{path.name}.{token}{_DRAFT}")
        self.exchange = path.with_name(f".{path.name}.{token}{_EXCHANGE}")
        self._replaced = path.with_name(f".{path.name}.{token}{_REPLACED}")

    def open(self, exchange: bool) -> None:
        """Make the directories, on one rank; ``exchange``: also the one through which ranks talk."""
        disk.make_directory(self.directory)
        if exchange:
            disk.make_directory(self.exchange)

    def check(self) -> None:
        """Raise CheckpointError where this rank does not see what another one has made."""
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{self.path.parent} is not the same directory on this rank: save to a file system that all ranks share"
            )

    def publish(self) -> None:
        """Give it its name, on one rank: all of it is on the disk."""
        disk.sync_directory(self.directory)
        replaces = self.path.exists()
        if replaces:
            disk.rename(self.path, self._replaced)
        try:
            disk.rename(self.directory, self.path)
        except OSError:
            if replaces:
                disk.rename(self._replaced, self.path)
            raise
        disk.sync_directory(self.path.parent)
        for beside in self.path.parent.glob(f".{self.path.name}.*{_REPLACED}"):
            if _visible(beside.name) == self.path.name:
                disk.remove_tree(beside)

    def discard(self, exchange: bool) -> None:
        """Remove what was written, on one rank; ``exchange``: also the directory through which ranks talk."""
        for directory in (self.directory, self.exchange) if exchange else (self.directory,):
            if directory.exists():
                disk.remove_tree(directory)


def new_token(run: str) -> str:
    """For the next `Draft` of a run."""
    return f"{run[:12]}-{uuid.uuid4().hex[:8]}"


def remove_drafts(directory: Path, run: str) -> None:
    """Remove what saves of this run have left behind that a crash has cut short."""
    for ending in (_DRAFT, _EXCHANGE):
        for left in directory.glob(f".*.{run[:12]}-*{ending}"):
            disk.remove_tree(left)


def remove_old(directory: Path, run: str, keep: int) -> None:
    """Remove the checkpoints of a run but for the newest ``keep``."""
    mine = [path for path, index in checkpoints_in(directory) if index.run == run]
    for path in mine[:-keep]:
        # First the name: what is half removed must not be found.
        hidden = path.with_name(f".{path.name}.{new_token(run)}{_DRAFT}")
        disk.rename(path, hidden)
        disk.remove_tree(hidden)
