"""Comparison of a parallelised model with the same model on one device.

The conformance suite and ``hyper-parallel test`` share this code. This module needs no pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.summands import summands

__all__ = ["block", "block_plan", "compare", "difference", "floats", "local_parts", "same", "slices_of"]

TOLERANCE = 2e-5


def same(got: Any, wanted: Any, what: str, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless the norm of the difference is small relative to the norm of ``wanted``.

    Values in the suite are of order one. Where ``wanted`` is near zero, the difference is measured against 0.01.
    """
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape:  # no assert statement, because `python -O hyper-parallel test` must check too
        raise AssertionError(f"{what}: shape {got.shape}, wanted {wanted.shape}")
    if wanted.size == 0:
        return
    scale = max(float(np.linalg.norm(wanted.astype(np.float64))), 0.01 * wanted.size**0.5)
    error = float(np.linalg.norm(got.astype(np.float64) - wanted.astype(np.float64))) / scale
    if not error <= tolerance:
        raise AssertionError(f"{what}: relative error {error:.2e}\ngot\n{got}\nwanted\n{wanted}")


def local_parts(x: np.ndarray, layout: Any, rng: np.random.Generator) -> np.ndarray:
    """Return this rank's local array of a tensor with value ``x``. For `Partial`, each rank has a different summand.

    ``rng`` must be in the same state on every rank.
    """
    mesh = layout.mesh
    mine = x
    for mesh_dim, placement in enumerate(layout.placements):
        if placement.is_partial("sum"):
            mine = summands(mine, mesh.shape[mesh_dim], rng)[mesh.get_coordinate()[mesh_dim]]
        elif placement.is_partial():
            raise ValueError(f"no summands for {placement}")
    # Summands are drawn for the full tensor, so that ranks that hold the same shard draw the same numbers.
    return np.ascontiguousarray(mine[layout.local_index()])


def compare(
    build: Callable[[Any], Any],
    plan: Any,
    array: np.ndarray,
    mesh: Any,
    *,
    takes: Any = None,
    gives: Any = None,
    distributed_input: bool = False,
) -> dict[str, dict[str, int]]:
    """Parallelise a model, and compare one forward and backward with the unsharded model.

    Args:
        build: ``build(adapter)`` makes the model. It is called twice; the weights are loaded afterwards.
        plan: the plan.
        array: the full input.
        mesh: 1-D mesh.
        takes: placement of the input, which the model gets as a plain local tensor; None for replicated.
        distributed_input: whether the model gets the input as a DTensor with placement ``takes`` instead.
        gives: placement of the plain local output; None for replicated.

    Returns:
        Numbers of collectives in forward and in backward.
    """
    adapter = get_adapter()
    single, sharded = (adapter.load(build(adapter), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, plan)
    takes, gives = takes or Replicate(), gives or Replicate()
    weights: list[np.ndarray] = []

    def reference(x: Any) -> Any:
        y = adapter.call(single, x)
        weights.append(np.random.default_rng(6).standard_normal(tuple(y.shape)).astype(np.float32))
        return adapter.weighted_sum(y, adapter.tensor(weights[0])), y

    counts: dict[str, dict[str, int]] = {}

    def distributed(x: Any) -> Any:
        if distributed_input:
            x = DTensor.from_local(x, mesh, [takes], shape=array.shape)
        with CommDebugMode() as comm:
            y = adapter.call(sharded, x)
        counts["forward"] = comm.get_comm_counts()
        assert not isinstance(y, DTensor)
        whole = DTensor.from_local(y, mesh, [gives], shape=weights[0].shape)
        mine = weights[0][whole._layout.local_index()]
        return adapter.weighted_sum(y, adapter.tensor(mine)), whole

    y, grad_x, grads = adapter.model_value_and_grads(single, reference, array)
    local = array[slices_of(takes, array.shape, mesh)]
    with CommDebugMode() as comm:
        got_y, got_grad_x, got_grads = adapter.model_value_and_grads(sharded, distributed, local)
    counts["backward"] = difference(comm.get_comm_counts(), counts["forward"])
    same(adapter.numpy(got_y), adapter.numpy(y), "output")
    if grad_x is not None:
        same(got_grad_x, grad_x[slices_of(takes, array.shape, mesh)], "gradient of the input")
    assert set(got_grads) == set(grads)
    for name in grads:
        if grads[name] is None:
            assert got_grads[name] is None, name
        else:
            same(adapter.numpy(got_grads[name]), adapter.numpy(grads[name]), f"gradient of {name}")
    return counts


def slices_of(placement: Any, shape: tuple[int, ...], mesh: Any) -> Any:
    """Return the index of this rank's shard in the array of a full tensor."""
    return get_layout(mesh, (placement,), shape).local_index()


def difference(more: dict[str, int], less: dict[str, int]) -> dict[str, int]:
    """Subtract earlier counts from later counts. Names with a difference of zero are left out."""
    return {k: n - less.get(k, 0) for k, n in more.items() if n > less.get(k, 0)}


def floats(*shape: int) -> np.ndarray:
    """Return random numbers of order one, the same on every rank."""
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def block_plan(local_between: bool) -> dict[str, Any]:
    """Return the plan of a sequence-parallel Llama block."""
    into = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "": PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Shard(1),
            output_layouts=Shard(1),
            desired_output_layouts=Shard(1),
        ),
        "norm?": SequenceParallel(),
        "attention": into,
        "attention.w[qkv]": ColwiseParallel(use_local_output=local_between),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "feed_forward": into,
        "feed_forward.w[13]": ColwiseParallel(use_local_output=local_between),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }


@spmd.on_mesh()
def block(mesh: Any, local_between: bool, length: int) -> Any:
    """Return the result of `compare` for a Llama block with `block_plan`."""
    return compare(
        lambda adapter: adapter.Block(24, 36, 2),
        block_plan(local_between),
        floats(2, length, 24),
        mesh,
        takes=Shard(1),
        gives=Shard(1),
    )
