"""The recorder: every collective is reported with its kind, module and direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Partial,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.core.communication import recorder
from hyper_parallel.debug import CollectiveEvent
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh


def summary(event: CollectiveEvent) -> tuple:
    return event.kind, event.op, event.module, event.direction, event.shape, event.bytes


@on_mesh()
def of_a_model(mesh: Any) -> tuple[int, list[tuple]]:
    """Check the collectives of a step: the input's all-gather, the reduce-scatter of the hidden layer, and their
    backward."""
    adapter = get_adapter()
    model = adapter.load(adapter.Mlp(4, 8), np.random.default_rng(5))
    plan = {
        "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)))

    def loss(x: Any) -> tuple[Any, Any]:
        y = adapter.call(model, x)
        return adapter.weighted_sum(y, adapter.tensor(np.ones(tuple(y.shape), np.float32))), y

    adapter.value_and_grads(loss, [floats(2, 4)])
    with CommDebugMode() as comm:
        adapter.value_and_grads(loss, [floats(2, 4)])
    assert not recorder.LISTENERS and recorder.current_module() == ""
    assert {(event.mesh, event.mesh_dim) for event in comm.events} <= {(mesh, 0)}
    assert all("float32" in str(event.dtype).lower() for event in comm.events)
    assert sum(comm.get_elements().values()) * 4 == sum(event.bytes for event in comm.events)
    return mesh.size(), [summary(event) for event in comm.events]


@on_ranks(1, 2, 3, 4)
def test_module_and_direction(pool: Any, world_size: int) -> None:
    for size, events in pool.run(world_size, of_a_model):
        rows = 2 * size
        expected = [
            ("all_gather", "", "Mlp", "forward", (2, 4), 32),
            ("all_reduce", "sum", "down", "forward", (rows, 4), 16 * rows),
            ("all_gather", "", "", "backward", (2, 4), 32),
        ]
        gradient = events[3:]
        assert events[:3] == (expected if size > 1 else [])
        # The gradient of the gathered input is reduced and cut, in one collective or in two.
        assert {event[3] for event in gradient} <= {"backward"} and len(gradient) == (1 if size > 1 else 0)


@on_mesh()
def details(mesh: Any) -> None:
    adapter, size = get_adapter(), mesh.size()
    whole = floats(2 * size - 1, 3)
    with CommDebugMode() as comm:
        x = distribute_tensor(adapter.tensor(whole), mesh, [Shard(0)])
        assert comm.events[0].details["the source"] == 0
        comm.events.clear()
        x.redistribute(placements=[Replicate()])
        x.redistribute(placements=[Shard(1)])
        DTensor.from_local(adapter.tensor(whole), mesh, [Partial("max")]).redistribute(placements=[Replicate()])
        DTensor.from_local(adapter.tensor(floats(0, 3)), mesh, [Partial()]).redistribute(placements=[Replicate()])
    gathered, moved, largest, ties = comm.events  # a tensor without elements sends nothing
    sizes = (2,) * (size - 1) + (1,)
    # All ranks say the same, whatever their shard.
    assert (gathered.shape, gathered.bytes, gathered.uneven_dim) == ((2, 3), 24, 0)
    assert gathered.details == {"the tensor dimension": 0, "the sizes of shards": sizes}
    assert (moved.kind, moved.shape, moved.details["the tensor dimensions"]) == ("all_to_all", (2, 3), (0, 1))
    assert (largest.kind, largest.op, largest.details) == ("all_reduce", "max", {})
    assert largest.bytes in (ties.bytes, 2 * ties.bytes)  # where a backend reduces, NaN travels with the numbers
    assert {event.direction for event in comm.events} == {"forward"}


def test_details(pool: Any) -> None:
    pool.run(2, details)


@on_mesh()
def listeners_may_refuse(mesh: Any) -> None:
    """Check that an exception of a listener prevents the collective."""

    def refuse(event: CollectiveEvent) -> None:
        raise ValueError(f"no {event.kind} here")

    x = DTensor.from_local(get_adapter().tensor(floats(2, 3)), mesh, [Partial()])
    recorder.LISTENERS.append(refuse)
    try:
        with CommDebugMode() as comm, pytest.raises(ValueError, match="no all_reduce here"):
            x.redistribute(placements=[Replicate()])
    finally:
        recorder.LISTENERS.remove(refuse)
    assert comm.get_total_counts() == 0


def test_listeners_may_refuse(pool: Any) -> None:
    pool.run(2, listeners_may_refuse)
