"""Start one process per rank on this machine, as torchrun and msrun do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from hyper_parallel.testing.pool import free_port


def under_launcher() -> bool:
    """Return whether this process is one of several that torchrun, msrun or `launch` started."""
    return "RANK" in os.environ or "MS_ROLE" in os.environ


def _shares(processes: int) -> list[set[int]]:
    """Cores for each rank: their equal parts, or one each in turn when there are fewer cores than ranks."""
    if not hasattr(os, "sched_getaffinity"):
        return [set() for _ in range(processes)]
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // processes)
    return [{cores[(rank * each + i) % len(cores)] for i in range(each)} for rank in range(processes)]


def launch(processes: int) -> int:
    """Run this very command once per rank; return 0, or the exit status of the rank that failed first.

    Ranks stay on cores of their own. MindSpore hands every operation from thread to thread. That costs twice as much
    when the threads share cores with other ranks.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the ranks end as well
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, cores in enumerate(_shares(processes)):
            # GLOG_v: of MindSpore's messages, errors only.
            defaults = {"OMP_NUM_THREADS": str(max(1, len(cores))), "GLOG_v": "3"}
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], env={**defaults, **os.environ, **shared, **own}))
            if cores:
                os.sched_setaffinity(ranks[-1].pid, cores)
        return _wait(ranks)
    finally:
        for process in ranks:
            process.terminate()
        for process in ranks:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended well, or one has failed."""
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                print(f"rank {rank} failed with exit status {code}", file=sys.stderr)
                return code if code > 0 else 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)
