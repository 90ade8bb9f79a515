"""Reads of values that need a collective, such as ``loss.item()`` of a partial loss.

A rank that reads alone, inside ``if rank == 0``, waits until the time-out of its process group. No rank can know
without communication that the others do not read. After `SLOW` seconds, the log reports the wait, with the line of the
program and the remedy. The error of the time-out names the same remedy.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.communication.errors import CollectiveError
from hyper_parallel.core.program_places import line_of_program
from hyper_parallel.platform.logs import LOG

if TYPE_CHECKING:
    from hyper_parallel.core.layouts.layout import Layout

__all__ = ["SLOW", "read_by_all"]

#: Seconds of waiting after which a message is written to the log.
SLOW = 10.0
#: Seconds between two looks at the waiting reads.
_PAUSE = 1.0


class _Read:
    """A read of values that is in progress on this rank.

    Attributes:
        what: the call, such as ``"item()"``.
        layout: layout of the tensor.
        thread: identifier of the thread that waits.
        since: when it began.
        told: whether the message was written.
    """

    __slots__ = ("layout", "since", "thread", "told", "what")

    def __init__(self, what: str, layout: Layout) -> None:
        self.what, self.layout = what, layout
        self.thread, self.since, self.told = threading.get_ident(), time.monotonic(), False

    @property
    def remedy(self) -> str:
        placements, mesh = list(self.layout.placements), self.layout.mesh
        return (
            f"{self.what} of a tensor of shape {tuple(self.layout.shape)}, placed {placements}, waits until all ranks "
            f"of {mesh} call it. Where only some do, as inside `if rank == 0:`, call it on all ranks, or let all ranks "
            "call full_tensor() before the `if`, and read the result inside"
        )

    def tell(self) -> None:
        """Write to the log that this rank waits, and at which line."""
        self.told = True
        platform = self.layout.mesh.platform
        frame = sys._current_frames().get(self.thread)
        line = line_of_program(platform.Tensor, frame)
        waited = time.monotonic() - self.since
        LOG.warning("rank %d has waited %.0f s at %s\n%s", platform.rank(), waited, line, self.remedy)


def read_by_all(what: str, layout: Layout, read: Callable[[], Any]) -> Any:
    """Return ``read()``, the values of a tensor of ``layout``.

    All ranks of the layout's mesh must call this.

    Args:
        what: the call, for messages.
        layout: layout of the tensor.
        read: function that may communicate.

    Raises:
        CollectiveError: when a rank was lost; the message has the remedy for a call that only some ranks make.
    """
    mesh = layout.mesh
    if (
        layout.replicated
        or mesh.get_coordinate() is None
        or mesh.platform.sends_nothing
        or mesh.platform.is_compiling()
    ):
        return read()
    own = _Read(what, layout)
    _WATCHER.add(own)
    try:
        return read()
    except CollectiveError as error:
        error.args = (f"{error}\n{own.remedy}", *error.args[1:])
        raise
    finally:
        _WATCHER.running.remove(own)


class _Watcher:
    """A thread that checks the running reads at intervals.

    The thread ends when no read is running.

    Attributes:
        running: the running reads.
    """

    def __init__(self) -> None:
        self.running: list[_Read] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, read: _Read) -> None:
        """Watch a read from now on."""
        with self._lock:
            self.running.append(read)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="hyper_parallel reads", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(_PAUSE)
            with self._lock:
                if not self.running:
                    self._thread = None
                    return
            now = time.monotonic()
            for read in tuple(self.running):
                if not read.told and now - read.since > SLOW:
                    read.tell()


_WATCHER = _Watcher()
