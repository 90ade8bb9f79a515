"""Hidden names of incomplete files. A name identifies the writing process, so others can check whether it still
runs."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hyper_parallel.checkpoint import disk
from hyper_parallel.checkpoint.errors import CheckpointError

__all__ = [
    "DRAFT",
    "LONGEST",
    "Hidden",
    "check_whole",
    "hidden_in",
    "hidden_name",
    "name_of_process",
    "new_token",
    "others_in",
    "parse",
    "remove",
    "remove_abandoned",
    "wrong_file",
]

#: Ending of the hidden names of files that are being written or removed.
DRAFT = ".draft"
#: A visible name, the token (machine, process, start time of the process, and a random number), and the ending.
_HIDDEN = re.compile(
    r"\.(?P<name>.+)\.(?P<token>(?P<machine>[0-9a-f]{12})-(?P<process>[0-9a-f]{1,7})-(?P<began>[0-9a-f]{1,16})-[0-9a-f]{8})"
    r"(?P<ending>\.[a-z]+)",
    re.DOTALL,
)
#: Maximum bytes of a visible name. A file system allows 255, and a hidden name has up to 57 more.
LONGEST = 198
#: Stands for the machine of a process that cannot determine it.
_NOWHERE = "0" * 12
#: Seconds without a change after which a writer on another machine counts as dead. No step of a save takes so long. A
#: writer that is alive after all notices the missing draft when it renames it, and its save fails.
_SILENT = 24 * 3600.0


class Hidden(NamedTuple):
    """A hidden file or directory of a process that saves.

    Attributes:
        path: path of the file or directory.
        name: its visible name, later or before.
        token: token of the save that created it.
        ending: ending of the name, such as ``".draft"``, which tells the purpose.
        machine: machine and namespace of process numbers on which the process runs.
        process: process number on that machine.
        began: start time of the process, in ticks since the machine's start.
    """

    path: Path
    name: str
    token: str
    ending: str
    machine: str
    process: int
    began: int

    def is_abandoned(self, now: float) -> bool:
        """Return whether the writer is known to have ended.

        Args:
            now: time of the file system, in seconds. The clock of this machine may differ from it.
        """
        if self.token.startswith(_this_process()):
            return False
        if self.machine == _machine() != _NOWHERE:
            return not _runs(self.process, self.began)
        return now - self._last_change(now) > _SILENT

    def writer(self) -> str:
        """Return a description of the writer, for messages."""
        if self.machine != _machine():
            return "a process of another machine or container"
        return f"process {self.process} of this machine" if self.process != os.getpid() else "another thread"

    def _last_change(self, now: float) -> float:
        try:
            inside = [*self.path.iterdir()] if self.path.is_dir() else []
            return max(path.stat().st_mtime for path in (self.path, *inside))
        except OSError:  # it changes now
            return now


def new_token() -> str:
    """Return a token that identifies the process and is unique for each save. Hidden names contain it."""
    return f"{_this_process()}-{os.urandom(4).hex()}"


def hidden_name(name: str, token: str, ending: str) -> str:
    """Return the hidden name of a save's file whose visible name is ``name``."""
    return f".{name}.{token}{ending}"


def name_of_process() -> str:
    """Return a name of this process that people understand."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def hidden_in(directory: Path, *endings: str, name: str | None = None) -> Iterator[Hidden]:
    """Yield the hidden files and directories of saves in a directory.

    Args:
        directory: the directory, which need not exist.
        endings: endings of the names to find.
        name: visible name to find; None finds all.
    """
    try:
        found = [x for x in os.listdir(directory) if x.startswith(".") and x.endswith(endings)]
    except OSError:
        return
    for x in sorted(found):
        hidden = parse(directory / x)
        if hidden is not None and name in (None, hidden.name):
            yield hidden


def parse(path: Path) -> Hidden | None:
    """Return the facts in a hidden name; None for any other name."""
    found = _HIDDEN.fullmatch(path.name)
    if found is None:
        return None
    name, token, machine, process, began, ending = found.groups()
    return Hidden(path, name, token, ending, machine, int(process, 16), int(began, 16))


def others_in(directory: Path, token: str, *endings: str) -> str:
    """Return a sentence that names other writers in a directory; empty if there are none."""
    who = sorted({f"{x.writer()} ({x.name})" for x in hidden_in(directory, *endings) if x.token != token})
    return f" Also saving there: {', '.join(who[:5])}." if who else ""


def wrong_file(directory: Path, sizes: Mapping[str, int]) -> str | None:
    """Return the name of the first file that is missing or has another size; None if all files match."""
    for name, size in sizes.items():
        try:
            found = os.stat(directory / name)
        except OSError:
            return name
        if found.st_size != size or not stat.S_ISREG(found.st_mode):
            return name
    return None


def check_whole(path: Path, directory: Path, sizes: Mapping[str, int], others: Callable[[], str]) -> None:
    """Raise CheckpointError unless all written files are present and complete.

    Args:
        path: path of the checkpoint, for the message.
        directory: present directory of the files.
        sizes: file name -> number of bytes written.
        others: function that returns a sentence of `others_in`.
    """
    wrong = wrong_file(directory, sizes)
    if wrong is not None:
        raise CheckpointError(
            f"{path} was not saved: {directory / wrong} was removed or changed during the save.{others()} Let one "
            "program at a time save there, or use a different directory for each program"
        )


def remove_abandoned(directory: Path, now: float, *endings: str, name: str | None = None) -> None:
    """Remove hidden files and directories of saves whose writers have ended.

    Args:
        directory: where to look.
        now: the time of its file system, in seconds.
        endings: the endings of the names to remove.
        name: visible name of the files to remove; None stands for all.
    """
    for hidden in hidden_in(directory, *endings, name=name):
        if hidden.is_abandoned(now):
            remove(hidden.path)


def remove(path: Path) -> None:
    """Rename a directory or a file to a hidden name, then remove it."""
    # If the tree was removed in place, another program could rename it meanwhile, and lose files under the new name.
    away = path.with_name(hidden_name("removed", new_token(), DRAFT))
    with suppress(OSError):  # another save removes it
        disk.step("rename", path)
        os.rename(path, away)
        disk.remove_tree(away)


@functools.cache
def _this_process() -> str:
    """Return the start of the tokens of this process."""
    pid = os.getpid()
    return f"{_machine()}-{pid:x}-{max(_began(pid) or 0, 0):x}"


@functools.cache
def _machine() -> str:
    """Return an identifier of the scope of process numbers: this machine since its last boot, and the namespace."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time") if os.path.exists("/proc/self/ns")]
    except OSError:
        return _NOWHERE
    return hashlib.sha256("\n".join([booted, *spaces]).encode()).hexdigest()[:12]


def _forget() -> None:
    """Clear the caches in a forked child, which has another process number."""
    _this_process.cache_clear()
    _machine.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _began(pid: int) -> int | None:
    """Return the start time of a process in ticks, -1 for a zombie, or None if it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -1 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _runs(pid: int, began: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # of another user: it runs
    found = _began(pid)  # the number may have gone to another process
    return found is None or found == began
