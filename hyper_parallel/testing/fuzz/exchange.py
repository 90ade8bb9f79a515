"""Collectives through memory that the ranks share. These collectives are fast, and a rank that waits in vain gets an
error at once.

A backend's collectives cost milliseconds where four ranks share two cores. If a rank is missing, or calls another
collective, they cost half a minute or more. Random programs call few and small collectives, and test how core uses
them. The conformance suite tests the backends' collectives.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract.collectives import Work
from hyper_parallel.platform.timeout import slowness
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.pool import WorkerPool

__all__ = ["Exchange", "ExchangePool", "OutOfStepError", "installed", "patience"]


def patience() -> float:
    """Return how many seconds a rank waits for another rank in the same program; more on a busy machine."""
    return float(os.environ.get("HYPER_PARALLEL_FUZZ_PATIENCE", "15")) * slowness()


#: Bytes reserved for a message.
_SLOT = 1 << 18
#: Header of a message, its number and length; and a counter of the programs that a rank has ended.
_HEAD, _WORD = struct.Struct("<qq"), struct.Struct("<q")
_REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sum": lambda parts: parts.sum(0, parts.dtype),
    "avg": lambda parts: parts.mean(0, parts.dtype),
    "max": lambda parts: parts.max(0),
    "min": lambda parts: parts.min(0),
    "product": lambda parts: parts.prod(0, parts.dtype),
}

#: Methods of the platform that go through the file.
_VERBS = (
    "new_group",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "shift",
    "broadcast",
    "scatter",
    "all_gather_object",
    "start_collective",
    "exchange_texts",
    "tell_of_failure",
    "find_missing_ranks",
)
#: Message of a rank that asks other ranks for their state, in place of a collective.
_QUESTION = "a question"

_installed: Exchange | None = None


class OutOfStepError(Exception):
    """Raised where another rank has ended the program, is missing, or is in another collective."""


class AskedError(RuntimeError):
    """Raised where another rank asks for this rank's state, or has left: a backend's collective would fail then."""


class ExchangePool(WorkerPool):
    """A pool of ranks with the collectives of an `Exchange`."""

    def _start(self) -> None:
        super()._start()
        place = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a file system in memory, if there is one
        with tempfile.NamedTemporaryFile(prefix="hyper-parallel-exchange-", dir=place) as file:
            file.truncate(self.size * _WORD.size + (1 << self.size) * self.size * 2 * _SLOT)
            self.run(self.size, install, file.name)


def install(path: str) -> None:
    """Route the backend's collectives on this rank through a file. Run it as a job in new workers, before any mesh."""
    global _installed
    _installed = Exchange(path, spmd.rank, spmd.world_size)
    platform: Any = get_platform()
    for name in _VERBS:
        setattr(platform, name, getattr(_installed, name))
    _installed.native_new_group = type(platform).new_group.__get__(platform)


def installed() -> Exchange | None:
    """Return the exchange that this rank's collectives go through, or None."""
    return _installed


class Exchange:
    """Collectives of `Platform` in NumPy.

    Args:
        path: path of the shared file.
        rank: this rank.
        size: number of ranks.
    """

    native_new_group: Any

    def __init__(self, path: str, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        #: Number of programs that this rank has ended, and numbers of messages of each set of ranks in this program.
        self._ended, self._sent = 0, [0] * (1 << size)
        self._ranks: dict[Any, tuple[int, ...]] = {}
        #: Why this program cannot go on. It is saved, because a framework or the program may catch the exception.
        self.problem = ""
        #: Whether waiting for a rank that has left the program raises `AskedError`, as with a backend's collectives.
        self.ranks_leave = False

    def end_program(self) -> str:
        """Wait until all ranks have ended the program. Return why they were not in step, or an empty string."""
        self._ended += 1
        _WORD.pack_into(self._map, self._rank * _WORD.size, self._ended)
        pause = _Pause()
        while late := [rank for rank in range(self._size) if self._ended_by(rank) < self._ended]:
            if pause.is_over():
                raise OutOfStepError(f"rank {self._rank} ended the program, rank(s) {late} did not")
        problem, self.problem = self.problem, ""
        self._sent, self.ranks_leave = [0] * (1 << self._size), False
        return problem

    # ------------------------------------------------------------------------------------------------ Platform's verbs
    def new_group(self, rank_lists: Sequence[Sequence[int]], backend: str | None = None, options: Any = None) -> Any:
        """Create groups and record their ranks. See `Platform.new_group`."""
        group = self.native_new_group(rank_lists, backend, options)
        for ranks in rank_lists:
            if self._rank in ranks:
                self._ranks[group] = tuple(ranks)
        return group

    def all_reduce(self, local: Any, op: str, group: Any) -> Any:
        """Reduce over the group. See `Platform.all_reduce`."""
        return self._tensor(_REDUCTIONS[op](np.stack(self._arrays(f"all_reduce {op}", local, group))))

    def all_gather(self, local: Any, group: Any, size: int) -> Any:
        """Gather along dimension 0. See `Platform.all_gather`."""
        return self._tensor(np.concatenate(self._arrays("all_gather", local, group)))

    def reduce_scatter(self, local: Any, op: str, group: Any, size: int) -> Any:
        """Reduce over the group and return this rank's shard. See `Platform.reduce_scatter`."""
        reduced = _REDUCTIONS[op](np.stack(self._arrays(f"reduce_scatter {op}", local, group)))
        return self._tensor(np.split(reduced, size)[self._ranks[group].index(self._rank)])

    def all_to_all(
        self,
        local: Any,
        group: Any,
        size: int,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Any:
        """Exchange shards between all ranks. See `Platform.all_to_all`."""
        ranks, adapter = self._ranks[group], get_adapter()
        cuts: Any = size if sent is None else np.cumsum(sent)[:-1]
        parts = pickle.dumps(np.split(adapter.numpy(local), cuts))
        mine = ranks.index(self._rank)
        arrived = [pickle.loads(said)[mine] for said in self._swap("all_to_all", parts, ranks)]
        return self._tensor(np.concatenate(arrived))

    def shift(self, local: Any, group: Any, size: int) -> Any:
        """Return the previous rank's tensor. See `Platform.shift`."""
        return self._tensor(self._arrays("shift", local, group)[self._ranks[group].index(self._rank) - 1])

    def broadcast(self, local: Any, src: int, group: Any) -> Any:
        """Return the tensor of rank ``src``. See `Platform.broadcast`."""
        return self._tensor(self._arrays(f"broadcast from {src}", local, group)[self._ranks[group].index(src)])

    def scatter(self, out: Any, parts: Sequence[Any] | None, src: int, group: Any) -> Any:
        """Write this rank's part of the tensors of rank ``src`` into ``out``. See `Platform.scatter`."""
        ranks, adapter = self._ranks[group], get_adapter()
        mine = b"" if parts is None else pickle.dumps([adapter.numpy(part) for part in parts])
        sent = pickle.loads(self._swap(f"scatter from {src}", mine, ranks)[ranks.index(src)])
        return out.copy_(self._tensor(sent[ranks.index(self._rank)]))

    def all_gather_object(self, value: Any, group: Any, size: int) -> list[Any]:
        """Return the objects of all ranks. See `Platform.all_gather_object`."""
        return [pickle.loads(said) for said in self._swap("all_gather_object", pickle.dumps(value), self._ranks[group])]

    def start_collective(self, collective: str, out: Any, local: Any, op: str, group: Any, size: int) -> Work:
        """Start a collective. See `Platform.start_collective`. `Work.wait` writes the result; ``out`` is NaN before."""
        arrays = self._arrays(f"{collective} {op}", local, group)
        if collective == "all_gather":
            result = np.concatenate(arrays)
        elif collective == "shift":
            result = arrays[self._ranks[group].index(self._rank) - 1]
        else:
            result = _REDUCTIONS[op](np.stack(arrays))
        if collective == "reduce_scatter":
            result = np.split(result, size)[self._ranks[group].index(self._rank)]
        work = _Started(self, collective, out, None if out is local else local, self._tensor(result))
        if np.issubdtype(result.dtype, np.floating):
            get_platform().write(out, self._tensor(np.full_like(result, np.nan)))
        return work

    def exchange_texts(self, ranks: Sequence[int], place: str, text: str) -> dict[int, str] | None:
        """Return the texts of the ranks that make this call too.

        Ranks that are in a collective are left out. See `Platform.exchange_texts`.
        """
        said = self._swap(_QUESTION, text.encode(), ranks, True)
        return {rank: x.decode() for rank, x in zip(ranks, said, strict=True) if x is not None}

    def tell_of_failure(self, groups: Sequence[Any], ranks: Sequence[int], report: str) -> None:
        """Do nothing: the exchange itself informs other ranks. See `Platform.tell_of_failure`."""

    def find_missing_ranks(self, group: Any, ranks: Sequence[int], report: str) -> None:
        """Do nothing: the exchange itself notices missing ranks. See `Platform.find_missing_ranks`."""

    # ------------------------------------------------------------------------------------------------------- messages
    def _tensor(self, array: np.ndarray) -> Any:
        return get_adapter().tensor(array.copy("C"))

    def _arrays(self, what: str, local: Any, group: Any) -> list[np.ndarray]:
        """Return the array of each rank of the group; all have the same shape and dtype."""
        mine = get_adapter().numpy(local)
        said = self._swap(f"{what} of {mine.dtype}{list(mine.shape)}", mine.tobytes(), self._ranks[group])
        return [np.frombuffer(x, mine.dtype).reshape(mine.shape) for x in said]

    def fail(self, problem: str) -> NoReturn:
        """Record why the program cannot go on, and raise OutOfStepError."""
        self.problem = self.problem or problem
        raise OutOfStepError(problem)

    def _swap(self, what: str, content: bytes, ranks: Sequence[int], may_differ: bool = False) -> list[Any]:
        """Exchange ``content`` between ``ranks``, and return the content of each rank.

        ``what`` names the collective. With ``may_differ``, the result is None for a rank that is in another collective.
        """
        if self.problem:
            raise OutOfStepError(self.problem)
        region = sum(1 << rank for rank in ranks)
        self._sent[region] += 1
        number = (self._ended << 32) + self._sent[region]
        message = pickle.dumps((what, content))
        if len(message) > _SLOT - _HEAD.size:
            raise ValueError(f"{what}: {len(content)} bytes are more than a message can have")
        place = self._place(region, self._rank, number)
        self._map[place + _HEAD.size : place + _HEAD.size + len(message)] = message
        # The number is written last: a rank that sees it may read the rest.
        _WORD.pack_into(self._map, place + _WORD.size, len(message))
        _WORD.pack_into(self._map, place, number)
        return [self._hear(what, region, number, rank, may_differ) for rank in ranks]

    def _hear(self, what: str, region: int, number: int, rank: int, may_differ: bool) -> bytes | None:
        place, pause = self._place(region, rank, number), _Pause()
        while _HEAD.unpack_from(self._map, place)[0] != number:
            # The rank writes its last message before it reports the end, so look again.
            if self._ended_by(rank) > self._ended and _HEAD.unpack_from(self._map, place)[0] != number:
                left = f"rank {self._rank} waits in {what}, rank {rank} has ended the program"
                if self.ranks_leave:
                    raise AskedError(left)
                self.fail(left)
            if pause.is_over():
                self.fail(f"rank {self._rank} waits in {what} for rank {rank}")
        length = _HEAD.unpack_from(self._map, place)[1]
        its, content = pickle.loads(self._map[place + _HEAD.size : place + _HEAD.size + length])
        if its != what:
            if may_differ:
                return None
            if its == _QUESTION:
                raise AskedError(f"rank {self._rank} is in {what}, rank {rank} asks: {content.decode()}")
            self.fail(f"rank {self._rank} is in {what}, rank {rank} in {its}")
        return content

    def _ended_by(self, rank: int) -> int:
        return _WORD.unpack_from(self._map, rank * _WORD.size)[0]

    def _place(self, region: int, rank: int, number: int) -> int:
        # Two alternating slots suffice: a rank writes message n + 2 after it has read message n + 1 of all ranks, which
        # they wrote after they had read message n.
        return self._size * _WORD.size + ((region * self._size + rank) * 2 + number % 2) * _SLOT


class _Started:
    """`Work` of an exchange. The work fails if the operand was written before `wait`."""

    def __init__(self, exchange: Exchange, what: str, out: Any, operand: Any, result: Any) -> None:
        self._exchange, self._what, self._out, self._result = exchange, what, out, result
        self._operand = operand
        self._sent = np.array(get_adapter().numpy(result if operand is None else operand))

    def wait(self) -> None:
        if self._result is None:
            return
        if self._operand is not None and not np.array_equal(
            get_adapter().numpy(self._operand), self._sent, equal_nan=self._sent.dtype.kind == "f"
        ):
            self._exchange.fail(f"the operand of {self._what} was written to before it was waited for")
        get_platform().write(self._out, self._result)
        self._result = self._operand = None


class _Pause:
    """A wait loop that first yields the processor, and then sleeps for increasing times."""

    def __init__(self) -> None:
        self._asked, self._deadline = 0, 0.0

    def is_over(self) -> bool:
        """Return whether `patience` has run out."""
        self._asked += 1
        if self._asked < 20:
            os.sched_yield()
            return False
        if not self._deadline:
            self._deadline = time.monotonic() + patience()
        time.sleep(min(2e-5 * (self._asked - 19), 1e-3))
        return time.monotonic() > self._deadline
