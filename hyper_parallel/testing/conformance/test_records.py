"""Records of distributed runs and single-device runs, and that recording changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    fully_shard,
    get_platform,
    parallelize_module,
    replicate,
)
from hyper_parallel.debug import Comparison, compare, record
from hyper_parallel.platform.contract.observation import ObservationRole
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import device_mesh

STEPS = 2
COLWISE = {
    f"{part}.{name}": ColwiseParallel()
    for part, names in (("attention", ("wq", "wk", "wv")), ("feed_forward", ("w1", "w3")))
    for name in names
}
TENSOR = {**COLWISE, "attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}
_WHOLE = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
_PART = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
SEQUENCE = {
    **COLWISE,
    "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
    "norm1": SequenceParallel(),
    "norm2": SequenceParallel(),
    "attention": _WHOLE,
    "feed_forward": _WHOLE,
    "attention.wo": _PART,
    "feed_forward.w2": _PART,
}


class Spread:
    """A block distributed in one way, and this rank's rows of the batch."""

    def __init__(self, way: str) -> None:
        adapter = get_adapter()
        self.model = adapter.load(adapter.Block(8, 16, 2), np.random.default_rng(5))
        self.rows, self.there = slice(None), True
        if way == "one":
            self.there = spmd.rank == 0
            return
        shape, names = {"2d": ((2, 2), ("dp", "tp")), "fully_shard": ((2,), ("dp",)), "replicate": ((2,), ("dp",))}.get(
            way, ((2,), ("tp",))
        )
        mesh = device_mesh(*shape, names=names)
        self.there = mesh is not None
        if mesh is None:
            return
        if "tp" in names:
            parallelize_module(self.model, mesh["tp"], SEQUENCE if way == "sequence" else TENSOR)
        if "dp" in names:
            half = mesh.get_local_rank("dp")
            self.rows = slice(2 * half, 2 * half + 2)
            if way == "replicate":
                replicate(self.model, mesh["dp"])
            else:
                fully_shard(self.model, mesh=mesh["dp"])


def train(way: str, folder: str | None, rate: float = 1e-2) -> list[bytes] | None:
    """Train for two steps, recorded if ``folder`` is given. Return losses and gradients as bytes."""
    adapter, platform = get_adapter(), get_platform()
    spread = Spread(way)
    if not spread.there:
        return None
    _, take = adapter.optimizer(spread.model, "adamw", rate)
    found: list[bytes] = []

    def loss(x: Any) -> tuple[Any, Any]:
        y = adapter.call(spread.model, x)
        y = y.full_tensor() if isinstance(y, DTensor) else y
        value = adapter.weighted_sum(y * y, adapter.tensor(np.full(y.shape, 1 / math.prod(y.shape), np.float32)))
        return value, value

    def run() -> None:
        for step in range(STEPS):
            x = floats(4, 6, 8)[spread.rows] + np.float32(step)
            value, _, gradients = adapter.model_value_and_grads(spread.model, loss, x)
            take(gradients)
            found.append(adapter.numpy(value).tobytes())
            for _, g in sorted(gradients.items()):
                local = g.to_local() if isinstance(g, DTensor) else g
                found.append(platform.bytes_of(platform.detach(local)))

    if folder is None:
        run()
    else:
        with record(f"{folder}/{way}", spread.model):
            run()
    return found


def run_and_record(ways: list[str], folder: str) -> None:
    for way in ways:
        train(way, folder)


def observed() -> bool:
    """Return whether the backend reports steps and gradients."""
    return type(get_platform()).watch_steps is not ObservationRole.watch_steps


def check(found: Comparison) -> None:
    assert not (found.departs or found.only_a or found.only_b or found.unfit or found.notes), str(found)
    kinds = {row.kind for row in found.rows}
    gives = {"gradient", "parameter gradient", "update"} if observed() else set()
    assert kinds == {"parameter", "input", "output"} | gives
    assert {row.step for row in found.rows} == ({0, 1} if observed() else {0})


WAYS = ["tensor", "sequence", "fully_shard", "replicate", "2d"]


@pytest.mark.parametrize("ways", in_gate([(way,) for way in WAYS], [("2d",)]))
def test_spread_and_on_one_device(pool: Any, ways: tuple[str, ...], tmp_path: Path) -> None:
    pool.run(4, run_and_record, ["one", *ways], str(tmp_path))
    for way in ways:
        check(compare(tmp_path / "one", tmp_path / way))


def quietly(way: str, folder: str) -> Any:
    """Train without and with a record; return both results and the collectives of both."""
    results, counts = [], []
    for recorded in (None, folder):
        with CommDebugMode() as comm:
            results.append(train(way, recorded))
        counts.append([(event.kind, event.bytes, event.direction) for event in comm.events])
    return results[0] == results[1], counts[0] == counts[1], len(counts[0]), results[0] is None


@pytest.mark.parametrize("way", in_gate(["tensor", "sequence", "2d"], ["2d"]))
def test_recording_changes_nothing(pool: Any, way: str, tmp_path: Path) -> None:
    """Check that losses and gradients are bitwise equal, and that collectives are the same."""
    for same, as_many, count, outside in pool.run(4, quietly, way, str(tmp_path)):
        assert same and as_many and (outside or count > 0)
