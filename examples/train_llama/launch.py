"""Start one process per rank on this machine, as torchrun and msrun do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time


def under_launcher() -> bool:
    """Whether this process is one of several that torchrun, msrun or `launch` started."""
    return "RANK" in os.environ or "MS_ROLE" in os.environ


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(processes: int) -> int:
    """Run this very command once per rank; return 0, or the exit status of the rank that failed first."""
    shared = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        "GLOG_v": "3",  # MindSpore: errors only
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment = {**defaults, **os.environ, **shared, **own}
            command = [sys.executable, *sys.argv]
            ranks.append(subprocess.Popen(command, env=environment))
        while True:
            codes = [process.poll() for process in ranks]
            failed = [(rank, code) for rank, code in enumerate(codes) if code]
            if failed:
                rank, code = failed[0]
                print(f"rank {rank} failed with exit status {code}", file=sys.stderr)
                return code if code > 0 else 1
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.terminate()
        for process in ranks:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
