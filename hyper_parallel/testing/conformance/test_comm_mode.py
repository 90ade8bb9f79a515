"""CommDebugMode: collectives by module and direction, parameters, tables and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import ColwiseParallel, CommDebugMode, RowwiseParallel, Shard, get_platform, parallelize_module
from hyper_parallel.debug import CommCounts
from hyper_parallel.platform.contract.observation import ObservationRole
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh


@on_mesh()
def by_module(mesh: Any, folder: str) -> None:
    adapter = get_adapter()
    model = adapter.load(adapter.Mlp(4, 8), np.random.default_rng(5))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def loss(x: Any) -> tuple[Any, Any]:
        y = adapter.call(model, x)
        return adapter.weighted_sum(y, adapter.tensor(np.ones((3, 4), np.float32))), y

    comm = CommDebugMode()
    for _ in range(2):  # entering again starts anew
        with comm:
            adapter.value_and_grads(loss, [floats(3, 4)])
    once = {"all_reduce": 1} if mesh.size() > 1 else {}
    total = {"all_reduce": 2} if mesh.size() > 1 else {}
    assert comm.get_comm_counts() == comm.comm_counts == total and comm.get_total_counts() == sum(total.values())
    assert comm.get_comm_counts()["broadcast"] == 0 and comm.get_bytes() == {key: n * 48 for key, n in total.items()}
    counts = comm.comm_module_counts
    if type(mesh.platform).observe is ObservationRole.observe:  # a backend that does not tell of modules
        assert set(counts) == {"Global"} and comm.get_sharding_info() == {}
        return
    assert counts["Global"] == {"forward": once, "backward": once}
    if once:
        assert counts["Mlp"]["forward"] == counts["Mlp.down"]["forward"] == once
        assert counts["Mlp"]["backward"] == counts["Mlp.up"]["backward"] == once, counts
        assert "forward" not in counts.get("Mlp.up", {}) or counts["Mlp.up"]["forward"] == {}
    info, sharding = comm.get_parameter_info(), comm.get_sharding_info()
    assert set(info) == {"Mlp.up", "Mlp.down"} and set(info["Mlp.up"]) == {"weight", "bias"}
    assert sharding["Mlp.up.weight"] == (Shard(0),) and sharding["Mlp.down.weight"] == (Shard(1),)
    assert repr(comm) == f"CommDebugMode(get_total_counts()={len(comm.events)})"

    plain, full = (comm.generate_comm_debug_tracing_table(noise_level) for noise_level in (0, 3))
    assert plain.splitlines()[0] == "Global" and "  Mlp\n" in plain and "    Mlp.down\n" in plain
    assert "*parameters" in full and "weight: (Shard(dim=1),)" in full and "weight" not in plain
    if once:
        assert "FORWARD PASS\n    *all_reduce: 1 (48 bytes)" in plain and "**all_reduce (sum) of (3, 4)" in full
    if mesh.get_local_rank() == 0:
        comm.log_comm_debug_tracing_table_to_file(f"{folder}/table.txt")
        assert Path(f"{folder}/table.txt").read_text(encoding="utf-8") == full
        comm.generate_json_dump(f"{folder}/log.json")
        tree = json.loads(Path(f"{folder}/log.json").read_text(encoding="utf-8"))
        (mlp,) = tree["children"]
        assert tree["fqn"] == "Global" and mlp["children"][0]["fqn"] == "Mlp.up"
        assert mlp["collectives_forward"] == [list(item) for item in once.items()]
        assert mlp["bytes_backward"] == 48 * sum(once.values())


@on_ranks(1, 2)
def test_by_module_and_direction(pool: Any, world_size: int, tmp_path: Path) -> None:
    pool.run(world_size, by_module, str(tmp_path))


class _Failing:
    """Observer that stores the order of events."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def before_module(self, module: Any) -> None:
        self.seen.append(f"before {type(module).__name__}")

    def after_module(self, module: Any) -> None:
        self.seen.append(f"after {type(module).__name__}")

    def backward_of(self, module: Any) -> None:
        self.seen.append("backward")

    backward_before = backward_of

    def collective(self, kind: str, tensors: list[Any]) -> None:
        self.seen.append(kind)


def observed() -> None:
    adapter, platform = get_adapter(), get_platform()
    model, observer = adapter.load(adapter.linear_module(4, 2), np.random.default_rng(0)), _Failing()
    with platform.observe(observer):
        adapter.call(model, adapter.tensor(floats(3, 4)))
        with pytest.raises(Exception):  # noqa: B017 - frameworks raise any class
            adapter.call(model, adapter.tensor(floats(3, 5)))
            adapter.numpy(adapter.call(model, adapter.tensor(floats(3, 5))))
    before = list(observer.seen)
    adapter.call(model, adapter.tensor(floats(3, 4)))
    assert observer.seen == before  # no observer is told afterwards
    begun, ended = (sum(word in event for event in before) for word in ("before", "after"))
    assert begun == ended and (begun >= 1 or not before)
    assert platform.collective_kind("all_reduce") is None and platform.collective_kind(adapter.numpy) is None
    with CommDebugMode() as comm:
        adapter.call(model, adapter.tensor(floats(3, 4)))
    assert comm.get_comm_counts() == {} and comm.get_sharding_info() == {}
    assert CommCounts(all_reduce=1).get("all_reduce") == 1 and CommCounts().get("all_reduce") is None
    assert CommDebugMode().generate_comm_debug_tracing_table() == ""


def test_observed(pool: Any) -> None:
    pool.run(1, observed)
