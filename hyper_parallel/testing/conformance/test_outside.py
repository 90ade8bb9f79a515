"""Ranks outside a mesh: a DTensor is empty on them. An operation that needs values raises an error with this reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DeviceMesh,
    DTensor,
    Partial,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    check_ranks,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    get_platform,
    loss_parallel,
    ones,
    parallelize_module,
    rand,
    randn,
    zeros,
)
from hyper_parallel.testing.adapters import get_adapter

MESSAGE = r"rank 3 is not part of .* run this code on the ranks of the mesh alone, under `if mesh.get_coordinate\(\)"
PLACEMENTS = [Shard(0), Shard(1), Replicate()]


def mesh_and_whether_inside() -> tuple[Any, bool]:
    """Return a mesh without rank 3, and whether this rank is in it. All four ranks must call it."""
    mesh = DeviceMesh(None, [0, 1], mesh_dim_names=("tp",))
    return mesh, mesh.get_coordinate() is not None


def placed(mesh: Any, placement: Any = Shard(0), *shape: int) -> Any:  # noqa: B008 - interned and immutable
    shape = shape or (4, 4)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return distribute_tensor(get_adapter().tensor(values), mesh, [placement])


def mlp(mesh: Any, **plan: Any) -> Any:
    plan = plan or {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(get_adapter().load(get_adapter().Mlp(4, 6), np.random.default_rng(0)), mesh, plan)


def x_of(*shape: int) -> Any:
    return get_adapter().tensor(np.ones(shape or (2, 4), np.float32))


# ------------------------------------------------------------------------------------------------ empty
def made(mesh: Any) -> list[Any]:
    """Check all functions that create a DTensor, and operations that need no values."""
    adapter, at = get_adapter(), {"device_mesh": mesh, "placements": [Shard(0)]}
    found = [placed(mesh, p) for p in [*PLACEMENTS, Partial()]]
    found += [DTensor.from_local(x_of(), mesh, [p]) for p in PLACEMENTS]
    found.append(DTensor.from_local(x_of(), mesh, [Replicate()], run_check=True))
    found += [make(4, 2, **at) for make in (zeros, ones, empty, rand, randn)]
    found.append(full((4, 2), 3.0, **at))
    x = placed(mesh)
    found += [x + 1, x * x, adapter.exp(x), -x, copy.deepcopy(x)]
    found += [x.redistribute(placements=[p]) for p in PLACEMENTS]
    found.append(placed(mesh, Partial()).redistribute(placements=[Shard(1)]))
    return found


def empties() -> None:
    mesh, inside = mesh_and_whether_inside()
    with CommDebugMode() as comm:
        found = made(mesh)
        for x in found:
            assert x.device_mesh is mesh and len(x.shape) == 2 and "DTensor(" in repr(x)
            shape = tuple(get_platform().shape_of(x.to_local()))
            assert (len(shape) == 2) if inside else (shape == (0,)), (shape, x)
    assert inside or not comm.get_total_counts()


def modules() -> None:
    """Check that modules can be parallelised and distributed on all ranks. Parameters outside of the mesh are empty."""
    mesh, inside = mesh_and_whether_inside()
    adapter, platform = get_adapter(), get_platform()
    for module in (
        mlp(mesh),
        distribute_module(adapter.linear_module(4, 6), mesh),
        parallelize_module(adapter.norm_module(4), mesh, SequenceParallel()),
        parallelize_module(adapter.embedding_module(6, 4), mesh, RowwiseParallel(input_layouts=Replicate())),
    ):
        copied = copy.deepcopy(module)
        for which in (module, copied):
            for _, submodule in platform.named_modules(which):
                for _, p in platform.named_parameters(submodule):
                    assert (0 in platform.shape_of(p.to_local())) is not inside and 0 not in p.shape
    with check_ranks(mesh):
        placed(mesh)
    assert (mesh.get_group() is None) is not inside and (mesh.ranks_along(0) == ()) is not inside


# ------------------------------------------------------------------------------------------------ refused
def in_checked_ranks(mesh: Any) -> Any:
    with check_ranks(mesh):
        return placed(mesh).full_tensor()


def in_loss_parallel(mesh: Any) -> Any:
    labels = get_adapter().tensor(np.zeros(4, np.int64))
    with loss_parallel():
        return get_adapter().cross_entropy(placed(mesh, Shard(1)), labels)


REFUSED: dict[str, Callable[[Any], Any]] = {
    **{f"full_tensor {p!r}": lambda m, p=p: placed(m, p).full_tensor() for p in [*PLACEMENTS, Partial()]},
    "redistribute": lambda m: placed(m).redistribute(placements=[Replicate()], async_op=True),
    "matmul": lambda m: get_adapter().matmul(placed(m), placed(m, Replicate())),
    "matmul of shards": lambda m: get_adapter().matmul(placed(m, Shard(1)), placed(m)),
    "sum": lambda m: get_adapter().sum(placed(m)),
    "value": lambda m: float(get_adapter().sum(placed(m))),
    "numpy": lambda m: get_adapter().numpy(placed(m)),
    "index": lambda m: placed(m)[1],
    "reshape": lambda m: get_adapter().reshape(placed(m, Shard(1)), (16,)),
    "softmax": lambda m: get_adapter().softmax(placed(m), 0),
    "without a rule": lambda m: get_adapter().unruled(
        distribute_tensor(get_adapter().tensor(np.eye(4, dtype=np.float32)), m, [Shard(0)])
    ),
    "forward": lambda m: get_adapter().call(mlp(m), x_of()),
    "first layer": lambda m: get_adapter().call(mlp(m).up, x_of()),
    "sequence parallel": lambda m: get_adapter().call(
        mlp(m, up=ColwiseParallel(input_layouts=Shard(0)), down=RowwiseParallel(output_layouts=Shard(0))), x_of()
    ),
    "prepared": lambda m: get_adapter().call(
        parallelize_module(
            get_adapter().Probe(), m, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        ),
        x_of(),
    ),
    "norm": lambda m: get_adapter().call(
        parallelize_module(get_adapter().norm_module(4), m, SequenceParallel()), x_of(2, 3, 4)
    ),
    "loss_parallel": in_loss_parallel,
    "check_ranks": in_checked_ranks,
    "get_local_rank": lambda m: m.get_local_rank(),
}


def refuse_all() -> None:
    for name in REFUSED:
        refused(name)


def refused(name: str) -> None:
    mesh, inside = mesh_and_whether_inside()
    if inside:
        REFUSED[name](mesh)  # must not wait for the ranks outside
    elif mesh.get_rank() == 3:
        with CommDebugMode() as comm, pytest.raises(ValueError, match=f"(?s){MESSAGE}"):
            REFUSED[name](mesh)
        assert not comm.get_total_counts()


@pytest.mark.parametrize("job", [empties, modules], ids=lambda job: job.__name__)
def test_empty_tensors(pool: Any, job: Callable[[], None]) -> None:
    pool.run(4, job)


def test_refusals(pool: Any) -> None:
    pool.run(4, refuse_all)
