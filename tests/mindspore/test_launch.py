"""Process groups from the launchers' environments, and collectives of every dtype."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore import launch
from hyper_parallel.platform.mindspore.launch import GroupVerbs
from hyper_parallel.testing.spmd import on_mesh

SCRIPT = """
import os
import numpy as np
from mindspore import Tensor
from mindspore.mint import distributed
from hyper_parallel import DTensor, Partial, Shard, init_device_mesh

world = int(os.environ.get("MS_WORKER_NUM") or os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
rank = mesh.platform.rank()
x = DTensor.from_local(Tensor(np.full(2, rank, np.float32)), mesh, [Shard(0), Partial()])
assert x.full_tensor().asnumpy().tolist() == [1, 1, 5, 5][:world]
t = Tensor(np.ones(2, np.float32))
distributed.all_reduce(t, group=mesh.get_group("tp"))  # as users call it
assert t.asnumpy().tolist() == [2, 2]
assert distributed.get_rank(group=mesh.get_group("dp")) == mesh.get_local_rank("dp")
mesh.platform.barrier(mesh.platform.world().group)
mesh.platform.destroy_process_group()
try:
    mesh.platform.init_process_group()
except RuntimeError as error:
    assert "start new processes" in str(error)
    print(f"rank {rank} passed")
"""


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PYTHONPATH": root, "PATH": path, "HYPER_PARALLEL_PLATFORM": "mindspore", **more}


def test_torchrun_variables(tmp_path: Path) -> None:
    run_ranks(tmp_path, SCRIPT, 4)


LATE = """
import os
import time
from hyper_parallel import get_platform

rank = int(os.environ["RANK"])
time.sleep(rank)
get_platform().init_process_group()
print(f"rank {rank} passed", flush=True)
"""


def test_rank_0_may_leave_first(tmp_path: Path) -> None:
    """It serves the store at which the ranks meet, and ends as soon as it has met the others."""
    assert "Error" not in run_ranks(tmp_path, LATE, 2)


LEAVING = """
import os
import time
from hyper_parallel import get_platform
from hyper_parallel.platform.mindspore import launch

rank, platform = int(os.environ["RANK"]), get_platform()
platform.init_process_group()
if rank == 0:
    time.sleep(1)
started = time.monotonic()
platform.destroy_process_group()
seconds = time.monotonic() - started
assert seconds < launch._LEAVING and (rank == 0 or seconds > 0.5), seconds
print(f"rank {rank} passed", flush=True)
"""


def test_connections_are_kept_until_all_ranks_leave(tmp_path: Path) -> None:
    """A rank that has what it needs of the last collective must not take it from one that still sends."""
    run_ranks(tmp_path, LEAVING, 3)


def test_a_lost_rank_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    class Store:
        def add(self, key: str, amount: int) -> int:
            counts.append(amount)
            if len(counts) > 3:
                raise RuntimeError("the store is gone")
            return 1

    monkeypatch.setattr(launch, "_LEAVING", 0.02)
    launch._wait_for_leaving(launch.World(0, 2, "group", Store()))
    assert counts[0] == 1 and not any(counts[1:])
    launch._wait_for_leaving(launch.World(0, 2, "group", Store()))  # the store does not answer


def run_ranks(folder: Path, text: str, size: int) -> str:
    """Run a script that prints "rank r passed" on each rank, under torchrun's variables; return all output."""
    script, port = folder / "script.py", free_port()
    script.write_text(text)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for rank, output in enumerate(outputs):
        assert f"rank {rank} passed" in output, output
    return "".join(outputs)


def test_msrun(tmp_path: Path) -> None:
    msrun = shutil.which("msrun", path=environment()["PATH"])
    assert msrun is not None
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(SCRIPT)
    options = f"--worker_num=2 --local_worker_num=2 --master_addr=127.0.0.1 --master_port={free_port()} --join=True"
    subprocess.run([msrun, *options.split(), f"--log_dir={logs}", str(script)], env=environment(), timeout=300)
    output = "".join(file.read_text() for file in logs.glob("worker_*.log"))
    assert all(f"rank {rank} passed" in output for rank in range(2)), output


def test_incomplete_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "MS_ROLE", "MS_WORKER_NUM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="RANK, MASTER_ADDR, MASTER_PORT is not set"):
        GroupVerbs().init_process_group()


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MS_ROLE", "MS_WORKER_NUM"):
        monkeypatch.delenv(name, raising=False)
    groups = GroupVerbs()
    assert groups.world() is None
    with pytest.raises(RuntimeError, match="not initialised"):
        groups.rank()
    groups.init_process_group()
    world = groups.world()
    assert (groups.rank(), groups.world_size()) == (0, 1) and groups.world() is world
    assert groups.new_group([[0]]) == groups.new_group([[0]])
    groups.destroy_process_group()
    assert groups.world() is None


DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool_"]


@on_mesh(2)
def every_dtype(mesh: Any) -> list[str]:
    """What the platform says it supports works; views of larger storages too."""
    platform, group, rank = mesh.platform, mesh.platform_group(0), mesh.get_local_rank()
    problems = []
    for name in DTYPES:
        dtype = getattr(ms, name)
        values = Tensor(np.array([rank, 1, 0, 1], np.float32)).astype(dtype)
        for call, op in (("all_reduce", "sum"), ("all_reduce", "max"), ("all_gather", ""), ("broadcast", "")):
            x = mint.narrow(ops.concat([values]), 0, 0, 2)  # may be written to
            if not platform.supports(call, op, x):
                continue
            if call == "all_reduce":
                got = platform.all_reduce(x, op, group)
                wanted = [1, 2] if op == "sum" else [1, 1]
            elif call == "all_gather":
                got, wanted = platform.all_gather(x, group, 2), [0, 1, 1, 1]
            else:
                got, wanted = platform.broadcast(x, 1, group), [1, 1]
            if got.dtype != dtype or got.astype(ms.float32).asnumpy().tolist() != wanted:
                problems.append(f"{call} {op} {name}: {got}")
    parts = [Tensor(np.array([i, i + 1], np.float32)) for i in (3, 5)] if rank == 1 else None
    if platform.scatter(ops.zeros(2, ms.float32), parts, 1, group).asnumpy().tolist() != [[3, 4], [5, 6]][rank]:
        problems.append("scatter")
    if platform.all_gather_object("x" * rank, group, 2) != ["", "x"]:
        problems.append("all_gather_object")
    return problems


def test_collectives(pool: Any) -> None:
    assert pool.run(2, every_dtype) == [[], []]
