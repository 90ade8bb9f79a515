"""A pool of worker processes, one for each rank, that stays up while pytest runs.

    results = pool.run(2, "hyper_parallel.testing.conformance.jobs.linear:column", 8, True)

Starting four ranks takes seconds, running a job takes milliseconds. Every job goes to all ranks of the pool, because
all ranks must take part in creating a process group. `hyper_parallel.testing.spmd` gives the job a mesh over the first
``world_size`` ranks.

A failing job raises `JobError` in the parent, with the tracebacks of all ranks that failed. If the ranks did not all
fail in the same place, some may still wait in a collective. In this case, and when a job exceeds its time limit, the
workers are killed, and the next job gets new workers. So a hang costs one test its time-out and nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from hyper_parallel.platform.timeout import slowness
from hyper_parallel.testing.worker import Failure, Settings, serve

#: Number of ranks in the pool, and so the largest world size of a test.
SIZE = 4
#: Limits in seconds, which only end hanging ranks. `slowness` extends them on a busy machine.
START_TIMEOUT = 180.0
JOB_TIMEOUT = 120.0
#: Seconds that the other ranks may continue after one rank has failed: they may be waiting for it forever.
GRACE = 5.0
#: Seconds to exit after that: enough for ranks that do not hang to save their coverage.
GRACE_OF_HUNG = 4.0
#: Seconds to exit for all workers when the pool is closed.
GRACE_OF_ALL = 30.0
#: First port that is tried; common services use the lower ports.
FIRST_PORT = 10_000
#: Text that ends the job's part of a worker's stack; the frames below belong to `multiprocessing`.
STACK_ENDS = " in serve\n"
#: Number of last characters of a worker's output that an error message quotes.
OUTPUT_QUOTED = 4000


class JobError(Exception):
    """Raised for a job that failed on at least one rank.

    Attributes:
        job: name of the job.
        failures: the failure by rank, for the ranks that failed.
    """

    def __init__(self, job: str, failures: dict[int, Failure]) -> None:
        super().__init__(job, failures)
        self.job = job
        self.failures = failures

    def __str__(self) -> str:
        """Return a section for each distinct failure, with its ranks. Hangs come last, as consequences."""
        ranks_of: dict[str, list[int]] = {}
        for rank, failure in sorted(self.failures.items(), key=lambda item: (item[1].place == "hung", item[0])):
            ranks_of.setdefault(failure.text.strip(), []).append(rank)
        sections = [f"---- rank {', '.join(map(str, ranks))}\n{text}" for text, ranks in ranks_of.items()]
        return "\n".join([f"{self.job} failed on {len(self.failures)} rank(s)", *sections])


@dataclass
class Worker:
    """A worker process as the parent sees it: process, connection and log."""

    process: BaseProcess
    connection: Connection
    log: Path
    log_start: int = 0

    def output(self) -> str:
        """Return the worker's output to stdout and stderr since the current job started."""
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace").strip()
        return f"\nits output:\n{text[-OUTPUT_QUOTED:]}" if text else ""


class WorkerPool:
    """Worker processes in one process group of the backend ``platform``. With None, the workers have no framework and
    no group. The workers start with the first job. Each worker calls ``first``, a ``"package.module:function"``, before
    it joins the group.
    """

    def __init__(self, platform: str | None, size: int = SIZE, first: str | None = None) -> None:
        self.platform = platform
        self.size = size
        self.first = first
        #: Number of times that workers have been started.
        self.starts = 0
        self._workers: list[Worker] = []
        #: Error of a failed start. Later jobs raise it too, because another start would fail as slowly.
        self._cannot_start: JobError | None = None
        self._logs = tempfile.TemporaryDirectory(prefix="hyper-parallel-workers-")

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, world_size: int, job: str | Callable[..., Any], *args: Any, timeout: float = JOB_TIMEOUT) -> list:
        """Call ``job(*args)`` on every rank and return the results of ranks 0 to ``world_size - 1``.

        Args:
            world_size: number of ranks in `hyper_parallel.testing.spmd.device_mesh`, and of results.
            job: ``"package.module:function"``, or the function itself if a module holds it under its own name.
            args: picklable arguments, the same for every rank.
            timeout: seconds after which ranks that have not answered count as hung.

        Raises:
            JobError: if the job failed, hung or died on any rank.
        """
        __tracebackhide__ = True
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size must be between 1 and {self.size}, got {world_size}")
        name = job if isinstance(job, str) else f"{job.__module__}:{job.__qualname__}"
        task = ForkingPickler.dumps((name, world_size, args))
        if not self._workers:
            self._start()
        outcomes = self._exchange(task, timeout)
        failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
        if not failures:
            return [outcomes[rank] for rank in range(world_size)]
        if not _in_step(failures, world_size):
            self.close(grace=GRACE_OF_HUNG)
        raise JobError(name, failures)

    def close(self, grace: float = GRACE_OF_ALL) -> None:
        """Stop the workers and wait until they have exited. A later `run` starts new workers.

        Args:
            grace: seconds after which workers that are still running are killed, on an idle machine.
        """
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.connection.close()  # a worker that waits for a job exits then
        deadline = time.monotonic() + grace * slowness()
        for worker in workers:
            worker.process.join(max(0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.join()
            worker.process.close()

    def _start(self) -> None:
        """Start the workers. Try once more, on another port, if another program took the port."""
        if self._cannot_start is None:
            failures = self._start_once()
            if any(re.search(r"(?i)address already in use|EADDRINUSE", failure.text) for failure in failures.values()):
                failures = self._start_once()
            if failures:
                self._cannot_start = JobError("starting the workers", failures)
        if self._cannot_start is not None:
            raise self._cannot_start

    def _start_once(self) -> dict[int, Failure]:
        """Start the workers and return the failures by rank. After a failure no worker is left."""
        self.starts += 1
        context = prepared(self.platform)
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            log = Path(self._logs.name) / f"start-{self.starts}-rank-{rank}.log"
            settings = Settings(self.platform, rank, self.size, port, str(log), self.first)
            process = context.Process(target=serve, args=(settings, theirs), name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, log))
        outcomes = self._collect(START_TIMEOUT)
        failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
        if failures:
            self.close(grace=GRACE_OF_HUNG)
        return failures

    def _exchange(self, task: memoryview, timeout: float) -> dict[int, Any]:
        """Send a task to every worker and return the outcome of each rank."""
        for worker in self._workers:
            worker.log_start = worker.log.stat().st_size
            with suppress(OSError):  # the worker died since the last job, and `_collect` reports it
                worker.connection.send_bytes(task)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> dict[int, Any]:
        """Wait for one outcome of each rank: the result of the job, or a `Failure`."""
        started = since = time.monotonic()
        limit, failed = timeout, False
        outcomes: dict[int, Any] = {}
        pending: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while pending:
            ready = wait(list(pending), max(0, since + limit * slowness() - time.monotonic()))
            if not ready and time.monotonic() > since + limit * slowness():  # the machine may have become busier
                break
            for connection in ready:
                rank = pending.pop(connection)
                outcomes[rank] = self._receive(rank)
                if isinstance(outcomes[rank], Failure) and not failed:
                    since, limit, failed = time.monotonic(), min(limit, GRACE), True
        if pending:
            outcomes.update(self._hung(sorted(pending.values()), time.monotonic() - started))
        return outcomes

    def _receive(self, rank: int) -> Any:
        """Return the outcome that a worker sent, or a failure if it died."""
        worker = self._workers[rank]
        try:
            outcome = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(GRACE * slowness())
            code = worker.process.exitcode
            return Failure("died", f"the process ended with exit code {code}{worker.output()}")
        if isinstance(outcome, Failure):
            return Failure(outcome.place, outcome.text.rstrip() + worker.output())
        return outcome

    def _hung(self, ranks: list[int], seconds: float) -> dict[int, Failure]:
        """Return failures for ranks that did not answer, with the stacks where they hang."""
        for rank in ranks:
            if (pid := self._workers[rank].process.pid) is not None:
                os.kill(pid, signal.SIGUSR1)  # makes the worker write its stacks to its output
        deadline = time.monotonic() + GRACE * slowness()
        for rank in ranks:
            while STACK_ENDS not in self._workers[rank].output() and time.monotonic() < deadline:
                time.sleep(0.01)
        frames_of_worker = re.compile(r'^  File "[^"]*/testing/worker\.py", line .*', re.MULTILINE | re.DOTALL)
        return {
            rank: Failure(
                "hung", f"no answer after {seconds:.0f} s{frames_of_worker.sub('', self._workers[rank].output())}"
            )
            for rank in ranks
        }


def _in_step(failures: dict[int, Failure], world_size: int) -> bool:
    """Return whether exactly the participating ranks failed, all at the same line, so that none waits in a
    collective."""
    places = {failure.place for failure in failures.values()}
    return set(failures) == set(range(world_size)) and len(places) == 1 and not places & {"hung", "died"}


def prepared(platform: str | None) -> Any:
    """Return a context of `multiprocessing` whose processes are forked from a server that has imported the framework.

    The server does not import the library, whose import counts for the coverage of each worker. With None for
    ``platform`` it imports nothing.
    """
    context = multiprocessing.get_context("forkserver")
    if platform is not None:
        context.set_forkserver_preload(["numpy", platform.split("-")[0]])
    return context


def free_port() -> int:
    """Return a free port of this machine, outside the range that the system assigns to connections.

    Another program could get a port from that range before this program has imported its framework and listens.
    """
    try:
        given_away = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        given_away = 32768
    ports = range(FIRST_PORT, given_away)
    for port in random.SystemRandom().sample(ports, min(len(ports), 100)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
