"""Process groups from the launchers' environments, and collectives of every dtype."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.processes import launch, stores
from hyper_parallel.platform.mindspore.processes.launch import GroupVerbs
from hyper_parallel.testing.pool import WorkerPool, free_port
from hyper_parallel.testing.spmd import on_mesh
from tests.support.listening import listening_at
from tests.support.programs import PATIENCE, ROOT, run_ranks

SCRIPT = """
import os
import time
import numpy as np
from mindspore import Tensor
from mindspore.mint import distributed
from hyper_parallel import DTensor, Partial, Shard, init_device_mesh

world = int(os.environ.get("MS_WORKER_NUM") or os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
platform, rank = mesh.platform, mesh.platform.rank()
x = DTensor.from_local(Tensor(np.full(2, rank, np.float32)), mesh, [Shard(0), Partial()])
assert x.full_tensor().asnumpy().tolist() == [1, 1, 5, 5][:world]
t = Tensor(np.ones(2, np.float32))
distributed.all_reduce(t, group=mesh.get_group("tp"))  # as users call it
assert t.asnumpy().tolist() == [2, 2]
assert distributed.get_rank(group=mesh.get_group("dp")) == mesh.get_local_rank("dp")
found = platform.find_missing_ranks(platform.world().group, range(world), f"on {rank}")
assert found == ({r: f"on {r}" for r in range(world)}, ()), found
platform.world().failed = False  # it was none
platform.barrier(platform.world().group)
if rank == 0:
    time.sleep(1.5)  # longer than a rank waits that gets no answer
came = time.monotonic()  # one clock for all processes
close = distributed.destroy_process_group

def closing():
    print(f"came|{came}|went|{time.monotonic()}|")
    close()

distributed.destroy_process_group = closing
platform.destroy_process_group()
try:
    platform.init_process_group()
except RuntimeError as error:
    assert "start new processes" in str(error)
    print(f"rank {rank} passed")
"""


def test_torchrun_variables() -> None:
    check_leaving(run_script(SCRIPT, 4), 4)


def check_leaving(output: str, size: int) -> None:
    """A rank that has its result of the last collective must not end it for a rank that still sends."""
    times = re.findall(r"came\|(.*?)\|went\|(.*?)\|", output)
    assert len(times) == size, output
    came, went = ([float(time[i]) for time in times] for i in (0, 1))
    assert max(came) <= min(went), "a rank has closed its connections before all ranks left"


ENDING = """
import os
import time
import numpy as np
from mindspore import Tensor
from mindspore.mint import distributed
from hyper_parallel import get_platform

rank, platform = int(os.environ["RANK"]), get_platform()
if rank == 1:
    time.sleep(0.5)
platform.init_process_group()
distributed.broadcast(Tensor(np.ones(1 << 22, np.float32)), 0, platform.world().group)
print(f"rank {rank} passed", flush=True)
"""


def test_a_program_may_end_right_after_a_collective() -> None:
    """The rank that receives acknowledges, which takes a while, and the one that serves the store may be the first."""
    assert "Error" not in run_script(ENDING, 2, MS_CPU_COMM_OP_TIMEOUT="60")


class Store:
    """A store with a script of replies for ranks that leave: it gives ``answers``, then it is gone."""

    def __init__(self, *answers: int) -> None:
        self.answers, self.amounts = list(answers), list[int]()

    def add(self, key: str, amount: int) -> int:
        self.amounts.append(amount)
        if not self.answers:
            raise RuntimeError("the store is gone")
        return self.answers.pop(0)


def test_waiting_for_all_that_leave() -> None:
    """Each rank counts itself once. Those are not waited for that are lost, nor where the store is."""
    all_came = Store(1, 1, 2, 3)
    stores.wait_for_leaving(all_came, 3, math.inf)
    assert all_came.amounts == [1, 0, 0, 0]
    gone = Store(1, 1)
    stores.wait_for_leaving(gone, 3, math.inf)
    assert gone.amounts == [1, 0, 0]
    lost = Store(*[1] * 1000)
    stores.wait_for_leaving(lost, 3, 0.02)
    assert lost.answers


def test_waiting_for_the_ends_of_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections tell rank 0. A rank may go on after it has left, or be lost: it is not waited for without end."""
    ports: list[int] = []

    class Ports:
        def add(self, key: str, amount: int) -> int:
            ports.append(amount)
            return sum(ports)

    kept: list[socket.socket] = []
    monkeypatch.setattr(stores, "_connections", kept)
    stores.connect_until_the_end(Ports(), "127.0.0.1")
    assert not kept
    listener = stores.listen_for_ends(Ports(), "127.0.0.1", 3)
    assert listener is not None
    with listener:
        for _ in range(2):
            stores.connect_until_the_end(Ports(), "127.0.0.1")
        begun = time.monotonic()
        stores.wait_for_ends(listener, 3, 0.02)  # one is lost
        for _ in range(2):
            stores.connect_until_the_end(Ports(), "127.0.0.1")
        stores.wait_for_ends(listener, 2, 0.02)  # they go on
        assert time.monotonic() - begun >= 0.04
        for _ in range(2):
            stores.connect_until_the_end(Ports(), "127.0.0.1")
        while kept:
            kept.pop().close()
        stores.wait_for_ends(listener, 2, PATIENCE)
    stores.connect_until_the_end(Ports(), "127.0.0.1")  # rank 0 has ended
    assert not kept and stores.listen_for_ends(Ports(), "192.0.2.1", 2) is None


def test_rank_0_ends_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the program has destroyed its groups before. Other ranks, and ranks of msrun, wait for none."""
    waits: list[Any] = []
    monkeypatch.setattr(launch, "wait_for_leaving", lambda *given: waits.append("leave"))
    monkeypatch.setattr(launch, "wait_for_ends", lambda *given: waits.append(given))
    monkeypatch.delenv("MS_SCHED_HOST", raising=False)
    monkeypatch.delattr(sys, "last_value", raising=False)
    listener: Any = "listener"
    first = launch.World(0, 3, "group", "store", listener=listener)
    launch.World(1, 3, "group", "store")._end()
    assert waits == ["leave"]
    first.leave()
    first._end()
    assert waits[1:] == ["leave", (listener, 2, launch._END)]


def test_ranks_that_do_not_come() -> None:
    """A missing rank is an error, not an endless wait. It is no error that rank 0 has met all and has gone with its
    store."""
    stores.meet(Store(1, 2), 2, math.inf)
    stores.meet(Store(1), 2, math.inf)
    with pytest.raises(RuntimeError, match=r"1 of 2 ranks arrived within 0\.02 s"):
        stores.meet(Store(*[1] * 1000), 2, 0.02)


def test_who_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks for as long as collectives wait, less after a failure, none where an exception ends the program."""
    waits: list[Any] = []
    monkeypatch.setattr(launch, "wait_for_leaving", lambda store, size, seconds: waits.append((store, size, seconds)))
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.delenv("MS_SCHED_HOST", raising=False)
    monkeypatch.setenv("MS_CPU_COMM_OP_TIMEOUT", "-1")
    monkeypatch.delattr(sys, "last_value", raising=False)
    world = launch.World(0, 2, "group", "store")
    world.leave()
    monkeypatch.setenv("MS_CPU_COMM_OP_TIMEOUT", "7")
    world.left = False
    world._end()
    monkeypatch.delenv("MS_CPU_COMM_OP_TIMEOUT")
    world.leave()
    world.failed = True
    world.leave()
    assert waits == [("store", 2, math.inf), ("store", 2, 7.0), ("store", 2, 30.0), ("store", 2, launch._AFTER_FAILURE)]
    world.process += 1
    world._end()
    world.process -= 1
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    world._end()
    assert len(waits) == 4
    # The program has initialised MindSpore itself, under msrun or with a store of its own.
    launch.World(0, 2, "group").leave()
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    monkeypatch.setattr(launch, "store_of_msrun", lambda rank, size, group, timeout: (rank, size, group))
    launch.World(0, 2, "group").leave()
    assert waits[4:] == [launch._MOMENT, ((0, 2, "group"), 2, 30.0)]


def test_ports_that_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of msrun's ranks is served on the first port that is still free when the store tries it."""
    asked: list[int] = []

    def make(address: str, port: int, size: int, serve: bool, timeout: timedelta, wait: bool) -> str:
        asked.append(port)
        if len(asked) < 3 or size == 0:
            raise RuntimeError("Failed to init the tcp server")
        return "store"

    monkeypatch.setattr(stores, "make_store", make)
    assert stores._serve("127.0.0.1", 2, timedelta(seconds=1)) == (asked[2], "store")
    with pytest.raises(RuntimeError, match="Failed to init"):
        stores._serve("127.0.0.1", 0, timedelta(seconds=1))
    assert len(asked) == 3 + stores._PORTS


def test_how_long_collectives_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore's own variable comes first."""
    monkeypatch.setenv("MS_CPU_COMM_OP_TIMEOUT", "")  # so that it is put back, whatever it was
    monkeypatch.delenv("MS_CPU_COMM_OP_TIMEOUT")
    assert stores.seconds_in_collectives() == 30
    stores.set_seconds_in_collectives(2.5)
    stores.set_seconds_in_collectives(60)
    assert stores.seconds_in_collectives() == 3 and os.environ["MS_CPU_COMM_OP_TIMEOUT"] == "3"


def run_script(text: str, size: int, **variables: str) -> str:
    """Run a program that prints "rank r passed" on each rank, under torchrun's variables; return all output."""
    ended = run_ranks(["-c", text], size, **variables)
    assert all(rank.status == 0 and f"rank {i} passed" in rank.out for i, rank in enumerate(ended)), ended
    return "".join(rank.out + rank.err for rank in ended)


def test_msrun(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    msrun = shutil.which("msrun", path=path)
    assert msrun is not None
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(SCRIPT)
    options = f"--worker_num=2 --local_worker_num=2 --master_addr=127.0.0.1 --master_port={free_port()} --join=True"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HYPER_PARALLEL_PLATFORM": "mindspore"}
    command = [msrun, *options.split(), f"--log_dir={logs}", script]
    subprocess.run(command, env=environment, timeout=PATIENCE, check=True)
    output = "".join(file.read_text() for file in logs.glob("worker_*.log"))
    assert all(f"rank {rank} passed" in output for rank in range(2)), output
    check_leaving(output, 2)


@pytest.mark.nightly
def test_a_script_that_ends_at_once(tmp_path: Path) -> None:
    """A rank that ends by `os._exit` takes no leave of msrun's scheduler. The path has no Python with MindSpore."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "\nimport os\nos._exit(0)\n")
    main = "import sys; from hyper_parallel.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", main, "launch", "-n", "2", "--platform", "mindspore", str(script)]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": os.defpath},
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended
    output = "".join(file.read_text() for file in tmp_path.glob("worker_*.log"))
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
    """Every dtype that the platform claims to support works; views of larger storages too."""
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


def test_workers_listen_on_loopback() -> None:
    """No other machine can reach the workers of `hyper-parallel test`, which exchange pickles."""
    with WorkerPool("mindspore", size=2) as pool:
        found = [address for rank in pool.run(2, listening_at) for address in rank]
    assert found and {*found} == {"0100007F"}, found


@pytest.mark.parametrize("wrong", [{"RANK": "x"}, {"RANK": "-1"}, {"RANK": "2"}, {"MASTER_PORT": "x"}])
def test_numbers_that_no_launcher_sets(wrong: dict[str, str]) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ValueError, match=r"must be an integer|ranks are 0 to 1"):
        launch._meet("mccl", torchrun | wrong, timedelta(seconds=1))
