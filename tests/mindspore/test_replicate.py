"""`replicate` on MindSpore: optimizers, accumulation, cells that are computed again, layers that a rank leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import CommDebugMode, DTensor, Replicate, ReplicatedModule, replicate
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import whole

ROWS, FEATURES = 3, 4


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm([FEATURES]), nn.Dense(FEATURES, 6)
        self.down = mint.nn.Linear(6, FEATURES)

    def construct(self, x: Any) -> Any:
        return x + self.down(ops.tanh(self.up(self.norm(x))))


class Net(nn.Cell):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.CellList([Layer() for _ in range(3)])
        self.scale = ms.Parameter(Tensor(np.full(shape, 0.7, np.float32)), name="scale")
        self.fixed = ms.Parameter(Tensor(np.full((FEATURES,), 0.5, np.float32)), name="fixed", requires_grad=False)
        self.unused = ms.Parameter(Tensor(np.ones((2,), np.float32)), name="unused")

    def construct(self, x: Any, skip: Any = None) -> Any:
        x = x * self.fixed
        for i, layer in enumerate(self.layers):
            if i != skip:
                x = layer(x)
        return {"y": x * self.scale}


def nets(mesh: Any, shape: tuple[int, ...] = (), **options: Any) -> tuple[Any, Any, list[np.ndarray]]:
    """A net with a scale of this shape, its replicated copy, and the batches of all ranks."""
    found = []
    for i in (0, mesh.get_local_rank(0)):  # the first rank's values count
        net, rng = Net(shape), np.random.default_rng(i)
        for p in net.get_parameters():
            if p.name not in ("fixed", "unused"):
                p.set_data(Tensor(rng.standard_normal(p.shape) * 0.3, ms.float32))
        found.append(net)
    rng = np.random.default_rng(9)
    return (
        found[0],
        replicate(found[1], mesh, **options),
        [rng.standard_normal((ROWS, FEATURES)).astype(np.float32) for _ in range(mesh.size())],
    )


def loss_of(net: Any, *args: Any) -> Any:
    y = net(*args)["y"]
    return (y**2).mean() + ops.sin(y).mean()


def gradients(net: Any, loss: Callable[[], Any]) -> dict[str, Any]:
    weights = list(net.trainable_params())
    return dict(zip([p.name for p in weights], value_and_grad(loss, None, weights)()[1], strict=True))


def check(wanted: dict[str, Any], got: dict[str, Any], what: str) -> None:
    assert wanted.keys() == got.keys()
    for name, g in got.items():
        assert isinstance(g, DTensor) and g.placements == (Replicate(),), name
        np.testing.assert_allclose(whole(g), whole(wanted[name]), rtol=1e-4, atol=1e-5, err_msg=f"{what}: {name}")


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda ps: nn.SGD(ps, 0.1, momentum=0.9),
    "AdamWeightDecay": lambda ps: nn.AdamWeightDecay(ps, 0.01),
}


@on_mesh()
def steps(mesh: Any) -> None:
    for name, make in OPTIMIZERS.items():
        # MindSpore's own SGD fails for parameters without dimensions.
        net, copied, parts = nets(mesh, (1,), bucket_cap_mb=3e-4)
        assert isinstance(copied, ReplicatedModule) and isinstance(copied, Net)
        rank, all_rows = mesh.get_local_rank(0), Tensor(np.concatenate(parts))
        theirs, ours = (make(list(n.trainable_params())) for n in (net, copied))
        for step in range(5):
            wanted = gradients(net, lambda: loss_of(net, all_rows))  # noqa: B023 - called here
            got = gradients(copied, lambda: loss_of(copied, Tensor(parts[rank])))  # noqa: B023
            check(wanted, got, f"{name} at step {step}")
            if step % 2:
                wanted, got = (
                    dict(zip(g, ops.clip_by_global_norm(tuple(g.values()), 0.1), strict=True)) for g in (wanted, got)
                )
            theirs(tuple(wanted.values()))
            ours(tuple(got.values()))
        for p, q in zip(net.get_parameters(), copied.get_parameters(), strict=True):
            np.testing.assert_allclose(whole(q), whole(p), rtol=1e-3, atol=1e-4, err_msg=p.name)


@on_mesh()
def skipped(mesh: Any) -> None:
    """Ranks use different layers; cells are computed again in backward; gradients are kept and sent later."""
    rank, size = mesh.get_local_rank(0), mesh.size()
    for recompute in (False, True):
        for cap in (1e-6, 25):
            for skips in ([None] * 4, [0, 1, 2, None]):
                net, copied, parts = nets(mesh, bucket_cap_mb=cap)
                if recompute:
                    for n in (net, copied):
                        for layer in n.layers:
                            layer.recompute()
                wanted = gradients(
                    net,
                    lambda: sum(loss_of(net, Tensor(x), s) for x, s in zip(parts, skips, strict=False)) / size,  # noqa: B023
                )
                with CommDebugMode() as comm:
                    got = gradients(copied, lambda: loss_of(copied, Tensor(parts[rank]), skips[rank]))  # noqa: B023
                check(wanted, got, f"skips {skips}, recompute {recompute}")
                assert len(comm.events) == (20 if cap < 1 else 1)
    net, copied, parts = nets(mesh)
    one = gradients(net, lambda: loss_of(net, Tensor(np.concatenate(parts))))
    total: dict[str, Any] = {}
    for i in range(3):
        copied.set_requires_gradient_sync(i == 2)
        with CommDebugMode() as comm:
            got = gradients(copied, lambda: loss_of(copied, Tensor(parts[rank])))
        assert len(comm.events) == (i == 2)
        total = {name: total[name] + g if total else g for name, g in got.items()}
    check({name: 3 * g for name, g in one.items()}, total, "three backwards, one all-reduce")


@pytest.mark.parametrize("job", [steps, skipped], ids=lambda job: job.__name__)
@on_ranks(2, 3)
def test_replicate(pool: Any, world_size: int, job: Any) -> None:
    pool.run(world_size, job)
