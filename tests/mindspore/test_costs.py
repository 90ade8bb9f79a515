"""Work of a step of the standard models besides computing, counted: a guard of their speed that needs no clock."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor

import hyper_parallel
from benchmarks.mindspore_models import LlamaBlock, Mlp, RmsNorm, tables
from benchmarks.plans import llama_plan, mlp_plan
from benchmarks.sizes import LlamaSizes, MlpSizes
from hyper_parallel import CommDebugMode, DTensor, coalesce_gradients, get_platform, parallelize_module
from hyper_parallel.core.dtensor.tensor import dtensor_class
from hyper_parallel.core.tensor_parallel.program import uneven_shards
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.platform.mindspore import local_tensors
from hyper_parallel.platform.mindspore.processes import collectives
from hyper_parallel.testing.spmd import on_mesh


@contextmanager
def counted() -> Iterator[Counter]:
    """Operations dispatched, tensors copied and collectives."""
    seen: Counter = Counter()

    def count(name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return function(*args, **kwargs)

        return counting

    cls: Any = dtensor_class(get_platform())
    copied = count("copies", collectives.copied)
    with pytest.MonkeyPatch().context() as patch, CommDebugMode() as comm:
        patch.setattr(cls, "_dispatch", staticmethod(count("dispatches", cls._dispatch)))
        for module in (collectives, local_tensors):
            patch.setattr(module, "copied", copied)
        yield seen
    seen.update(comm.get_comm_counts())


def model_of(mesh: Any, name: str, dtensors: bool) -> tuple[Any, tuple]:
    """A model in parallel and its inputs."""
    if name == "MLP":
        sizes = MlpSizes()
        x = Tensor(np.ones((sizes.batch, sizes.features), np.float32))
        return parallelize_module(Mlp(sizes), mesh, mlp_plan(hyper_parallel, dtensors)), (x,)
    sizes, sequence = LlamaSizes(), "sequence" in name
    get_platform().register_norm_module(RmsNorm)
    model = parallelize_module(LlamaBlock(sizes), mesh, llama_plan(hyper_parallel, sequence, dtensors, tables=3))
    length = sizes.sequence // (mesh.size() if sequence else 1)
    x = Tensor(np.ones((sizes.batch, length, sizes.features), np.float32))
    return model, (x, *tables(sizes.sequence, sizes.head_size))


@on_mesh()
def costs(mesh: Any, name: str, dtensors: bool) -> list[dict[str, int]]:
    uneven_shards.HANDED_OUT.clear()  # an earlier test may have handed shards out
    mesh._has_uneven_shards = False
    model, inputs = model_of(mesh, name, dtensors)

    def loss(*inputs: Any) -> Any:
        y = model(*inputs)
        return (y.to_local() if isinstance(y, DTensor) else y).sum()

    differentiate = value_and_grad(loss, 0, model.trainable_params())

    def step() -> None:
        with coalesce_gradients():
            differentiate(*inputs)

    found = []
    for run in (lambda: model(*inputs), step):
        run()
        with counted() as seen:
            run()
        found.append(dict(sorted(seen.items())))
    return found


#: Forward, and forward and backward. Copies: CPU has no reduce-scatter, and needs them to sum and cut.
COSTS: dict[tuple[str, bool], list[dict[str, int]]] = {
    ("MLP", False): [{"all_reduce": 1}, {"all_reduce": 2}],
    ("MLP", True): [{"all_reduce": 1, "dispatches": 1}, {"all_reduce": 2, "dispatches": 1}],
    ("Llama block", False): [{"all_reduce": 2}, {"all_reduce": 4}],
    ("Llama block, sequence parallel", False): [
        {"all_gather": 2, "copies": 4, "reduce_scatter": 2},
        {"all_gather": 4, "all_reduce": 1, "copies": 8, "reduce_scatter": 4},
    ],
}


@pytest.mark.parametrize(("name", "dtensors"), COSTS)
def test_costs(pool: Any, name: str, dtensors: bool) -> None:
    assert pool.run(2, costs, name, dtensors) == [COSTS[name, dtensors]] * 2
