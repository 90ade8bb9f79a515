"""`check_ranks`: if ranks are about to do different things, all raise an error that names the ranks and the
difference."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    CollectiveError,
    ColwiseParallel,
    CommDebugMode,
    DeviceMesh,
    DTensor,
    Partial,
    RankMismatchError,
    Replicate,
    RowwiseParallel,
    Shard,
    check_ranks,
    init_device_mesh,
    manual_seed,
    parallelize_module,
)
from hyper_parallel.core.communication import rank_check
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.spmd import device_mesh, on_mesh


def error_of(mesh: Any, job: Callable[[], Any]) -> tuple[str, str, tuple[int, ...]]:
    """Return type, message and ranks of the error of ``job`` inside `check_ranks`."""
    try:
        with check_ranks(mesh):
            job()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ())
    return "nothing", "", ()


def tensor(mesh: Any, *shape: int, dtype: str = "float32") -> Any:
    return get_adapter().tensor(np.ones(shape, dtype))


@on_mesh()
def different_steps(mesh: Any) -> dict[str, tuple]:
    """Check cases in which rank 1 does a different step."""
    rank = mesh.get_local_rank()
    manual_seed(0, mesh)  # an earlier test may have drawn on a part of the ranks

    def reduced(placement: Any, *shape: int, dtype: str = "float32") -> Any:
        x = DTensor.from_local(tensor(mesh, *shape, dtype=dtype), mesh, [placement])
        return x.redistribute(placements=[Replicate()])

    def fails() -> None:
        if rank == 1:
            raise KeyError("no such file")
        reduced(Shard(0), 2, 3)

    def uneven_style() -> None:
        plan = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
        parallelize_module(get_adapter().Mlp(4, 8), mesh, plan)(tensor(mesh, 3 - rank, 4))

    def another_layer() -> None:
        model = parallelize_module(get_adapter().Mlp(4, 4), mesh, {"up": row_parallel, "down": row_parallel})
        get_adapter().call(model.down if rank == 1 else model.up, tensor(mesh, 3, 4))

    row_parallel = RowwiseParallel(input_layouts=Replicate())
    return {
        "uneven input of a style": error_of(mesh, uneven_style),
        "module": error_of(mesh, another_layer),
        "collective": error_of(mesh, lambda: reduced(Shard(0) if rank == 1 else Partial(), 2, 3)),
        "op": error_of(mesh, lambda: reduced(Partial("max" if rank == 1 else "sum"), 2, 3)),
        "dtype": error_of(mesh, lambda: reduced(Partial(), 2, dtype="int32" if rank == 1 else "float32")),
        "shape": error_of(mesh, lambda: reduced(Partial(), 2 + rank, 3)),
        "empty": error_of(mesh, lambda: reduced(Partial(), 0 if rank == 1 else 2, 3)),
        "uneven shards": error_of(mesh, lambda: reduced(Shard(0), 3 - rank, 3)),
        "the end": error_of(mesh, lambda: None if rank == 1 else reduced(Shard(0), 2, 3)),
        "exception": error_of(mesh, fails),
        "mesh": error_of(mesh, lambda: DeviceMesh(None, [1, 0] if rank == 1 else [0, 1])),
        "names": error_of(mesh, lambda: init_device_mesh(None, (2,), mesh_dim_names=("tp" if rank else "dp",))),
        "afterwards": error_of(mesh, lambda: reduced(Shard(0), 2, 3)),
    }


def test_each_difference_is_named(pool: Any) -> None:
    zero, one = pool.run(2, different_steps)
    first = "(collective 1 inside check_ranks())"
    expected = {
        "collective": f"rank 1: all_gather along mesh dimension 0 {first}; rank 0: all_reduce along mesh",
        "module": "rank 1 and rank 0 differ in the module. rank 1: down; rank 0: up",
        "op": "rank 1 and rank 0 differ in op. rank 1: max; rank 0: sum",
        "dtype": "differ in the dtype of the local tensor. rank 1: ",
        "shape": "differ in the shape of the local tensor. rank 1: (3, 3); rank 0: (2, 3)",
        "empty": "differ in the shape of the local tensor. rank 1: (0, 3); rank 0: (2, 3)",
        "uneven shards": "differ in the sizes of shards. rank 1: (2, 2); rank 0: (3, 3)",
        "the end": "rank 1: the end of check_ranks(); rank 0: all_gather along mesh dimension 0",
        "exception": "rank 1: leaving check_ranks() with KeyError: 'no such file'; rank 0: all_gather",
        "mesh": "rank 1 and rank 0 differ in the ranks of the mesh. rank 1: [1, 0]; rank 0: [0, 1]",
        "names": "differ in mesh_dim_names. rank 1: ('tp',); rank 0: ('dp',)",
    }
    for seen in (zero, one):  # without `check_ranks` too
        kind, message, _ = seen["uneven input of a style"]
        assert kind == "RankMismatchError" and "is plain" in message
        assert "'up'. rank 1: (2, 4); rank 0: (3, 4)" in message
    for case, text in expected.items():
        kind, message, ranks = zero[case]
        assert (kind, ranks) == ("RankMismatchError", (1,)) and text in message, f"{case}: {zero[case]}"
        assert one[case] == (("KeyError", "'no such file'", ()) if case == "exception" else zero[case]), case
    assert zero["afterwards"] == one["afterwards"] == ("nothing", "", ())


@on_mesh()
def different_plans(mesh: Any) -> dict[str, tuple]:
    """Check errors if rank 2 has another plan, another model, or another keyword."""
    rank, made = mesh.get_local_rank(), get_adapter()
    manual_seed(0, mesh)  # an earlier test may have drawn on a part of the ranks

    def apply(plan: dict, hidden: int = 8, frozen: bool = False, **options: Any) -> None:
        model = made.Mlp(4, hidden)
        if frozen:
            next(iter(mesh.platform.named_parameters(model.up)))[1].requires_grad = False
        parallelize_module(model, mesh, plan, **options)

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    odd = rank == 2
    other = {**plan, "down": RowwiseParallel(output_layouts=Shard(0))}
    return {
        "style": error_of(mesh, lambda: apply(other if odd else plan)),
        "missing": error_of(mesh, lambda: apply({"up": ColwiseParallel()} if odd else plan)),
        "shape": error_of(mesh, lambda: apply(plan, 12 if odd else 8)),
        "frozen": error_of(mesh, lambda: apply(plan, frozen=odd)),
        "source": error_of(mesh, lambda: apply(plan, src_data_rank=None if odd else 0)),
        "refused": error_of(mesh, lambda: apply({"up": ColwiseParallel(), "down": 3} if odd else plan)),
        "equal": error_of(mesh, lambda: apply(plan)),
    }


def test_different_plans_and_models_are_named(pool: Any) -> None:
    results = pool.run(4, different_plans)
    expected = {
        "style": "before parallelize_module, rank 2 and ranks 0, 1, 3 differ in the style of 'down'. rank 2: "
        "RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Shard(dim=0),)",
        "missing": "differ in the style of 'down'. rank 2: nothing; ranks 0, 1, 3: RowwiseParallel(",
        "shape": "differ in parameter 'up.weight'. rank 2: ",
        "frozen": "requires_grad=False; ranks 0, 1, 3: ",
        "source": "differ in src_data_rank. rank 2: None; ranks 0, 1, 3: 0",
        "refused": "rank 2: leaving check_ranks() with TypeError: the plan has 3 for 'down'",
    }
    for rank, result in enumerate(results):
        assert result["equal"] == ("nothing", "", ())
        for case, text in expected.items():
            kind, message, ranks = result[case]
            if case == "refused" and rank == 2:
                assert kind == "TypeError" and "which is neither a ParallelStyle" in message
            else:
                assert (kind, ranks) == ("RankMismatchError", (2,)) and text in message, f"{case}: {result[case]}"


@on_mesh(2, 2, names=("dp", "tp"))
def two_dimensions(mesh: Any) -> dict[str, tuple]:
    """Check that rows of a mesh may have batches of different length, but ranks of one row may not."""
    dp, tp = mesh.get_coordinate()

    def reduce(length: int, along: Any = mesh["tp"]) -> None:
        DTensor.from_local(tensor(mesh, length, 2), along, [Partial()]).redistribute(placements=[Replicate()])

    return {
        "uneven batch": error_of(mesh, lambda: reduce(3 + dp)),
        "within a row": error_of(mesh, lambda: reduce(3 + (dp == 1 and tp == 1))),
        "one row only": error_of(mesh["tp"], lambda: reduce(3 + (dp == 1 and tp == 1))),
        "another dimension": error_of(mesh, lambda: reduce(3, mesh["dp" if dp and tp else "tp"])),
        "the world": error_of(None, lambda: reduce(3 + (dp == 1 and tp == 1))),
    }


def test_rows_of_a_mesh_are_compared_by_themselves(pool: Any) -> None:
    results = pool.run(4, two_dimensions)
    for rank, result in enumerate(results):
        assert result["uneven batch"][0] == "nothing"
        for case in ("within a row", "the world"):
            kind, message, ranks = result[case]
            assert (kind, ranks) == ("RankMismatchError", (3,))
            assert "rank 3 and rank 2 differ in the shape" in message and "(4, 2); rank 2: (3, 2)" in message
        assert result["one row only"][0] == ("RankMismatchError" if rank > 1 else "nothing")
        kind, message, ranks = result["another dimension"]
        assert kind == "RankMismatchError" and 3 in ranks, message
        assert "('dp')" in message and "('tp')" in message


@on_mesh()
def whole_step(mesh: Any) -> list:
    """Check that a step inside `check_ranks` gives the same result as outside, with the same counted collectives."""
    made, results = get_adapter(), []
    manual_seed(0, mesh)
    for inside in (False, True):
        model = made.Mlp(4, 8)
        x = made.tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
        with CommDebugMode() as comm, check_ranks(mesh) if inside else nullcontext():
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            y = model(x)
        results.append((comm.get_comm_counts(), y.shape))
        assert not rank_check.CHECKS
    return results


def test_a_step_that_agrees(pool: Any) -> None:
    for outside, inside in pool.run(2, whole_step):
        assert outside == inside and outside[0]["all_reduce"] == 1


def outside_the_mesh() -> str:
    mesh = device_mesh(2)
    whole = DeviceMesh(None, [0, 1])
    return error_of(mesh or whole, lambda: None)[0]


def test_ranks_outside_do_nothing(pool: Any) -> None:
    assert pool.run(4, outside_the_mesh) == ["nothing"] * 4


@pytest.mark.parametrize(
    "error", [RankMismatchError("text", (1,)), CollectiveError("text", "all_reduce", (0, 1), (1,))]
)
def test_errors_can_be_sent(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == "text" and vars(copy) == vars(error)
