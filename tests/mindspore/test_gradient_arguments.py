"""`value_and_grad` and `grad` with ``return_ids`` and ``sens_param``: MindSpore's results on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.mindspore import grad, value_and_grad
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import error_of, whole


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def flat(tree: Any) -> list[Any]:
    """The leaves of nested tuples, with their shape as brackets."""
    if isinstance(tree, (tuple, list)):
        return ["(", *(leaf for item in tree for leaf in flat(item)), ")"]
    return [whole(tree) if isinstance(tree, Tensor) else tree]


def same(a: Any, b: Any) -> bool:
    pairs = list(zip(flat(a), flat(b), strict=False))
    arrays = [np.allclose(x, y, rtol=1e-4, atol=1e-5) if isinstance(x, np.ndarray) else x == y for x, y in pairs]
    return len(flat(a)) == len(flat(b)) and all(arrays)


def net(rows: int, mesh: Any = None) -> nn.Cell:
    made = nn.SequentialCell(nn.Dense(4, rows, weight_init=Tensor(numbers(rows, 4)), bias_init=Tensor(numbers(rows))))
    if mesh is not None:
        style = ColwiseParallel(use_local_output=False)
        parallelize_module(made, mesh, {"0": style})
    return made


#: (positions, whether weights are asked for)
ASKED = ((0, False), ((0, 1), False), (None, True), (0, True), ((0, 1), True))


@on_mesh()
def problems(mesh: Any, rows: int) -> list[str]:
    found = []
    x, scale, sens = numbers(3, 4, seed=1), numbers(3, 1, seed=2), numbers(3, rows, seed=3)
    for positions, by_weights in ASKED:
        for ids in (False, True):
            for with_sens in (False, True):
                for aux in (False, True):
                    name = f"{positions}, {by_weights}, ids {ids}, sens {with_sens}, aux {aux}"
                    for functions in ((ms.value_and_grad, value_and_grad), (ms.grad, grad)):
                        results = [
                            result_of(
                                function,
                                made,
                                mesh if made is parallel else None,
                                positions,
                                by_weights,
                                ids,
                                with_sens,
                                aux,
                                (x, scale, sens),
                            )
                            for parallel in [net(rows, mesh)]
                            for function, made in zip(functions, (net(rows), parallel), strict=True)
                        ]
                        if not same(*results):
                            found.append(f"{name}, {functions[1].__name__}: {results}")
    return found


def result_of(
    function: Callable,
    made: nn.Cell,
    mesh: Any,
    positions: Any,
    by_weights: bool,
    ids: bool,
    with_sens: bool,
    aux: bool,
    values: Any,
) -> Any:
    x, scale, sens = map(Tensor, values)
    if mesh is not None:
        scale = distribute_tensor(scale, mesh, [Replicate()])
        sens = distribute_tensor(sens, mesh, [Shard(0)])

    def run(x: Any, scale: Any) -> Any:
        y = made(x) * scale
        y = y if with_sens else y.sum()
        return (y, y * 2) if aux else y

    weights = made.trainable_params() if by_weights else None
    inputs = (x, scale, sens) if with_sens else (x, scale)
    return function(run, positions, weights, aux, ids, with_sens)(*inputs)


@pytest.mark.parametrize("rows", in_gate((6, 5, 1), (5,)))
def test_arguments(pool: Any, rows: int) -> None:
    assert pool.run(2, problems, rows) == [[], []]


@on_mesh()
def sensitivities(mesh: Any) -> dict[str, Any]:
    """Sensitivities of all placements, of several outputs, and by name; misfits are refused."""
    values, sens = numbers(4, 6), numbers(4, 6, seed=1)
    places = (Shard(0), Shard(1), Replicate(), Partial())
    far = []
    for place in places:
        for given in places[:3]:
            x = distribute_tensor(Tensor(values), mesh, [place])
            s = distribute_tensor(Tensor(sens), mesh, [given])
            got = grad(lambda x: x * 3, sens_param=True)(x, s)
            if not np.allclose(whole(got), sens * 3, atol=1e-5):
                far.append(f"{place}, {given}")
    x, s = distribute_tensor(Tensor(values), mesh, [Shard(0)]), distribute_tensor(Tensor(sens), mesh, [Shard(1)])
    several = grad(lambda x: (x * 3, x * 2), sens_param=True)(x, (s, s))
    by_name = grad(lambda x: x * 3, sens_param=True)(x, sens=s)
    with_ids = value_and_grad(lambda x: x.sum(), return_ids=True)(x)[1]
    errors = []
    for given in ((s, s), distribute_tensor(Tensor(sens[:2]), mesh, [Shard(1)]), Tensor(sens)):
        function = (lambda x: (x * 3, x, x)) if isinstance(given, tuple) else (lambda x: x * 3)
        with CommDebugMode() as comm:
            errors.append(error_of(grad(function, sens_param=True), x, given))
        errors.append(comm.get_total_counts())
    return {
        "far": far,
        "several": np.allclose(whole(several), sens * 5, atol=1e-5),
        "by name": np.allclose(whole(by_name), sens * 3, atol=1e-5),
        "ids": isinstance(ms.get_grad(with_ids, 0), DTensor),
        "errors": errors,
    }


def test_sensitivities(pool: Any) -> None:
    for result in pool.run(2, sensitivities):
        several, sent, shape, sent_too, plain, sent_then = result.pop("errors")
        assert several.startswith(
            "ValueError: the function has 3 outputs: pass a tuple with one sensitivity for each"
        ), several
        assert shape.startswith("ValueError: the output has shape (4, 6), but its sensitivity has shape (2, 6)"), shape
        assert plain.startswith("ValueError") and "plain tensor" in plain, plain
        assert sent == sent_too == sent_then == 0
        assert result == {"far": [], "several": True, "by name": True, "ids": True}
