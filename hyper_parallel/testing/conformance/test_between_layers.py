"""Checks of a plan for code between layers: latent keys and values, and layers that pack several matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    NoParallel,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_fused_weights import holder
from hyper_parallel.testing.extent import on_ranks

#: Features of the hidden states, of the latent, of the shared part; heads, and features of one.
HIDDEN, LATENT, SHARED, HEADS, SIZE = 12, 6, 2, 12, 3
PLAN = {"wq": ColwiseParallel(), "wkv_b": ColwiseParallel(), "wo": RowwiseParallel()}


def attention() -> Any:
    """Return the projections of DeepSeek's attention, and a function that computes attention without softmax for any
    number of heads."""
    adapter = get_adapter()
    model = holder(
        inp=(HIDDEN, HIDDEN),
        wq=(HIDDEN, HEADS * (SIZE + SHARED)),
        wkv_a=(HIDDEN, LATENT + SHARED),
        wkv_b=(LATENT, HEADS * 2 * SIZE),
        wo=(HEADS * SIZE, HIDDEN),
    )
    adapter.load(model, np.random.default_rng(0))

    def run(model: Any, x: Any) -> Any:
        call, reshape, add = adapter.call, adapter.reshape, adapter.sum
        x = call(model.inp, x)
        b, t = x.shape[:2]
        q = reshape(call(model.wq, x), (b, t, -1, SIZE + SHARED))
        given = call(model.wkv_a, x)
        latent, shared = given[..., :LATENT], given[..., LATENT:]
        kv = reshape(call(model.wkv_b, latent), (b, t, -1, 2 * SIZE))
        k, v = kv[..., :SIZE], kv[..., SIZE:]
        y = add(q[..., :SIZE] * k, -1) + add(q[..., SIZE:] * reshape(shared, (b, t, 1, SHARED)), -1)
        return call(model.wo, reshape(reshape(y, (b, t, -1, 1)) * v, (b, t, -1)))

    return model, run


def compared(mesh: Any, plan: dict[str, Any]) -> int:
    """Compare values and gradients with a single device. Return the number of collectives."""
    adapter = get_adapter()
    (single, run), (model, _) = attention(), attention()
    parallelize_module(model, mesh, plan)

    def loss_of(model: Any) -> Any:
        def loss(x: Any) -> Any:
            y = run(model, x)
            return adapter.sum(adapter.square(y)), y

        return loss

    x = floats(2, 3, HIDDEN)
    wanted = adapter.model_value_and_grads(single, loss_of(single), x)
    with CommDebugMode() as comm:
        got = adapter.model_value_and_grads(model, loss_of(model), x)
    np.testing.assert_allclose(adapter.numpy(got[0]), adapter.numpy(wanted[0]), rtol=1e-4)
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-3, atol=1e-3)
    for name, gradient in wanted[2].items():
        expected = adapter.numpy(gradient)
        np.testing.assert_allclose(
            adapter.numpy(got[2][name]) / abs(expected).max(), expected / abs(expected).max(), atol=1e-4, err_msg=name
        )
    return int(comm.get_total_counts())


@spmd.on_mesh()
def latent_keys(mesh: Any) -> None:
    ranks = mesh.size()
    counts = {
        compared(mesh, {**PLAN, "wkv_a": NoParallel(partial_features=SHARED)}),
        compared(mesh, {**PLAN, "wkv_a": NoParallel(partial_features=SHARED), "wkv_b": ColwiseParallel(packed=1)}),
    }
    # Forward: wo. Backward: the hidden states that wq reads, the latent that wkv_b reads, the shared part.
    assert counts == {4 if ranks > 1 else 0}, counts
    refused: dict[str, Any] = {
        "not in the plan": {},
        "NoParallel": {"wkv_a": NoParallel()},
        "gathered": {"wkv_a": ColwiseParallel(output_layouts=Replicate())},
    }
    for styles in refused.values():
        with fails(ValueError, "'wkv_a' returns 8", "'wkv_b' takes 6", "NoParallel(partial_features=2)", str(mesh)):
            parallelize_module(attention()[0], mesh, {**PLAN, **styles})
    told = {"wkv_a": NoParallel(partial_features=SHARED)}
    with fails(ValueError, "'wkv_b'", "as in latent attention", "Leave packed= out", "heads=(keys, values)"):
        parallelize_module(attention()[0], mesh, {**PLAN, **told, "wkv_b": ColwiseParallel(packed=2)})
    # The settings of other layers count.
    for style in (
        NoParallel(partial_features=0),
        NoParallel(local_output_grad_placements=(Replicate(),)),
        NoParallel(use_local_output=False),
    ):
        parallelize_module(attention()[0], mesh, {**PLAN, "wkv_a": style})
    halves = ColwiseParallel(heads=(HEADS, HEADS))
    parallelize_module(attention()[0], mesh, {**PLAN, **told, "wkv_b": halves})


@on_ranks(1, 2, 3, 4)
def test_keys_and_values_of_a_latent(pool: Any, world_size: int) -> None:
    pool.run(world_size, latent_keys)


@spmd.on_mesh()
def read_by_some(mesh: Any) -> None:
    """Check a replicated output.

    Each rank multiplies all or the last features by its shard of features."""
    adapter = get_adapter()

    def loss_of(model: Any) -> Any:
        def loss(x: Any) -> Any:
            read = adapter.sum(adapter.call(model.gate, x)[..., -4:], -1, True)
            z = adapter.call(model.up, x)
            z = adapter.call(model.down, z * read)
            return adapter.sum(adapter.square(z)), z

        return loss

    x = floats(2, 3, 6)
    for features, how in ((4, {"local_output_grad_placements": (Partial(),)}), (7, {"partial_features": 4})):
        sizes = {"gate": (6, features), "up": (6, 12), "down": (12, 6)}
        single, model = (adapter.load(holder(**sizes), np.random.default_rng(1)) for _ in range(2))
        plan = {"gate": NoParallel(**how), "up": ColwiseParallel(), "down": RowwiseParallel()}  # type: ignore[arg-type]
        parallelize_module(model, mesh, plan)
        wanted = adapter.model_value_and_grads(single, loss_of(single), x)
        got = adapter.model_value_and_grads(model, loss_of(model), x)
        np.testing.assert_allclose(got[1], wanted[1], rtol=1e-3, atol=1e-3)
        for name, gradient in wanted[2].items():
            expected = adapter.numpy(gradient)
            np.testing.assert_allclose(adapter.numpy(got[2][name]), expected, rtol=1e-3, atol=1e-3, err_msg=name)


@on_ranks(1, 2, 3, gate=(1, 3))
def test_an_output_that_is_read_by_parts(pool: Any, world_size: int) -> None:
    pool.run(world_size, read_by_some)


@spmd.on_mesh()
def several_in_one(mesh: Any) -> None:
    """Check layers whose output has two or three times the input features of the next layer, under all known names."""
    for name in ("qkv", "proj_in", "w1"):
        for attributes in ({}, {"head_dim": 4}, {"hidden_size": 24}):
            for times, word in ((2, "twice"), (3, "three times")):
                for inputs in (24, 20):
                    sizes = {name: (inputs, 24 * times), "out": (24, inputs)}
                    plan = {name: ColwiseParallel(), "out": RowwiseParallel()}
                    with fails(
                        ValueError, f"{name!r} has {24 * times}", word, f"packed={times}", "packed=1", str(mesh)
                    ):
                        parallelize_module(holder(attributes, **sizes), mesh, plan)
                    for packed in (times, 1):
                        fine = {**plan, name: ColwiseParallel(packed=packed)}
                        parallelize_module(holder(attributes, **sizes), mesh, fine, src_data_rank=None)


@on_ranks(1, 2)
def test_layers_that_are_several_in_one(pool: Any, world_size: int) -> None:
    pool.run(world_size, several_in_one)


def test_what_no_parallel_takes() -> None:
    with pytest.raises(TypeError, match=r"partial_features=\.\.\.\) takes a number of features, got 'two'"):
        NoParallel(partial_features="two")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"partial_features=-1\): pass a number, at least 0"):
        NoParallel(partial_features=-1)
    with pytest.raises(ValueError, match="leave local_output_grad_placements out"):
        NoParallel(partial_features=2, local_output_grad_placements=(Partial(),))
    with pytest.raises(ValueError, match="use Replicate"):
        NoParallel(local_output_grad_placements=(Shard(0),))
    for how in ({"use_local_output": False}, {"output_layout": Shard(1)}):
        with pytest.raises(ValueError, match="need output_layout=Replicate"):
            NoParallel(partial_features=2, **how)  # type: ignore[arg-type]
    style = NoParallel(local_output_grad_placements=Partial())
    assert style.local_output_grad_placements == (Partial(),)
    assert "partial_features=2" in repr(NoParallel(partial_features=2))


@spmd.on_mesh()
def more_than_there_are(mesh: Any) -> None:
    with fails(ValueError, "'gate': the layer has 4 output features", "correct partial_features=5"):
        parallelize_module(holder(gate=(6, 4)), mesh, {"gate": NoParallel(partial_features=5)})


def test_more_features_than_there_are(pool: Any) -> None:
    pool.run(1, more_than_there_are)
