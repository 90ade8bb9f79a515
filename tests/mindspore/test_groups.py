"""Process groups in processes that have initialised: adopting groups that a user or msrun made, groups by name."""

from __future__ import annotations

import time
from typing import Any

import pytest
from mindspore import communication
from mindspore.communication._comm_helper import GlobalComm
from mindspore.mint import distributed as dist

from hyper_parallel.platform.mindspore.processes import launch, stores
from hyper_parallel.platform.mindspore.processes.launch import GroupVerbs, World
from hyper_parallel.testing import worker
from hyper_parallel.testing.spmd import on_mesh


@on_mesh(2, 2)
def groups_of_four(mesh: Any) -> dict[str, Any]:
    """Facts about its groups that each of four ranks sees."""
    platform, rank = mesh.platform, mesh.platform.rank()
    world = platform.world().group
    pairs = [[0, 2], [1, 3]]
    pair = platform.new_group(pairs)
    alone = platform.new_group([[r] for r in range(4)])
    native = platform.native_group(alone)
    platform.barrier(world)
    if rank == 2:
        time.sleep(0.3)
    came = time.monotonic()  # one clock for all processes
    platform.barrier(pair)
    went = time.monotonic()
    return {
        "everybody is the world": platform.new_group([[0, 1, 2, 3]]) == world,
        "another order is another group": platform.new_group([[3, 2, 1, 0]]) != world,
        "made once": platform.new_group(pairs) == pair,
        "left out": platform.new_group([[r for r in range(4) if r != rank][:2]]) is None,
        "native": platform.native_group(pair) == pair and platform.native_group(world) == world,
        "alone": native == alone and platform.native_group(alone) == alone,
        "size alone": dist.get_world_size(native) == 1,
        "rank in the pair": dist.get_rank(pair) == [0, 0, 1, 1][rank],
        "times": (came, went),
    }


def test_groups(pool: Any) -> None:
    results = pool.run(4, groups_of_four)
    times = [seen.pop("times") for seen in results]
    assert times[0][1] >= times[2][0], "rank 0 has not waited for rank 2"
    for seen in results:
        assert all(seen.values()), seen


@on_mesh()
def patience(mesh: Any) -> float:
    return stores.seconds_in_collectives()


def test_ranks_of_the_pool_wait_for_one_another(pool: Any) -> None:
    """Longer than mccl does by itself, which is too short for a busy machine. The pool finds out who hangs."""
    assert pool.run(2, patience) == [worker.TIMEOUT] * 2


@on_mesh(2)
def adopted(mesh: Any) -> list[Any]:
    """The world as an object sees it that has not initialised it; then under msrun, which is a function away."""
    known = mesh.platform.world()
    found = GroupVerbs().world()
    asked: list[str] = []

    def init(backend: str) -> None:
        asked.append(backend)
        GlobalComm.INITED = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MS_ROLE", "MS_WORKER")
        patch.setattr(GlobalComm, "INITED", False)
        patch.setattr(communication, "init", init)
        patch.setattr(launch, "store_of_msrun", lambda rank, size, group, timeout: (rank, size, group))
        patch.setattr(launch, "meet", lambda store, size, seconds: asked.append("met"))
        groups = GroupVerbs()
        before = groups.world()
        groups.init_process_group()
        started = groups.world()
    GlobalComm.INITED = True
    facts = [(w.rank, w.size, w.group) == (known.rank, known.size, known.group) for w in (found, started)]
    return [*facts, before, asked, found.store, started.store == (known.rank, known.size, known.group)]


def test_adopting(pool: Any) -> None:
    assert pool.run(2, adopted) == [[True, True, None, ["mccl", "met"], None, True]] * 2


def test_destroyed_groups_stay_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(GlobalComm, "INITED", True)
    monkeypatch.setattr(launch, "_MOMENT", 0)
    groups = GroupVerbs()
    groups._world = World(0, 2, "mccl_world_group")
    groups.destroy_process_group()
    groups.destroy_process_group()  # nothing is left to destroy
    assert calls == ["destroyed"] and groups.world() is None
    with pytest.raises(RuntimeError, match="start new processes"):
        groups.init_process_group()


def test_the_agent_of_torchrun_has_a_store_on_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refuse(host: str, port: int, **options: Any) -> None:
        asked.append((host, port, options["world_size"], options["is_master"]))
        raise ConnectionError("no server")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    for name in ("MS_ROLE", "MS_WORKER_NUM"):
        monkeypatch.delenv(name, raising=False)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for agent in ("False", "True"):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
        with pytest.raises(ConnectionError, match="no server"):
            GroupVerbs().init_process_group()
    assert asked == [("127.0.0.1", 1234, 2, False), ("127.0.0.1", 1235, 2, False)]
