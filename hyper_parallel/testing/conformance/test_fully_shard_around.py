"""Gradients that bypass the outputs of a unit of `fully_shard`: they are right, or an error is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import fully_shard
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_fully_shard import held_bytes
from hyper_parallel.testing.conformance.test_fully_shard_units import ROWS, parameters
from hyper_parallel.testing.extent import on_ranks

WIDTH = 5


class Model:
    """An `Mlp` whose layers each store an auxiliary loss of their weight as an attribute.

    Args:
        aside: ``aside(x, weight)`` returns the tensor from which a layer's auxiliary loss is computed.
    """

    def __init__(self, mesh: Any, aside: Callable[[Any, Any], Any]) -> None:
        adapter = get_adapter()
        self.mlp = adapter.load(adapter.Mlp(WIDTH, WIDTH), np.random.default_rng(5))
        self.aside: list[Any] = [None, None]

        def make(at: int) -> Callable[..., Any]:
            def keep(forward: Any) -> Any:
                def run(module: Any, x: Any) -> Any:
                    self.aside[at] = adapter.sum(adapter.square(adapter.tanh(aside(x, module.weight))))
                    return forward(module, x)

                return run

            return keep

        for at, layer in enumerate((self.mlp.up, self.mlp.down)):
            mesh.platform.replace_forward(layer, make(at))

    def shard(self, mesh: Any, reshard: bool | None) -> Model:
        for layer in (self.mlp.up, self.mlp.down):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(self.mlp, mesh=mesh, reshard_after_forward=reshard)
        return self


#: Of the sum of the squared output and the auxiliary losses -> the loss.
LOSSES: dict[str, Callable[[Any, list[Any]], Any]] = {
    "all": lambda main, aside: main + aside[0] * 0.5 + aside[1] * 2.0,
    "the first layer's alone": lambda main, aside: aside[0] * 2.0,
    "the last layer's alone": lambda main, aside: aside[1] * 2.0,
    "both alone": lambda main, aside: aside[0] + aside[1],
}


def gradients(model: Model, x: np.ndarray, loss_of: Callable[[Any, list[Any]], Any], scale: float) -> Any:
    adapter = get_adapter()

    def loss(x: Any) -> Any:
        main = adapter.sum(adapter.square(adapter.call(model.mlp, x)))
        total = loss_of(main, model.aside) * scale
        return total, total

    return adapter.model_value_and_grads(model.mlp, loss, x)


def zero_or(adapter: Any, x: Any, shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, np.float32) if x is None else adapter.numpy(x)


@spmd.on_mesh()
def around(mesh: Any, name: str, reshard: bool | None) -> bool:
    """Run two steps; return whether an error refused them."""
    adapter, platform, size, rank = get_adapter(), mesh.platform, mesh.size(), mesh.get_local_rank(0)
    single = Model(mesh, adapter.matmul)
    sharded = Model(mesh, adapter.matmul).shard(mesh, reshard)
    refused = False
    for step in range(2):
        x = np.random.default_rng(step).standard_normal((size * ROWS, WIDTH)).astype(np.float32)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        _, grad_x, grads = gradients(single, x, LOSSES[name], 1 / size)
        try:
            _, got_grad_x, got = gradients(sharded, x[mine], LOSSES[name], 1.0)
        except RuntimeError as error:
            assert name != "all" and "without passing through its outputs" in str(error), error
            refused = True
            sharded.mlp.reset_iter_state()
            continue
        for key, whole in grads.items():
            shape = tuple(parameters(single.mlp, mesh)[key].shape)
            wanted = zero_or(adapter, whole, shape)
            same(zero_or(adapter, got[key], shape), wanted, f"gradient of {key}, {name}, step {step}", 1e-4)
        same(got_grad_x / size, grad_x[mine], f"gradient of the input, {name}", 1e-4)
        if platform.frees_storage and reshard:
            assert held_bytes(sharded.mlp.up) == held_bytes(sharded.mlp.down) == 0
    return refused


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("world_size", "name"), [(2, "all"), (3, "all"), *((2, name) for name in list(LOSSES)[1:])])
def test_auxiliary_losses(pool: Any, world_size: int, name: str, reshard: bool) -> None:
    # Units that are left whole, and losses in one backward with the results, are right everywhere.
    may_be_refused = reshard and name != "all"
    refused = pool.run(world_size, around, name, reshard)
    assert len(set(refused)) == 1 and (may_be_refused or not refused[0])


@spmd.on_mesh()
def detached(mesh: Any) -> bool:
    """Check an auxiliary loss of a detached weight. Return whether the loss was refused.

    The loss also depends on a tensor that is no argument of the module. In a second case it depends on that tensor
    alone, and no parameter has a gradient.
    """
    adapter, platform, size, rank = get_adapter(), mesh.platform, mesh.size(), mesh.get_local_rank(0)
    beside: list[Any] = []

    def aside(x: Any, weight: Any) -> Any:
        return adapter.matmul(beside[-1] if beside else x, adapter.detach(weight))

    single, sharded = Model(mesh, aside), Model(mesh, aside).shard(mesh, True)
    x = np.random.default_rng(1).standard_normal((size * ROWS, WIDTH)).astype(np.float32)
    mine = x[rank * ROWS : (rank + 1) * ROWS]

    def loss_of(model: Model) -> Any:
        def loss(x: Any) -> Any:
            beside[:] = [adapter.tanh(x)]
            main = adapter.sum(adapter.square(adapter.call(model.mlp, x * 2.0)))
            return main + model.aside[0] + model.aside[1], None

        return loss

    _, grad_x, grads = adapter.model_value_and_grads(single.mlp, loss_of(single), x)
    _, got_grad_x, got = adapter.model_value_and_grads(sharded.mlp, loss_of(sharded), mine)
    same(got_grad_x, grad_x[rank * ROWS : (rank + 1) * ROWS], "gradient of the input", 1e-4)
    for key, whole in grads.items():
        same(adapter.numpy(got[key]) * size, adapter.numpy(whole), f"gradient of {key}", 1e-4)
    beside.clear()
    _, wanted_x, _ = gradients(single, mine, LOSSES["the last layer's alone"], 1.0)
    try:
        _, got_x, _ = gradients(sharded, mine, LOSSES["the last layer's alone"], 1.0)
    except RuntimeError:
        assert platform.frees_storage
        return True
    same(got_x, wanted_x, "gradient of the input through the weights alone", 1e-4)
    return False


@on_ranks(1, 2, 3)
def test_detached_parameters(pool: Any, world_size: int) -> None:
    assert len(set(pool.run(world_size, detached))) == 1
