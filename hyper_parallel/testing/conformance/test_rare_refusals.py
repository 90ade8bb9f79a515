"""Errors that no other test reaches: with the same class and text on all ranks, before any communication."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hyper_parallel import (
    DeviceMesh,
    PackedShard,
    Partial,
    Replicate,
    Shard,
    compute_local_shape_and_global_offset,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
)
from hyper_parallel.checkpoint import save
from hyper_parallel.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from hyper_parallel.core.communication.redistribute import redistribute
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.debug import CommDebugMode
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats
from hyper_parallel.testing.spmd import on_mesh


def _packed_by_its_name() -> None:
    PackedShard("rows", 2)  # type: ignore[arg-type]


def _changed() -> None:
    Shard(0).dim = 1  # type: ignore[misc]


def wrong_uses(mesh: Any) -> dict[str, Any]:
    """Return wrong calls with the beginning of their messages, by subject."""
    adapter, tp = get_adapter(), mesh["tp"]
    model = adapter.linear_module(4, 4)
    mixed, x = (Partial(), Partial("max")), distribute_tensor(adapter.tensor(floats(4, 4)), tp, [Shard(0)])
    nothing: Any = SimpleNamespace(shard_names=(), replicate_names=("dp",))  # as of another library
    return {
        "TypeError: PackedShard(dim, sizes) takes the tensor dimension as an int, got 'rows'": _packed_by_its_name,
        "AttributeError: Shard(dim=0) is immutable: make a new placement": _changed,
        "ValueError: mesh_shape must hold positive ints, got (0,)": lambda: init_device_mesh(None, (0,)),
        "TypeError: device_type must be a string such as 'cpu', got 3": lambda: init_device_mesh(3, (1,)),  # type: ignore[arg-type]
        "ValueError: DeviceMesh(": lambda: mesh.get_local_rank(5),
        "ValueError: fully_shard(dp_mesh_dims=": lambda: fully_shard(model, mesh=mesh, dp_mesh_dims=nothing),
        "ValueError: a tensor of shape (4, 4) is placed [Partial(sum), Partial(max)]": (
            lambda: compute_local_shape_and_global_offset((4, 4), mesh, mixed)
        ),
        "ValueError: a tensor placed [PackedShard(dim=0, sizes=(2, 2))] has several shards": (
            lambda: compute_local_shape_and_global_offset((4, 4), tp, [PackedShard(0, 2)])
        ),
        "ValueError: cannot redistribute ": lambda: redistribute(x, get_layout(tp, (Replicate(),), (4, 5))),
    } | _of_optimizers(tp.platform)


def _of_optimizers(platform: Any) -> dict[str, Any]:
    """Return wrong calls of optimizers; none if the framework has no optimizers."""
    adapter = get_adapter()
    model, other = adapter.linear_module(4, 4), adapter.Mlp(4, 4)
    optimizer = adapter.optimizer(model, "adamw", 0.1)[0] if hasattr(adapter, "optimizer") else None
    if not platform.is_optimizer(optimizer):
        return {}
    state = get_optimizer_state_dict(model, optimizer)
    return {
        "ValueError: the state dict of the optimizer has no entry for": (
            lambda: set_optimizer_state_dict(other, adapter.optimizer(other, "adamw", 0.1)[0], state)
        ),
        "ValueError: the optimizer's parameters [0, 1] (numbered across its groups) do not belong to the model": (
            lambda: get_optimizer_state_dict(other, optimizer)
        ),
    }


def _taken_while_gathered(mesh: Any) -> None:
    """Replace a parameter while its all-gather is pending."""
    adapter = get_adapter()
    unit: Any = fully_shard(adapter.linear_module(4, 4), mesh=mesh)
    handle = unit.unshard(async_op=True)
    unit.weight = adapter.linear_module(4, 4).weight
    handle.wait()


@on_mesh()
def taken(mesh: Any) -> str:
    try:
        _taken_while_gathered(mesh)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_parameter_that_is_replaced_while_it_is_gathered(pool: Any) -> None:
    for text in pool.run(2, taken):
        assert "the parameter 'weight' was replaced" in text, text


def saved_without_the_others(directory: str) -> str:
    """Save a tensor that is sharded over two ranks, on each of the ranks alone."""
    whole, alone = DeviceMesh(None, [0, 1]), [DeviceMesh(None, [rank]) for rank in range(2)]
    if whole.get_coordinate() is None:  # a rank of the pool that was not asked for, which takes part in making groups
        return ""
    state = {"x": distribute_tensor(get_adapter().tensor(floats(4, 4)), whole, [Shard(0)])}
    try:
        save(state, Path(directory) / str(whole.get_rank()), mesh=alone[whole.get_rank()])
    except ValueError as error:
        return str(error)
    return "nothing"


def test_what_some_ranks_save(pool: Any, tmp_path: Path) -> None:
    for rank, text in enumerate(pool.run(2, saved_without_the_others, str(tmp_path))):
        assert f"the saving ranks [{rank}] do not hold all of its shards: let all ranks of the mesh save" in text
    assert not any(tmp_path.iterdir()), "nothing was written"


@on_mesh(1, 2, names=("dp", "tp"))
def said(mesh: Any) -> dict[str, str]:
    found = {}
    for wanted, call in wrong_uses(mesh).items():
        with CommDebugMode() as comm:
            try:
                call()
                found[wanted] = "nothing"
            except Exception as error:
                found[wanted] = f"{type(error).__name__}: {error}"
        assert comm.get_total_counts() == 0, wanted
    return found


def test_each_is_an_error_on_all_ranks(pool: Any) -> None:
    first, second = pool.run(2, said)
    assert first == second
    assert {wanted: text for wanted, text in first.items() if not text.startswith(wanted)} == {}
