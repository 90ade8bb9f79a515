"""The test pool itself: results, errors, hangs, recovery. Without a framework, so that workers start quickly."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hyper_parallel.platform import timeout
from hyper_parallel.testing import pool, worker
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.pool import JobError, WorkerPool
from hyper_parallel.testing.worker import Failure
from tests.support import pool_jobs

SIZE = 2


@pytest.fixture(scope="module")
def bare_pool() -> Iterator[WorkerPool]:
    """A pool of two ranks without a process group."""
    with WorkerPool(None, SIZE) as pool:
        yield pool


def is_alive(pid: int) -> bool:
    """Return whether there is such a process."""
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_results_come_in_rank_order_from_the_ranks_that_take_part(bare_pool: WorkerPool) -> None:
    """A job goes to all ranks; the results are those of the first ``world_size``."""
    both = bare_pool.run(2, "tests.support.pool_jobs:describe", "x", 1)
    assert both == [(0, 2, "0", "2", ("x", 1)), (1, 2, "1", "2", ("x", 1))]
    assert bare_pool.run(1, pool_jobs.describe) == [(0, 1, "0", "2", ())]


@on_ranks(0, 3)
def test_world_size_out_of_range(bare_pool: WorkerPool, world_size: int) -> None:
    """More ranks than the pool has are refused."""
    with pytest.raises(ValueError, match="between 1 and 2"):
        bare_pool.run(world_size, pool_jobs.describe)


def test_a_failure_on_all_ranks_keeps_the_workers(bare_pool: WorkerPool) -> None:
    """The tracebacks of all ranks arrive; ranks that failed in step can go on."""
    bare_pool.run(2, pool_jobs.describe)
    starts = bare_pool.starts
    with pytest.raises(JobError) as caught:
        bare_pool.run(2, pool_jobs.fail_on, (0, 1))
    assert sorted(caught.value.failures) == [0, 1]
    message = str(caught.value)
    assert "ValueError: failed on purpose" in message
    assert "in fail_on" in message
    assert "about to fail on rank 0" in message
    assert "about to fail on rank 1" in message
    assert len(bare_pool.run(2, pool_jobs.describe)) == 2
    assert bare_pool.starts == starts


def test_a_failure_on_one_rank_replaces_the_workers(bare_pool: WorkerPool) -> None:
    """The message names only the rank that failed, and no old worker is left over."""
    bare_pool.run(2, pool_jobs.describe)
    starts, pids = bare_pool.starts, [worker.process.pid for worker in bare_pool._workers]
    with pytest.raises(JobError) as caught:
        bare_pool.run(2, pool_jobs.fail_on, (1,))
    assert list(caught.value.failures) == [1]
    assert not any(is_alive(pid) for pid in pids)
    assert len(bare_pool.run(2, pool_jobs.describe)) == 2
    assert bare_pool.starts == starts + 1


def test_a_hang_ends_at_the_timeout_and_shows_where(bare_pool: WorkerPool) -> None:
    """The stack of the rank that hangs is part of the message; the next job runs."""
    with pytest.raises(JobError) as caught:
        bare_pool.run(2, pool_jobs.sleep_on, 1, 3600.0, timeout=0.5)
    assert list(caught.value.failures) == [1]
    assert "no answer after" in str(caught.value)
    assert "in sleep_on" in str(caught.value)
    assert len(bare_pool.run(2, pool_jobs.describe)) == 2


def test_a_dead_worker_is_reported_with_its_exit_code(bare_pool: WorkerPool) -> None:
    """A crash is an error of that rank; the next job runs."""
    with pytest.raises(JobError, match="exit code 7") as caught:
        bare_pool.run(2, pool_jobs.die_on, 0)
    assert list(caught.value.failures) == [0]
    assert len(bare_pool.run(2, pool_jobs.describe)) == 2


def test_what_cannot_be_sent_is_an_error_and_no_hang(bare_pool: WorkerPool) -> None:
    """Neither a result nor a job name that is wrong stops the pool."""
    with pytest.raises(JobError, match=r"(?i)pickle"):
        bare_pool.run(2, pool_jobs.unpicklable)
    with pytest.raises(JobError, match="no_such_job"):
        bare_pool.run(2, "tests.support.pool_jobs:no_such_job")
    assert len(bare_pool.run(2, pool_jobs.describe)) == 2


def test_limits_are_longer_on_a_busy_machine(bare_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits grow even while a rank works: the job ends, although its time was up."""
    bare_pool.run(2, pool_jobs.describe)
    at_first = iter([1])
    monkeypatch.setattr(os, "getloadavg", lambda: (2 * (os.cpu_count() or 1) * next(at_first, 10_000), 0, 0))
    assert timeout.slowness() == 1 and timeout.slowness() == timeout.SLOWEST
    monkeypatch.setattr(timeout, "SLOWEST", 10_000)
    at_first = iter([1])
    assert bare_pool.run(2, pool_jobs.sleep_on, 1, 0.3, timeout=0.1) == [None, None]
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0, 0))
    assert timeout.slowness() == 1
    monkeypatch.delattr(os, "getloadavg")
    assert timeout.slowness() == 1


def test_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free port is not taken, nor among those that the system gives to others, if there are further ones."""
    given_away = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert pool.FIRST_PORT <= pool.free_port() < given_away
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", pool.free_port()))
        monkeypatch.setattr(pool, "FIRST_PORT", given_away - 1)
        monkeypatch.setattr(pool.random.SystemRandom, "sample", lambda self, ports, count: [taken.getsockname()[1]])
        assert pool.free_port() >= given_away


def test_first() -> None:
    """Each worker calls it once, before its first job; where it fails, the workers have not started."""
    with WorkerPool(None, SIZE, "tests.support.pool_jobs:count") as pool:
        assert pool.run(2, pool_jobs.count) == [2, 2]
    failed = pytest.raises(JobError, match=r"starting the workers failed on 2 rank[\s\S]*no_such_job")
    with WorkerPool(None, SIZE, "tests.support.pool_jobs:no_such_job") as pool, failed:
        pool.run(2, pool_jobs.count)


def test_workers_that_cannot_start_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is given to every test, without the cost of finding it out again."""
    tries = []

    def start_and_fail() -> dict[int, Failure]:
        tries.append(None)
        return {1: Failure("died", "no such library")}

    with WorkerPool(None, SIZE) as pool:
        monkeypatch.setattr(pool, "_start_once", start_and_fail)
        for _ in range(2):
            with pytest.raises(JobError, match="starting the workers failed on 1 rank") as caught:
                pool.run(2, pool_jobs.describe)
            assert "no such library" in str(caught.value)
    assert len(tries) == 1


def test_close_leaves_no_process() -> None:
    """Closing waits for the workers, and may be done twice."""
    pool = WorkerPool(None, SIZE)
    pool.run(2, pool_jobs.describe)
    pids = [worker.process.pid for worker in pool._workers]
    pool.close()
    pool.close()
    assert not any(is_alive(pid) for pid in pids)


def test_ranks_of_mindspore_stay_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on the next of the cores that the process may use, if one thread is asked for."""
    kept: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 2}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: kept.append(cores), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for rank in range(3):
        worker.stay_on_one_core("mindspore", rank)
    worker.stay_on_one_core("torch-cpu", 0)
    worker.stay_on_one_core(None, 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    worker.stay_on_one_core("mindspore", 0)
    assert kept == [{2}, {5}, {2}]
