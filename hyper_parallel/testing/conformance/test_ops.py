"""Every operation with every combination of placements: values and all gradients are the same as on plain tensors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hyper_parallel import DTensor, Partial, Replicate, Shard
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import local_parts, same
from hyper_parallel.testing.conformance.op_cases import CASES, Case
from hyper_parallel.testing.extent import everything

BY_NAME = {case.name: case for case in CASES}


def placements_of(array: np.ndarray, mesh_ndim: int) -> list[tuple]:
    """Return all placements of an operand. Integers and booleans are never partial."""
    single = [Replicate(), *(Shard(d) for d in range(array.ndim))]
    if np.issubdtype(array.dtype, np.floating):
        single.append(Partial())
    return list(itertools.product(single, repeat=mesh_ndim))


def run_case(mesh_shape: tuple[int, ...], name: str) -> int:
    """Check a case for many combinations of placements; return their number."""
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return 0
    adapter, case = get_adapter(), BY_NAME[name]
    rng = np.random.default_rng(0)
    arrays = case.arrays(rng)
    reference = reference_of(adapter, case, arrays)
    combinations = list(itertools.product(*(placements_of(a, mesh.ndim) for a in arrays)))
    # The brute force of tests/unit proves the rules: a few combinations show that the backend follows them.
    most = adapter.COMBINATIONS if everything() else adapter.COMBINATIONS // 4
    if len(combinations) > most:
        combinations = [combinations[i] for i in sorted(rng.choice(len(combinations), most, replace=False))]
    for combination in combinations:
        try:
            check(adapter, case, mesh, arrays, combination, reference)
        except Exception as error:
            raise AssertionError(f"{name} with operands placed {combination} on {mesh_shape}") from error
    return len(combinations)


def outputs_of(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def weights_for(adapter: Any, outputs: list[Any]) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.standard_normal(tuple(y.shape)).astype(np.float32) for y in outputs]


def total(adapter: Any, outputs: list[Any], weights: list[Any]) -> Any:
    terms = [adapter.weighted_sum(y, w) for y, w in zip(outputs, weights, strict=True)]
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result


def reference_of(adapter: Any, case: Case, arrays: list[np.ndarray]) -> tuple[list[np.ndarray], list[Any]]:
    def loss(*xs: Any) -> Any:
        outputs = outputs_of(case.run(adapter, *xs))
        return total(adapter, outputs, [adapter.tensor(w) for w in weights_for(adapter, outputs)]), outputs

    outputs, grads = adapter.value_and_grads(loss, arrays)
    return [adapter.numpy(y) for y in outputs], grads


def check(adapter: Any, case: Case, mesh: Any, arrays: list, combination: tuple, reference: Any) -> None:
    layouts = [get_layout(mesh, p, a.shape) for p, a in zip(combination, arrays, strict=True)]
    parts_rng = np.random.default_rng(3)
    locals_ = [local_parts(a, layout, parts_rng) for a, layout in zip(arrays, layouts, strict=True)]

    def loss(*xs: Any) -> Any:
        distributed = [
            DTensor.from_local(x, mesh, layout.placements, shape=layout.shape)
            for x, layout in zip(xs, layouts, strict=True)
        ]
        outputs = outputs_of(case.run(adapter, *distributed))
        replicated = (Replicate(),) * mesh.ndim
        weights = [DTensor.from_local(adapter.tensor(w), mesh, replicated) for w in weights_for(adapter, outputs)]
        return total(adapter, outputs, weights).full_tensor(), outputs

    outputs, grads = adapter.value_and_grads(loss, locals_)
    wanted_outputs, wanted_grads = reference
    for i, (y, wanted) in enumerate(zip(outputs, wanted_outputs, strict=True)):
        same(adapter.numpy(y), wanted, f"result {i}, placed {y.placements}")
    for i, (grad, wanted, layout) in enumerate(zip(grads, wanted_grads, layouts, strict=True)):
        if wanted is not None:
            same(grad, wanted[layout.cotangent.local_index()], f"gradient of operand {i}")


@pytest.mark.parametrize("name", BY_NAME)
def test_operation(pool: Any, name: str) -> None:
    for shape in [(2,), (3,), (2, 2)] if everything() else [(3,), (2, 2)]:
        size = int(np.prod(shape))
        assert all(count > 0 for count in pool.run(size, run_case, shape, name))
