"""``hyper-parallel launch``: start a script on several ranks, by torchrun or msrun."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from hyper_parallel.cli import msrun_worker
from hyper_parallel.cli.output import UsageError
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.rank_messages import VARIABLE, gathered
from hyper_parallel.platform.registry import ENVIRONMENT_VARIABLE
from hyper_parallel.platform.terminal import printable, printable_lines
from hyper_parallel.testing.pool import free_port

__all__ = ["PORT", "command_of", "run"]

#: Port of the first of several nodes, if none was chosen.
PORT = 29500
#: Seconds that msrun may take to end after all ranks have ended successfully.
SECONDS_TO_END = 5.0


def command_of(
    framework: str,
    processes: int,
    script: list[str],
    nodes: int = 1,
    node_rank: int = 0,
    address: str = "127.0.0.1",
    port: int = PORT,
) -> list[str]:
    """Return the command that starts ``processes`` ranks of a script on this node.

    Args:
        framework: ``"torch"`` or ``"mindspore"``.
        processes: ranks on each node.
        script: the script and its arguments.
        nodes: number of nodes; the command must run on each.
        node_rank: number of this node, from 0.
        address, port: address and port of the first node.

    Example:
        >>> command_of("torch", 4, ["train.py"])[1:]
        ['-m', 'torch.distributed.run', '--nproc-per-node', '4', '--standalone', '--', 'train.py']
    """
    # Arguments after ``--`` belong to the script: torchrun would take the script's --run for its own --run-path.
    script = ["--", *script]
    if framework == "torch":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        if nodes == 1:
            return [*command, "--standalone", *script]
        where = ["--nnodes", str(nodes), "--node-rank", str(node_rank), "--master-addr", address]
        return [*command, *where, "--master-port", str(port), *script]
    beside = os.path.join(os.path.dirname(sys.executable), "msrun")
    msrun = beside if os.path.exists(beside) else shutil.which("msrun") or "msrun"
    command = [msrun, "--worker_num", str(processes * nodes), "--local_worker_num", str(processes)]
    command += ["--master_addr", address, "--master_port", str(port), "--node_rank", str(node_rank), "--join", "True"]
    return [*command, *script]


def run(arguments: argparse.Namespace) -> int:
    """Print the command, run it, and return its exit status."""
    if not arguments.script:
        raise UsageError("launch needs a script: hyper-parallel launch -n 4 train.py")
    _check_counts(arguments)
    script = arguments.script[1:] if arguments.script[0] == "--" else arguments.script
    if not os.path.exists(script[0]):
        raise UsageError(f"the script {script[0]!r} does not exist")
    environment = dict(os.environ)
    platform = get_platform(arguments.platform)
    if arguments.platform:
        environment[ENVIRONMENT_VARIABLE] = platform.name
    framework = "mindspore" if platform.name == "mindspore" else "torch"
    if find_spec(framework) is None:
        raise UsageError(f"{framework} is not installed: install it, or choose another --platform")
    where = (arguments.nodes, arguments.node_rank, arguments.address, _port_of(arguments))
    command = command_of(framework, arguments.processes, script, *where)
    if arguments.json:
        print(json.dumps({"command": command, "platform": platform.name}), flush=True)
    else:
        chosen = f"{ENVIRONMENT_VARIABLE}={platform.name} " if arguments.platform else ""
        print(printable(f"{chosen}{shlex.join(command)}"), file=sys.stderr, flush=True)
    if arguments.print_only:
        return 0
    if framework == "mindspore":
        # msrun starts a script with the `python` on the path, which may lack MindSpore.
        environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
    with tempfile.TemporaryDirectory() as folder:
        environment[VARIABLE] = folder
        try:
            if framework == "mindspore" and arguments.nodes == 1:
                command = command_of(framework, arguments.processes, [msrun_worker.__file__, folder, *script], *where)
                return _run_msrun(command, folder, arguments.processes, environment)
            return subprocess.run(command, env=environment, check=False).returncode
        finally:
            text = gathered(folder, arguments.node_rank * arguments.processes)
            if text:
                print(printable_lines(text), file=sys.stderr, flush=True)


def _run_msrun(command: list[str], folder: str, processes: int, environment: dict[str, str]) -> int:
    """Run a job of msrun on one node, and return its exit status: 0 if all ranks ended with 0.

    Args:
        command: command of msrun, which runs the script by `cli.msrun_worker`.
        folder: folder in which `cli.msrun_worker` writes the status of each rank.
        processes: number of ranks.
        environment: environment variables of the job.
    """
    job, deadline = subprocess.Popen(command, env=environment), math.inf
    try:
        while job.poll() is None and time.monotonic() < deadline:
            if deadline == math.inf and _ended_well(folder, processes):
                deadline = time.monotonic() + SECONDS_TO_END
            time.sleep(0.1)
    except KeyboardInterrupt:  # msrun has it too, and ends the ranks
        job.wait()
        raise
    if job.poll() is None:
        _kill_tree(job.pid)
    status = job.wait()
    return 0 if _ended_well(folder, processes) else status


def _ended_well(folder: str, processes: int) -> bool:
    """Return whether all ranks have ended with 0."""
    ended = [path for path in Path(folder).iterdir() if not path.suffix]
    return len(ended) == processes and all(path.read_text() == "0" for path in ended)


def _kill_tree(pid: int) -> None:
    """Kill a process and its children, here msrun and MindSpore's scheduler."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            os.kill(each, signal.SIGKILL)


def _check_counts(arguments: argparse.Namespace) -> None:
    """Raise UsageError for an impossible number of processes or nodes, node rank or port."""
    if arguments.processes < 1 or arguments.nodes < 1:
        raise UsageError(f"-n {arguments.processes} --nodes {arguments.nodes}: both numbers must be at least 1")
    if not 0 <= arguments.node_rank < arguments.nodes:
        last = arguments.nodes - 1
        raise UsageError(f"--node-rank {arguments.node_rank}: with {arguments.nodes} node(s) it must be 0 to {last}")
    if arguments.port is not None and not 1 <= arguments.port <= 65535:
        raise UsageError(f"--port {arguments.port}: the port must be between 1 and 65535")


def _port_of(arguments: argparse.Namespace) -> int:
    """Return the port where the ranks meet. On one node a free port is used, because msrun waits for minutes if its
    port is taken."""
    if arguments.port is not None:
        return int(arguments.port)
    if arguments.nodes > 1:
        return PORT
    return free_port()
