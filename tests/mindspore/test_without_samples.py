"""Layers of pictures where a rank has no samples, and batch norm wherever its input lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import CommDebugMode, DTensor, Replicate, Shard, distribute_module, distribute_tensor
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.extent import everything, on_ranks
from hyper_parallel.testing.spmd import on_mesh

#: Functions of pictures, whether they have a weight, and the dimensions of their input.
LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, ...] | None, tuple[int, ...]]] = {
    "conv2d": (lambda x, w: ops.conv2d(x, w), (6, 4, 3, 3), (4, 5, 5)),
    "max_pool2d": (lambda x: ops.max_pool2d(x, 2), None, (4, 6, 6)),
    "avg_pool2d": (lambda x: ops.avg_pool2d(x, 2), None, (4, 6, 6)),
    "adaptive_avg_pool2d": (lambda x: ops.adaptive_avg_pool2d(x, 2), None, (4, 6, 6)),
    "bilinear": (lambda x: ops.interpolate(x, size=(6, 6), mode="bilinear"), None, (4, 3, 3)),
    "nearest": (lambda x: ops.interpolate(x, size=(6, 6), mode="nearest"), None, (4, 3, 3)),
    "unfold": (lambda x: ops.unfold(x, 2), None, (4, 3, 3)),
    "pixel_shuffle": (lambda x: ops.pixel_shuffle(x, 2), None, (4, 3, 3)),
    "reflection_pad": (lambda x: ops.pad(x, (1, 1, 1, 1), mode="reflect"), None, (4, 3, 3)),
    "cumsum": (lambda x: ops.cumsum(x, 1), None, (4, 3)),
    "cumprod": (lambda x: ops.cumprod(x, 1), None, (4, 3)),
}


def _value_and_grads(function: Callable[..., Any], given: list[Any], weights: Any, whole: Any) -> list[Any]:
    def loss(*xs: Any) -> tuple[Any, Any]:
        y = function(*xs)
        return whole((y * weights).sum()), y

    (_, y), grads = value_and_grad(loss, tuple(range(len(given))), None, has_aux=True)(*given)
    return [y, *grads]


@on_mesh()
def layers(mesh: Any, samples: int) -> None:
    for name, (function, of_weight, sizes) in LAYERS.items():
        arrays = [floats(samples, *sizes), *([] if of_weight is None else [floats(*of_weight)])]
        given = [distribute_tensor(Tensor(a), mesh, [Replicate() if i else Shard(0)]) for i, a in enumerate(arrays)]
        wanted = function(*map(Tensor, arrays))
        weights = Tensor(floats(*wanted.shape))
        with CommDebugMode() as comm:
            assert function(*given).placements == (Shard(0),), name
        assert comm.get_comm_counts() == {}, (name, comm.get_comm_counts())
        wanted = _value_and_grads(function, list(map(Tensor, arrays)), weights, lambda x: x)
        whole = distribute_tensor(weights, mesh, None)
        found = _value_and_grads(function, given, whole, lambda x: x.full_tensor())
        for i, (got, right) in enumerate(zip(found, wanted, strict=True)):
            same(got.full_tensor().asnumpy(), right.asnumpy(), f"{name} of {samples} samples, {i}", 1e-4)


@pytest.mark.parametrize("samples", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_ranks_without_samples(pool: Any, samples: int) -> None:
    """Parameters stay sharded, nothing is gathered, and gradients are the single device's."""
    pool.run(4, layers, samples)


@on_mesh()
def statistics(mesh: Any, samples: int, spatial: tuple[int, ...]) -> None:
    """Training, evaluating, training and evaluating."""
    cls = nn.BatchNorm2d if spatial else nn.BatchNorm1d
    x, weights = floats(samples, 4, *spatial) + 1, floats(samples, 4, *spatial)
    for placement in (Replicate(), Shard(0), Shard(1), *([Shard(2)] if spatial else [])):
        reference, sharded = cls(4), cls(4)
        for parameter in (*reference.get_parameters(), *sharded.get_parameters()):
            parameter.set_data(Tensor(1 + 0.1 * np.arange(4, dtype=np.float32)))
        distribute_module(sharded, mesh)
        for train in (True, False, True, False):
            for net in (reference, sharded):
                net.set_train(train)
            what = f"{cls.__name__} of {samples} samples placed {placement}, train={train}"
            with CommDebugMode() as comm:
                y = sharded(distribute_tensor(Tensor(x), mesh, [placement], src_data_rank=None))
            if not train:
                assert y.placements == (placement,), (what, y.placements)
                assert comm.get_comm_counts() == {}, (what, comm.get_comm_counts())
            same(y.full_tensor().asnumpy(), reference(Tensor(x)).asnumpy(), what, 1e-4)
            wanted = _value_and_grads(reference, [Tensor(x)], Tensor(weights), lambda x: x)
            given = distribute_tensor(Tensor(x), mesh, [placement])
            whole = distribute_tensor(Tensor(weights), mesh, None)
            found = _value_and_grads(sharded, [given], whole, lambda x: x.full_tensor())
            same(found[1].full_tensor().asnumpy(), wanted[1].asnumpy(), f"gradient of {what}", 1e-3)
            for p, q in zip(reference.get_parameters(), sharded.get_parameters(), strict=True):
                assert isinstance(q, DTensor)
                same(q.full_tensor().asnumpy(), p.asnumpy(), f"{p.name} after {what}", 1e-4)


@on_ranks(1, 2, 3, gate=(1, 3))
def test_running_statistics(pool: Any, world_size: int) -> None:
    """Running statistics are those of one device, in every mode and placement; evaluation gathers nothing."""
    for samples in (5, 2) if everything() else (2,):
        for spatial in ((), (3, 2)):
            pool.run(world_size, statistics, samples, spatial)
