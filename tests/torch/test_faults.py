"""Ranks that die or hang in the middle of a step, time-outs, and leftovers when groups are made again.

Processes that are killed or sleep are started here, outside the pool.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from hyper_parallel import CollectiveError, DeviceMesh
from hyper_parallel.core.communication import collectives
from hyper_parallel.platform.fault_reports import leave_report
from hyper_parallel.platform.timeout import timeout_seconds
from hyper_parallel.platform.torch.processes import lost_ranks
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.support.programs import run_ranks

#: A place where processes meet: `together` returns when ``size`` of them have come to it, however long that takes. The
#: time-outs that are tested begin then, and do not count imports, or that a rank is late on a busy machine.
TOGETHER = """
import os, pathlib, sys, time

def together(place, size=int(os.environ["WORLD_SIZE"])):
    folder = pathlib.Path(sys.argv[1], place)
    folder.mkdir(exist_ok=True)
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < size:
        time.sleep(0.01)
"""
#: Seconds: the time-out of ranks that lose one which hangs, and of those that need none; and a bound for both.
TIMEOUT, LONG, SOON = 8, 1800, 600
PROGRAM = f"""
{TOGETHER}
import torch
import hyper_parallel as hp

platform, lost, how = hp.get_platform(), int(sys.argv[2]), sys.argv[3]
together("imported")
platform.init_process_group(timeout={TIMEOUT} if how == "hangs" else {LONG})
rank, others = platform.rank(), platform.world_size() - 1
if how == "hangs":
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
else:
    mesh = hp.init_device_mesh("cpu", mesh_dim_names=("tp",))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
hp.parallelize_module(model, mesh, {{"0": hp.ColwiseParallel(), "2": hp.RowwiseParallel()}})
x = torch.ones(2, 8, requires_grad=True)
together("the first step")
model(x).sum().backward()

def be_lost(gradient):  # before the all-reduce of the input's gradient
    if rank == lost:
        time.sleep(10 ** 6 if how == "hangs" else 0)
        os._exit(1)

model[0].weight.register_hook(be_lost)
together("the second step")
started = time.monotonic()
try:
    model(x).sum().backward()
except hp.CollectiveError as error:
    assert "gloo" in str(error.__cause__)
    seconds = time.monotonic() - started
    print(f"raised|{{seconds:.1f}}|{{error.collective}}|{{error.ranks}}|{{error.missing}}|{{error}}", flush=True)
together("the end", others)  # rank 0 serves the store at which the others leave their reports
os._exit(0)
"""


@pytest.mark.parametrize(
    ("lost", "how", "ranks"),
    [
        # Its neighbours notice at once; rank 0 would wait for the time-out if they did not fail it.
        (2, "dies", (0, 1, 2, 3)),
        # With rank 0 goes the store at which ranks leave their reports.
        (0, "dies", (0, 1, 2)),
        # In a group of its own, for which torch has another time-out than the one that the user gave.
        pytest.param(3, "hangs", (2, 3), marks=pytest.mark.nightly),
    ],
)
def test_lost_rank_is_named(lost: int, how: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    ended = run_ranks(["-c", PROGRAM, tmp_path, lost, how], max(ranks) + 1, kill=lost)
    for rank in set(ranks) - {lost}:
        _, _, raised = ended[rank].out.partition("raised|")
        assert raised, ended
        seconds, collective, members, missing, message = raised.split("|", 4)
        assert (collective, members, missing) == ("all_reduce", str(ranks), f"({lost},)"), raised
        assert f"failed on rank {rank}: rank {lost} did not take part, and has ended, or hangs" in message
        assert "all_reduce of a torch.float32 tensor of shape (2, 8) along mesh dimension 0 ('tp')" in message
        assert float(seconds) < SOON, raised


FAILURE = f"""
{TOGETHER}
import torch
import hyper_parallel as hp
from hyper_parallel.platform.torch.processes import lost_ranks

platform = hp.get_platform()
platform.init_process_group(timeout={LONG})
rank, mesh = platform.rank(), hp.init_device_mesh("cpu", mesh_dim_names=("tp",))
model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
plan = {{"0": hp.ColwiseParallel(), "1": hp.ColwiseParallel(input_layouts=hp.Shard(-1)), "2": hp.RowwiseParallel()}}
hp.parallelize_module(model, mesh, plan)
table = hp.distribute_tensor(torch.ones(8, 4), mesh, [hp.Shard(1)])

def of_module(last):
    model(torch.tensor([1, last])).sum().backward()

def of_operation(last):
    ids = hp.DTensor.from_local(torch.tensor([1, last]), mesh)
    torch.nn.functional.embedding(ids, table).full_tensor()

def of_backward(last):
    loss = model(torch.tensor([1, 7])).sum()
    handle = model[2].weight.register_hook(lambda g: torch.arange(8)[last] - torch.arange(8)[last] + g)
    try:
        loss.backward()  # the gradient of the first weight is reduced after that of the last
    finally:
        handle.remove()

def of_local_map(last):
    ids = hp.distribute_tensor(torch.tensor([1, 7]), mesh, [hp.Shard(0)])
    hp.local_map(lambda x: torch.arange(8)[x * 0 + last], [hp.Shard(0)])(ids)

for step in (of_operation, of_module, of_backward, of_local_map):
    step(7)
    lost_ranks.ALIKE = {LONG}
    for _ in range(2):
        try:
            step(99)  # all ranks raise: nothing is broken
        except IndexError:
            pass
    step(7)
lost_ranks.ALIKE = 1.0
step, started = locals()[sys.argv[2]], time.monotonic()
try:
    step(99 if rank == 1 else 7)
except (hp.CollectiveError, IndexError) as error:
    seconds = time.monotonic() - started
    print(f"raised|{{seconds:.1f}}|{{type(error).__name__}}|{{error}}", flush=True)
together("the end")  # no rank ends before, and rank 0 serves the store
os._exit(0)
"""


#: The failing part, and where the others learn of the failure.
WHERE = {"of_module": "mbedding", "of_operation": "mbedding", "of_backward": "backward", "of_local_map": "local_map"}


@pytest.mark.parametrize("how", in_gate(WHERE, ("of_backward",)))
def test_failure_of_one_rank_reaches_the_others(how: str, tmp_path: Path) -> None:
    """A rank that fails in a computation of its own, and lives on."""
    for rank, ended in enumerate(run_ranks(["-c", FAILURE, tmp_path, how], 2)):
        _, _, raised = ended.out.partition("raised|")
        assert raised, ended
        seconds, kind, message = raised.split("|", 2)
        assert float(seconds) < SOON, raised
        if rank == 1:
            assert kind == "IndexError", raised
        else:
            assert kind == "CollectiveError" and "rank 1 failed in" in message, raised
            assert WHERE[how] in message and "IndexError: index" in message and "out of" in message, raised


def test_time_outs_from_argument_and_environment() -> None:
    assert timeout_seconds(None, {}) is None
    assert timeout_seconds(2, {"HYPER_PARALLEL_TIMEOUT": "20"}) == 2.0
    assert timeout_seconds(None, {"HYPER_PARALLEL_TIMEOUT": "2.5"}) == 2.5
    for given, error in (("20", TypeError), (True, TypeError), (0, ValueError), (-1.0, ValueError)):
        with pytest.raises(error, match="init_process_group"):
            timeout_seconds(given, {})
    for text in ("soon", "-1", "inf", "nan"):
        with pytest.raises(ValueError, match=f"HYPER_PARALLEL_TIMEOUT={text}: the timeout is a positive number"):
            timeout_seconds(None, {"HYPER_PARALLEL_TIMEOUT": text})


LEAKS = """
import gc, os, sys
import torch
import torch.distributed as dist
import hyper_parallel as hp
from hyper_parallel.core.mesh import slices as mesh_slices
from hyper_parallel.core.operations import dispatch
from hyper_parallel.core.layouts import layout
from hyper_parallel.core.communication import redistribute
from torch.distributed import distributed_c10d

platform = hp.get_platform()
rank, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]

def cycle(number):
    # A store of its own for each time: with torch's own, on one port, a rank may meet the server of the time before.
    store = dist.FileStore(f"{folder}/{number}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    meshes = [hp.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), hp.init_device_mesh("cpu", (2,))]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    hp.parallelize_module(model, meshes[0]["tp"], {"0": hp.ColwiseParallel(), "2": hp.RowwiseParallel()})
    model(torch.ones(2, 8)).sum().backward()
    x = hp.distribute_tensor(torch.ones(4, 4), meshes[1], [hp.Shard(0)])
    (x @ x.t()).redistribute(placements=[hp.Replicate()]).sum().item()
    with hp.check_ranks():
        hp.rand(3, device_mesh=meshes[1], placements=[hp.Shard(0)])
    platform.destroy_process_group()

def alone():
    platform.init_process_group(timeout=60)
    hp.parallelize_module(torch.nn.Linear(8, 8), hp.init_device_mesh("cpu"), hp.ColwiseParallel())
    platform.destroy_process_group()

def census():
    while gc.collect():  # classes that a mesh keeps go in several rounds
        pass
    found = {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
    for kind in (hp.DeviceMesh, layout.Layout, dist.ProcessGroup, hp.DTensor):
        found[kind.__name__] = sum(isinstance(o, kind) for o in gc.get_objects())
    found["interned"] = len(mesh_slices.MESHES), len(layout._LAYOUTS)
    found["cached"] = len(dispatch._RECIPES), len(redistribute._STEPS)
    found["torch"] = len(distributed_c10d._world.pg_map), len(distributed_c10d._world.pg_names)
    return found

for number in range(3):
    cycle(number)
before = census()
for number in range(3, 13):
    cycle(number)
after = census()
assert before == after and before["DeviceMesh"] > 0, (before, after)
for name in ("RANK", "WORLD_SIZE"):
    del os.environ[name]
for _ in range(3):
    alone()
before = census()
for _ in range(10):
    alone()
after = census()
assert before == after, (before, after)
assert sys.excepthook is sys.__excepthook__  # torch puts one more around it each time
print("equal")
"""


def test_groups_that_are_made_again_leave_nothing_behind(tmp_path: Path) -> None:
    ended = run_ranks(["-c", LEAKS, tmp_path], 2)
    assert all(rank.out.endswith("equal\n") for rank in ended), ended


@on_mesh(4)
def lose_a_rank_of_a_group(world: Any) -> tuple | None:
    """Rank 1 does not come to a collective of a group of its own with rank 0."""
    rank = world.get_rank()
    mesh = DeviceMesh(None, [0, 1], mesh_dim_names=("absent",))
    if rank:
        return None
    # Not from the beginning: ranks come to the making of a group one after another.
    distributed_c10d._set_pg_timeout(timedelta(seconds=1), mesh.get_group())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost_ranks, "GRACE", 0.2)
        errors = []
        for _ in range(2):
            with pytest.raises(CollectiveError) as lost:
                collectives.all_reduce(torch.ones(2), mesh, 0)
            errors.append(lost.value.missing)
        store = distributed_c10d._get_default_store()
        group, key = mesh.get_group(), f"hyper_parallel/fault/{mesh.get_group().group_name}/"
        leave_report(store, 1, "another collective")
        elsewhere = lost_ranks.find_missing_ranks(group, (0, 1), "mine")
        leave_report(store, 1, "theirs", key)
        here = lost_ranks.find_missing_ranks(group, (0, 1), "mine")
        patch.setattr(lost_ranks, "_fail_waiting_ranks", lambda group: None)
        patch.setattr(lost_ranks, "default_store", Broken)
        dead = [lost_ranks.find_missing_ranks(group, ranks, "mine") for ranks in ((0, 1), (1, 2))]
        patch.setattr(torch.distributed, "get_rank", lambda: 1)
        dead.append(lost_ranks.find_missing_ranks(group, (0, 1), "mine"))
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        dead.append(lost_ranks.find_missing_ranks(group, (0, 1), "mine"))
        destroyed = lost_ranks.find_missing_ranks(None, (0, 1), "mine")
    assert lost_ranks.timeout_of(object(), "cpu") is None
    return errors, elsewhere, here, dead, destroyed


class Broken:
    """A store whose server has ended."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("connection reset")


def test_missing_ranks(pool: Any) -> None:
    errors, elsewhere, here, dead, destroyed = pool.run(4, lose_a_rank_of_a_group)[0]
    assert errors == [(1,), (1,)]
    assert elsewhere == ({0: "mine", 1: "another collective"}, (1,))
    assert here == ({0: "mine", 1: "theirs"}, ())
    # Rank 0 serves the store, unless torchrun's agent does.
    assert dead == [({0: "mine"}, (1,)), None, ({1: "mine"}, (0,)), None]
    assert destroyed is None
