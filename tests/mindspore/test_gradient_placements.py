"""Gradients placed in another way than their parameters: optimizers take them to the parameters' placements."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    NoParallel,
    PackedShard,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.mindspore import grad, value_and_grad
from hyper_parallel.platform.mindspore.gradients.local_gradients import LocalGradients
from hyper_parallel.testing.extent import everything, in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import error_of, whole
from tests.mindspore.test_optimizers import COUPLED, OPTIMIZERS

STYLES: dict[str, Callable[[], Any]] = {
    "replicated": NoParallel,
    "columns": ColwiseParallel,
    "packed": lambda: ColwiseParallel(packed=3),
    "rows": RowwiseParallel,
    "none": lambda: None,
}
GIVEN = (Partial(), Replicate(), Shard(0), Shard(1), PackedShard(0, (2, 2, 2)))
CLIPS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda g: g,
    "nn.ClipByNorm": lambda g: nn.ClipByNorm()(g, Tensor(2.0)),
    "ops.clip_by_norm": lambda g: ops.clip_by_norm(g, 2.0),
    "ops.clip_by_global_norm": lambda g: ops.clip_by_global_norm((g,), 2.0)[0],
}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).integers(-8, 8, shape) / 8).astype(np.float32)


def net(rows: int, style: Any = None, mesh: Any = None) -> nn.Cell:
    made = nn.SequentialCell(nn.Dense(4, rows, weight_init=Tensor(numbers(rows, 4)), has_bias=False))
    return made if style is None else parallelize_module(made, mesh, {"0": style})


def placed(values: np.ndarray, mesh: Any, placement: Any) -> Any:
    if placement != Partial():
        return distribute_tensor(Tensor(values), mesh, [placement])
    rank, size = mesh.get_local_rank(), mesh.size()
    # Other summands on each rank.
    share = values * 2 if rank == 0 else -values / max(size - 1, 1)
    return DTensor.from_local(Tensor(share.astype(np.float32)), mesh, [Partial()])


def stepped(module: Any, make: Callable[[list], Any], gradients: list[Any]) -> np.ndarray:
    optimizer = make(list(module.trainable_params()))
    for gradient in gradients:
        optimizer((gradient,))
    return whole(module[0].weight)


@on_mesh()
def problems(mesh: Any, name: str, rows: int) -> list[str]:
    found, make = [], {**OPTIMIZERS, **COUPLED}[name]
    values = [numbers(rows, 4, seed=seed) for seed in (1, 2)]
    for clip in CLIPS if everything() else ("as it is", "nn.ClipByNorm"):
        wanted = stepped(net(rows), make, [CLIPS[clip](Tensor(v)) for v in values])
        for style, placement in itertools.product(STYLES, GIVEN):
            if rows % 3 and (style == "packed" or isinstance(placement, PackedShard)):
                continue
            given = [CLIPS[clip](placed(v, mesh, placement)) for v in values]
            got = stepped(net(rows, STYLES[style](), mesh), make, given)
            if not np.allclose(got, wanted, rtol=1e-4, atol=1e-5):
                found.append(f"{clip}, {style}, {placement}: {got} instead of {wanted}")
    return found


@pytest.mark.parametrize(
    "name", in_gate([name for name in {**OPTIMIZERS, **COUPLED} if name != "groups, schedule"], ("Momentum",))
)
def test_placements(pool: Any, name: str) -> None:
    """A kernel that takes this rank's part steps by a summand, or by other rows."""
    for rows in (6, 5):
        assert pool.run(2, problems, name, rows) == [[], []], rows


@on_mesh()
def empty(mesh: Any) -> list[str]:
    """One row on two ranks."""
    found, values = [], [numbers(1, 4, seed=seed) for seed in (1, 2)]
    wanted = stepped(net(1), OPTIMIZERS["Momentum"], list(map(Tensor, values)))
    for style, placement in itertools.product(("replicated", "columns", "rows"), GIVEN[:4]):
        given = [placed(v, mesh, placement) for v in values]
        if not np.allclose(stepped(net(1, STYLES[style](), mesh), OPTIMIZERS["Momentum"], given), wanted):
            found.append(f"{style}, {placement}")
    return found


def test_empty_shards(pool: Any) -> None:
    assert pool.run(2, empty) == [[], []]


@on_mesh(2, 2, names=("dp", "tp"))
def refused(mesh: Any) -> list[tuple[str, int]]:
    found = []
    for module, gradient in (
        (net(6, ColwiseParallel(), mesh["tp"]), distribute_tensor(Tensor(numbers(6, 4)), mesh["dp"], [Shard(0)])),
        (net(6, ColwiseParallel(), mesh["tp"]), distribute_tensor(Tensor(numbers(3, 4)), mesh["tp"], [Replicate()])),
        (net(6), distribute_tensor(Tensor(numbers(4, 4)), mesh["tp"], [Replicate()])),
    ):
        optimizer = nn.Momentum(module.trainable_params(), 0.1, 0.9)
        with CommDebugMode() as comm:
            found.append((error_of(optimizer, (gradient,)), comm.get_total_counts()))
    return found


def test_refused(pool: Any) -> None:
    for found in pool.run(4, refused):
        for (said, sent), where in zip(found, ("on DeviceMesh", "on DeviceMesh", "on no mesh"), strict=True):
            assert said.startswith("ValueError: Momentum got a gradient of shape"), said
            assert "in the order of the optimizer's parameters" in said and where in said, said
            assert sent == 0


@on_mesh()
def warned(mesh: Any) -> list[list[str]]:
    x = Tensor(numbers(2, 4))
    found = []
    for style, functions in (
        ("replicated", (ms.grad, ms.value_and_grad)),
        ("columns", (value_and_grad, grad, ms.grad, ms.grad)),
    ):
        module = net(6, STYLES[style](), mesh)
        LocalGradients.told = False
        for function in functions:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                function(lambda x, module=module: module(x).sum(), None, module.trainable_params())(x)
            found.append([str(w.message) for w in caught if "hyper_parallel.mindspore" in str(w.message)])
    return found


def test_a_warning_of_plain_local_gradients(pool: Any) -> None:
    """Once, where they are parts."""
    for *before, first, second in pool.run(2, warned):
        assert before == [[]] * 4 and second == []
        assert len(first) == 1 and first[0].startswith("mindspore.grad returns this rank's shards"), first
