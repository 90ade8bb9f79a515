"""The same plans and redistributions with torch's own DTensor: equal results, no more collectives, fewer traps."""

from __future__ import annotations

import copy
import itertools
import os
import re
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs_dtensor
import torch.distributed.tensor.parallel as theirs_parallel
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode as TheirCommDebugMode
from torch.distributed.tensor.experimental import implicit_replication as their_implicit_replication

import hyper_parallel
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import torch_adapter as adapter
from hyper_parallel.testing.extent import in_gate, on_ranks
from tests.torch.support import close, device, randn

NAMES = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "parallelize_module",
]
DTENSOR_NAMES = ["DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"]

#: The two libraries under the same names.
TORCH = SimpleNamespace(
    **{name: getattr(theirs_parallel, name) for name in NAMES},
    **{name: getattr(theirs_dtensor, name) for name in DTENSOR_NAMES},
    CommDebugMode=TheirCommDebugMode,
    implicit_replication=their_implicit_replication,
    rand=theirs_dtensor.rand,
)
OURS = SimpleNamespace(
    **{name: getattr(hyper_parallel, name) for name in (*NAMES, *DTENSOR_NAMES)},
    CommDebugMode=hyper_parallel.CommDebugMode,
    implicit_replication=hyper_parallel.implicit_replication,
    rand=hyper_parallel.rand,
)

_TORCH_MESHES: dict[tuple[int, ...], Any] = {}


def meshes(*shape: int) -> list[tuple[Any, Any]]:
    """(library, its mesh over the first ranks) for torch's and ours; empty on a rank outside."""
    ours = spmd.device_mesh(*shape)
    if shape not in _TORCH_MESHES:
        ranks = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
        _TORCH_MESHES[shape] = theirs_dtensor.DeviceMesh(device().type, ranks)
    return [] if ours is None else [(TORCH, _TORCH_MESHES[shape]), (OURS, ours)]


def whole(x: Any) -> torch.Tensor:
    """The whole tensor of either library's DTensor."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


# ---------------------------------------------------------------------- plans


def mlp_plan(lib: Any) -> dict[str, Any]:
    return {"up": lib.ColwiseParallel(), "down": lib.RowwiseParallel()}


def attention_plan(lib: Any) -> dict[str, Any]:
    into = lib.PrepareModuleInput(input_layouts=lib.Replicate(), desired_input_layouts=lib.Replicate())
    return {"": into, "w[qkv]": lib.ColwiseParallel(), "wo": lib.RowwiseParallel()}


def block_plan(lib: Any) -> dict[str, Any]:
    shard, whole = lib.Shard(1), lib.Replicate()
    into = lib.PrepareModuleInput(input_layouts=shard, desired_input_layouts=whole)
    return {
        "": lib.PrepareModuleInputOutput(
            input_layouts=shard, desired_input_layouts=shard, output_layouts=shard, desired_output_layouts=shard
        ),
        "norm1": lib.SequenceParallel(),
        "norm2": lib.SequenceParallel(),
        "attention": into,
        "attention.w[qkv]": lib.ColwiseParallel(),
        "attention.wo": lib.RowwiseParallel(output_layouts=shard, use_local_output=False),
        "feed_forward": into,
        "feed_forward.w[13]": lib.ColwiseParallel(),
        "feed_forward.w2": lib.RowwiseParallel(output_layouts=shard, use_local_output=False),
    }


def language_model_plan(lib: Any) -> dict[str, Any]:
    return {
        "0": lib.RowwiseParallel(input_layouts=lib.Replicate(), output_layouts=lib.Shard(1)),
        "1": lib.SequenceParallel(),
        "2": lib.ColwiseParallel(input_layouts=lib.Shard(1), output_layouts=lib.Replicate()),
    }


#: name -> (model, plan, whole input, dim along which the model is given a part of it, None for the whole)
PLANS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[], torch.Tensor], int | None]] = {
    "mlp": (lambda: adapter.Mlp(8, 24), mlp_plan, lambda: randn(3, 8), None),
    "attention": (lambda: adapter.Attention(24, 2), attention_plan, lambda: randn(2, 5, 24), None),
    "attention, input not prepared": (
        lambda: adapter.Attention(24, 2),
        lambda lib: {"w[qkv]": lib.ColwiseParallel(), "wo": lib.RowwiseParallel()},
        lambda: randn(2, 5, 24),
        None,
    ),
    "sequence-parallel block": (lambda: adapter.Block(24, 36, 2), block_plan, lambda: randn(2, 12, 24), 1),
    "column-wise embedding": (
        lambda: nn.Embedding(12, 24),
        lambda lib: lib.ColwiseParallel(output_layouts=lib.Replicate()),
        lambda: torch.arange(24).remainder(12).reshape(2, 12),
        None,
    ),
    "row-wise embedding": (
        lambda: nn.Embedding(12, 24),
        lambda lib: lib.RowwiseParallel(input_layouts=lib.Replicate()),
        lambda: torch.arange(24).remainder(12).reshape(2, 12),
        None,
    ),
    "embedding, norm and head": (
        lambda: nn.Sequential(nn.Embedding(12, 24), nn.LayerNorm(24), nn.Linear(24, 12)),
        language_model_plan,
        lambda: torch.arange(24).remainder(12).reshape(2, 12),
        None,
    ),
}


def run_plan(size: int, name: str) -> list[dict[str, Any]]:
    """Forward and backward with both libraries; their counts until each gradient is placed as its parameter."""
    build, plan, make_input, dim = PLANS[name]
    both = meshes(size)
    torch.manual_seed(3)
    model = build().to(device())
    x = make_input().to(device())
    results = []
    for lib, mesh in both:
        sharded = lib.parallelize_module(copy.deepcopy(model), mesh, plan(lib))
        mine = x if dim is None else x.chunk(size, dim)[mesh.get_local_rank()].contiguous()
        mine = mine.clone().requires_grad_(mine.is_floating_point())
        with lib.CommDebugMode() as comm:
            y = sharded(mine)
            (y * randn(*y.shape, seed=4)).sum().backward()
            for p in sharded.parameters():
                p.grad = p.grad.redistribute(placements=p.placements)
        results.append(
            {
                "collectives": comm.get_total_counts(),
                "output": y.detach(),
                "gradient of the input": mine.grad,
                **{f"gradient of {n}": whole(p.grad) for n, p in sharded.named_parameters()},
            }
        )
    if results:
        theirs, ours = results
        assert set(theirs) == set(ours)
        for key in set(theirs) - {"collectives"}:
            if theirs[key] is None:
                assert ours[key] is None, key
            else:
                close(ours[key], theirs[key], key)
    return [r["collectives"] for r in results]


@on_ranks(2, 4)
@pytest.mark.parametrize("name", PLANS)
def test_plan(pool: Any, name: str, world_size: int) -> None:
    for theirs, ours in pool.run(world_size, run_plan, world_size, name):
        assert 0 < ours <= theirs
        if name == "attention, input not prepared":  # one all-reduce for wq, wk and wv together
            assert ours == theirs - 2


# ---------------------------------------------------------------------- redistribution


def run_transitions(shape: tuple[int, ...], size: tuple[int, ...]) -> int:
    """Every transition from local tensors to local tensors, forward and backward."""
    both = meshes(*shape)
    compared = 0
    sources, targets = ("R", "P", "S0", "S1"), ("R", "S0", "S1")
    for source, target in itertools.product(
        itertools.product(sources, repeat=len(shape)), itertools.product(targets, repeat=len(shape))
    ):
        results = []
        for lib, mesh in both:
            made = {"R": lib.Replicate(), "P": lib.Partial(), "S0": lib.Shard(0), "S1": lib.Shard(1)}
            x = randn(*size)
            distributed = lib.distribute_tensor(x, mesh, [made[s] if s != "P" else made["R"] for s in source])
            local = distributed.to_local().detach().clone()
            for mesh_dim, s in enumerate(source):
                if s == "P":
                    local = local * (mesh.get_local_rank(mesh_dim) + 0.5)
            local.requires_grad_(True)
            stride = x.stride()
            y = lib.DTensor.from_local(
                local, mesh, [made[s] for s in source], run_check=False, shape=torch.Size(size), stride=stride
            ).redistribute(placements=[made[t] for t in target])
            out = y.to_local()
            (out * randn(*size, seed=2)[tuple(slice(n) for n in out.shape)]).sum().backward()
            results.append((out.detach(), local.grad))
        if results:
            for ours, theirs, what in zip(results[1], results[0], ("value", "gradient"), strict=True):
                close(ours, theirs, f"{what} of {source} -> {target}")
            compared += 1
    return compared


@pytest.mark.parametrize("size", in_gate([(12, 8), (5, 7)], [(5, 7)]), ids=str)
@pytest.mark.parametrize("mesh", in_gate([(2,), (4,), (2, 2)], [(2, 2)]), ids=str)
def test_redistribution(pool: Any, mesh: tuple[int, ...], size: tuple[int, ...]) -> None:
    ranks = 2 if mesh == (2,) else 4
    assert set(pool.run(ranks, run_transitions, mesh, size)) == {12 if len(mesh) == 1 else 144}


# ---------------------------------------------------------------------- errors and refusals of torch


class Scaled(nn.Linear):
    def forward(self, x: Any, scale: float) -> Any:
        return super().forward(x) * scale


def further_positional_arguments(lib: Any, mesh: Any) -> bool:
    """Styles pass all positional arguments to the module."""
    model = lib.parallelize_module(Scaled(4, 6).to(device()), mesh, lib.ColwiseParallel())
    return model(randn(3, 4), 2.0).shape == (3, 3)


def reduce_twice(lib: Any, mesh: Any) -> bool:
    """The output of a vocabulary-sharded embedding is an ordinary partial sum."""
    table, ids = randn(6, 3), torch.tensor([5, 0, 2], device=device())
    weight = lib.distribute_tensor(table, mesh, [lib.Shard(0)])
    ids_everywhere = lib.distribute_tensor(ids, mesh, [lib.Replicate()])
    y = F.embedding(ids_everywhere, weight)
    first, second = (whole(y.redistribute(placements=[lib.Replicate()])) for _ in range(2))
    return bool((first == second).all() and (first == table[ids]).all())


def tied_weights(lib: Any, mesh: Any) -> bool:
    """A parameter that two modules share stays one."""
    model = adapter.Tied(12, 4).to(device())
    plan = {
        "embedding": lib.RowwiseParallel(input_layouts=lib.Replicate()),
        "head": lib.ColwiseParallel(output_layouts=lib.Replicate()),
    }
    lib.parallelize_module(model, mesh, plan)
    return model.embedding.weight is model.head.weight


def source_rank_of_the_root(lib: Any, mesh: Any) -> bool:
    """A style for ``""`` takes src_data_rank too."""
    model = nn.Linear(4, 6).to(device())
    with torch.no_grad():
        model.weight.fill_(float(mesh.get_local_rank()))
    lib.parallelize_module(model, mesh, {"": lib.ColwiseParallel()}, src_data_rank=1)
    return bool((whole(model.weight) == 1).all())


def nested_implicit_replication(lib: Any, mesh: Any) -> bool:
    """Leaving an inner scope does not end the outer one."""
    x = lib.distribute_tensor(randn(4, 3), mesh, [lib.Shard(0)])
    with lib.implicit_replication():
        with lib.implicit_replication():
            x + randn(4, 3)
        return bool((whole(x + randn(4, 3)) == 2 * randn(4, 3)).all())


def dropout_of_shards(lib: Any, mesh: Any) -> bool:
    """Dropout of a sharded tensor is that of a single device; shards do not all drop the same elements."""
    torch.manual_seed(1)
    wanted = F.dropout(randn(8, 16) + 9, 0.5)
    torch.manual_seed(1)
    if lib is OURS:
        hyper_parallel.manual_seed(1, mesh)
    got = whole(F.dropout(lib.distribute_tensor(randn(8, 16) + 9, mesh, [lib.Shard(0)]), 0.5))
    return bool((got == wanted).all())


def uneven_hidden_features(lib: Any, mesh: Any) -> bool:
    """Default styles, 7 hidden features over 2 ranks."""
    torch.manual_seed(3)
    model = adapter.Mlp(4, 7).to(device())
    wanted = model(randn(3, 4))
    got = lib.parallelize_module(model, mesh, {"up": lib.ColwiseParallel(), "down": lib.RowwiseParallel()})(randn(3, 4))
    return bool(torch.allclose(got, wanted, atol=1e-5))


def numbers_on_any_device(lib: Any, mesh: Any) -> bool:
    """`rand` gives the numbers of a single device."""
    torch.manual_seed(1)
    if lib is OURS:
        hyper_parallel.manual_seed(1, mesh)
    got = whole(lib.rand(4, 3, device_mesh=mesh, placements=[lib.Shard(0)]))
    torch.manual_seed(1)
    return bool((got == torch.rand(4, 3, device=device())).all())


def wrong_reduction(lib: Any, mesh: Any) -> bool:
    """An unknown reduction is refused where it is written down."""
    try:
        lib.Partial("bogus")
    except ValueError:
        return True
    return False


def dimension_out_of_range(lib: Any, mesh: Any) -> bool:
    """A dimension that does not exist is an error that says so."""
    try:
        lib.distribute_tensor(randn(4, 3), mesh, [lib.Shard(-3)])
    except (ValueError, IndexError) as error:
        return "out of range" in str(error)
    return False


#: On other devices torch draws with a tracker of its own, which sends its state to all ranks of the world.
ON_CPU_ONLY = {"dropout_of_shards", "numbers_on_any_device"}
TRAPS = {
    trap.__name__: trap
    for trap in (
        further_positional_arguments,
        reduce_twice,
        tied_weights,
        source_rank_of_the_root,
        nested_implicit_replication,
        dropout_of_shards,
        uneven_hidden_features,
        numbers_on_any_device,
        wrong_reduction,
        dimension_out_of_range,
    )
    if os.environ["HYPER_PARALLEL_PLATFORM"] == "torch-cpu" or trap.__name__ not in ON_CPU_ONLY
}


#: Torch's result for each: "wrong", or its exception with the function or the words in it. Another exception may be of
#: the test's own making, and shows nothing.
IN_TORCH = {
    "further_positional_arguments": r"TypeError in .*: .*forward\(\) missing 1 required positional argument: 'scale'",
    "reduce_twice": "AssertionError in _reduce_value: ",
    "tied_weights": "wrong",
    "source_rank_of_the_root": "wrong",
    "nested_implicit_replication": "RuntimeError in .*: .*got mixed torch.Tensor and DTensor",
    "dropout_of_shards": "wrong",
    "uneven_hidden_features": "RuntimeError in .*: a and b must have same reduction dim",
    "numbers_on_any_device": "AssertionError in _dtensor_init_helper: ",
    "wrong_reduction": "wrong",
    "dimension_out_of_range": "RuntimeError in .*: Padding length should be less than or equal to two times",
}


def run_trap(name: str) -> list[str]:
    """The outcome in torch and here: "right", "wrong", or the exception with the library that raised it and its
    text."""
    outcomes = []
    for lib, mesh in meshes(2):
        try:
            outcomes.append("right" if TRAPS[name](lib, mesh) else "wrong")
        except Exception as error:
            if lib is OURS:
                raise
            raised_in = traceback.extract_tb(error.__traceback__)[-1].name
            outcomes.append(f"{type(error).__name__} in {raised_in}: {error}")
    return outcomes


# The same with torch 2.13, 2.14 and 2.15.
@pytest.mark.parametrize("name", TRAPS)
def test_what_torch_gets_wrong_or_refuses(pool: Any, name: str) -> None:
    for theirs, ours in pool.run(2, run_trap, name):
        assert ours == "right"
        assert theirs != "right", "torch has learned it: take it off the list, or say from which version on"
        assert re.match(IN_TORCH[name], theirs), theirs
