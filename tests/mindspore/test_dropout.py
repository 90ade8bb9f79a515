"""Dropout layers and tensors drawn after the model of a DTensor: several layers, several steps, with and without a seed
set before the model is built."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    manual_seed,
    parallelize_module,
)
from hyper_parallel.core.rules import random
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.extent import in_gate, on_ranks
from hyper_parallel.testing.spmd import on_mesh

ROWS, WIDTH = 5, 40
X = np.random.default_rng(0).random((2, ROWS, WIDTH)).astype(np.float32) + 1
STEPS = 3


class Layers(nn.Cell):
    """Three layers of dropout, each on the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Dropout(p=0.5) for _ in range(3))

    def construct(self, x: Any) -> tuple:
        return tuple(layer(x) for layer in (self.first, self.second, self.third))


def masks(net: Any, x: Any, differentiate: Any) -> list[np.ndarray]:
    """The elements that each layer keeps in each step; the gradient must know the same."""
    kept = []
    for _ in range(STEPS):

        def loss(x: Any) -> Any:
            parts = net(x)
            total = parts[0].sum() + 2 * parts[1].sum() + 4 * parts[2].sum()
            return total, parts

        (_, parts), gradient = differentiate(loss, 0, None, True)(x)
        found = [whole(y) / X for y in parts]
        expected = found[0] + 2 * found[1] + 4 * found[2]
        assert np.allclose(whole(gradient), expected, rtol=1e-4), "backward has another mask than forward"
        kept += [np.round(f) for f in found]
    return kept


def whole(x: Any) -> np.ndarray:
    return x.full_tensor().asnumpy() if isinstance(x, DTensor) else x.asnumpy()


def differ(kept: list[np.ndarray]) -> None:
    """Each layer and each step has a mask of its own, of zeros and twos in equal parts."""
    for i, mask in enumerate(kept):
        assert set(np.unique(mask)) == {0.0, 2.0}
        assert 0.8 < mask.mean() < 1.2
        for other in kept[:i]:
            assert 0.35 < (mask == other).mean() < 0.65, "masks repeat"


def build(mesh: Any, seed: int | None) -> Any:
    if seed is not None:
        ms.set_seed(seed)
    net = Layers().set_train()
    style = SequenceParallel()
    return parallelize_module(net, mesh, {"first": style, "second": style, "third": style}) if mesh else net


@on_mesh()
def layers_with_a_seed(mesh: Any, placement: Any) -> list[np.ndarray]:
    wanted = masks(build(None, 7), Tensor(X), ms.value_and_grad)
    x = distribute_tensor(Tensor(X), mesh, [placement], src_data_rank=None)
    got = masks(build(mesh, 7), x, value_and_grad)
    differ(got)
    for a, b in zip(got, wanted, strict=True):
        assert np.array_equal(a, b), "not the mask of the unsharded network"
    # Copies go their own way; equal seeds give equal draws.
    again = masks(build(mesh, 7), x, value_and_grad)
    assert all(np.array_equal(a, b) for a, b in zip(got, again, strict=True))
    return got


@on_ranks(1, 2, 4, name="world")
def test_layers_draw_what_the_unsharded_network_draws(pool: Any, world: int) -> None:
    """Five rows over four ranks leave one rank without elements."""
    first, *others = pool.run(world, layers_with_a_seed, Shard(1))
    assert all(np.array_equal(first, other) for other in others)


def test_replicated_inputs(pool: Any) -> None:
    first, second = pool.run(2, layers_with_a_seed, Replicate())
    assert np.array_equal(first, second)


@contextmanager
def without_a_seed(mesh: Any) -> Iterator[None]:
    """The state of a process without a global seed, in which nothing was drawn on the mesh."""
    seeds = importlib.import_module("mindspore.common.seed")
    before, seeds._GLOBAL_SEED = seeds._GLOBAL_SEED, None
    random._SYNCHRONIZED.discard(mesh)
    try:
        yield
    finally:
        ms.set_seed(0 if before is None else before)


@on_mesh()
def layers_without_a_seed(mesh: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    with without_a_seed(mesh):
        net = build(mesh, None)
        assert net.first.dropout.Seed0 == net.first.dropout.Seed1 == 0
        x = distribute_tensor(Tensor(X), mesh, [Shard(1)], src_data_rank=None)
        got = masks(net, x, value_and_grad)
        differ(got)
        manual_seed(3, mesh)
        later = masks(net, x, value_and_grad)
        manual_seed(3, mesh)
        assert all(np.array_equal(a, b) for a, b in zip(later, masks(net, x, value_and_grad), strict=True))
        return got, later


@on_ranks(1, 2, 3, name="world")
def test_layers_without_a_seed(pool: Any, world: int) -> None:
    """Every layer and step draws its own, all ranks the same; a seed that comes later counts."""
    (first, later), *others = pool.run(world, layers_without_a_seed)
    differ(first)
    for got, after in others:
        assert np.array_equal(got, first)
        assert np.array_equal(after, later)


@on_mesh()
def layers_of_ranks_with_other_seeds(mesh: Any) -> list[np.ndarray]:
    ms.set_seed(100 + mesh.get_local_rank(0))
    net = build(mesh, None)
    x = distribute_tensor(Tensor(X), mesh, [Replicate()], src_data_rank=None)
    got = masks(net, x, value_and_grad)
    ms.set_seed(0)
    return got


def test_ranks_that_built_with_other_seeds(pool: Any) -> None:
    """The first rank's seeds count."""
    first, second = pool.run(2, layers_of_ranks_with_other_seeds)
    differ(first)
    assert np.array_equal(first, second)


# -------------------------------------------------------------------- plain tensors between styled modules
class Between(nn.Cell):
    """Layers of all kinds, and functions, on the outputs of styled layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(8, 6), nn.Dense(6, 8)
        self.single, self.other = nn.Dropout(p=0.5), nn.Dropout(p=0.25)
        self.rows, self.images, self.boxes = nn.Dropout1d(p=0.5), nn.Dropout2d(p=0.5), nn.Dropout3d(p=0.5)

    def construct(self, x: Any) -> list[Any]:
        y = self.down(self.up(x))
        boxes = y.reshape(*y.shape[:2], 2, 2, 2)
        elements = [self.single(y), self.other(y), self.single(y[:1])]
        channels = [self.rows(y), self.rows(y[0]), self.images(boxes[..., 0]), self.boxes(boxes)]
        return [*elements, *channels, ops.dropout(y, 0.5)]


#: Outputs of `Between` that draw for each element.
ELEMENTS = (0, 1, 7)


def kept_by(net: Any, steps: int) -> list[list[bytes]]:
    """The kept elements of each step and output."""
    x = Tensor(np.ones((4, 5, 8), np.float32))
    return [[(y.asnumpy() != 0).tobytes() for y in net(x)] for _ in range(steps)]


@on_mesh()
def between(mesh: Any, seeds: str, steps: int) -> list[list[bytes]]:
    with without_a_seed(mesh):
        if seeds != "none":
            ms.set_seed(9 + (mesh.get_rank() if seeds == "of each rank" else 0))
        net = Between().set_train()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh, plan)
        found = kept_by(net, steps)
        if seeds == "one":
            ms.set_seed(9)
            single = kept_by(Between().set_train(), 5)
            # For five calls MindSpore's kernel repeats. Layers of channels move the counter of functions.
            assert all(a[:3] == b[:3] for a, b in zip(single, found[:5], strict=True))
        return found


@pytest.mark.parametrize("steps", in_gate([12, 300], [12]))
@pytest.mark.parametrize("seeds", ["one", "of each rank", "none"])
def test_between_styled_modules(pool: Any, seeds: str, steps: int) -> None:
    """All ranks drop the same, in each step something else."""
    first, second = pool.run(2, between, seeds, steps)
    for step, (a, b) in enumerate(zip(first, second, strict=True)):
        assert [x == y for x, y in zip(a, b, strict=True)] == [True] * len(a), step
    assert all(len({step[i] for step in first}) == steps for i in ELEMENTS)


@on_mesh()
def recomputed_layers(mesh: Any, distributed: bool) -> list[bool]:
    """The gradient of a bias shows whether backward drops what forward has dropped, in a recomputed block."""
    ms.set_seed(4)
    net = Styled().set_train()
    net.recompute()
    if distributed:
        up = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        parallelize_module(net, mesh, {"up": up})
    else:
        parallelize_module(nn.SequentialCell(net, nn.Dense(6, 6)), mesh, {"1": ColwiseParallel()})
    found, x = [], Tensor(np.ones((2, 6), np.float32))
    for _ in range(8):
        y, gradient = value_and_grad(net, None, [net.up.bias])(x)
        found.append(bool((whole(gradient[0]) == 2 * (whole(y) != 0).sum(0)).all()))
    return found


@pytest.mark.parametrize("distributed", [False, True])
def test_recomputed_layers(pool: Any, distributed: bool) -> None:
    assert pool.run(2, recomputed_layers, distributed) == [[True] * 8] * 2


class Styled(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Dense(6, 6), nn.Dropout(p=0.5)

    def construct(self, x: Any) -> Any:
        return self.drop(self.up(x))


@on_mesh(2, 2, names=("dp", "tp"))
def layer_in_a_distributed_batch(mesh: Any) -> list[bool]:
    plan = {"up": ColwiseParallel(output_layouts=Shard(1), use_local_output=False), "drop": SequenceParallel()}
    nets = []
    for _ in range(2):
        ms.set_seed(4)
        nets.append(Styled().set_train())
    single, net = nets
    fully_shard(parallelize_module(net, mesh["tp"], plan), mesh=mesh["dp"])
    x = Tensor(np.random.default_rng(0).standard_normal((4, 4, 6)).astype(np.float32))
    found = []
    for _ in range(3):
        wanted = single(x).asnumpy() != 0
        got = whole(net(distribute_tensor(x, mesh["dp"], [Shard(0)]))) != 0
        found.append(bool((got == wanted).all() and (got[2:] != got[:2]).any()))
    return found


def test_a_layer_in_a_distributed_batch(pool: Any) -> None:
    assert pool.run(4, layer_in_a_distributed_batch) == [[True] * 3] * 4


# -------------------------------------------------------------------- whole channels
@on_mesh()
def channels(mesh: Any, rank_dims: int, p: float) -> list[np.ndarray]:
    shape = (6, 8) + (2,) * rank_dims
    x = distribute_tensor(Tensor(np.ones(shape, np.float32)), mesh, [Shard(0)], src_data_rank=None)
    layers = [getattr(nn, f"Dropout{rank_dims}d")(p=p).set_train() for _ in range(2)]
    manual_seed(5, mesh)
    # Ranks that have drawn from MindSpore's own stream before draw the same all the same.
    for _ in range(mesh.get_local_rank(0)):
        layers[0](Tensor(np.ones(shape, np.float32)))
    with CommDebugMode() as comm:
        drawn = [layer(x) for _ in range(2) for layer in layers]
    assert comm.get_total_counts() == 0
    assert all(y.placements == (Shard(0),) for y in drawn)
    found = [whole(y).reshape(6, 8, -1) for y in drawn]
    assert all((y == y[..., :1]).all() for y in found)
    return [y[..., 0] for y in found]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_channels(pool: Any, dims: int) -> None:
    drawn = pool.run(1, channels, dims, 0.5)[0]
    for i, y in enumerate(drawn):
        assert set(np.unique(y)) == {0.0, 2.0}
        assert all((y != other).any() for other in drawn[:i])
    for other in pool.run(4, channels, dims, 0.5):
        assert np.array_equal(drawn, other), "depends on the number of ranks"


def test_no_channel_is_kept(pool: Any) -> None:
    assert not np.any(pool.run(2, channels, 2, 1.0))


# -------------------------------------------------------------------- after the model of a DTensor
LIKES = [
    "ops.randn_like(x)",
    "ops.rand_like(x)",
    "ops.rand_like(input=x, dtype=ms.float16)",
    "ops.randint_like(i, 0, 50)",
    "ops.full_like(x, 2.5)",
    "ops.full_like(x, fill_value=3, dtype=ms.int32)",
    "ops.full_like(x, ms.Tensor(1.5))",
    "ops.ones_like(x)",
    "ops.zeros_like(x)",
    "ms.mint.ones_like(x)",
    "ms.mint.zeros_like(x)",
    "ms.mint.full_like(x, 2.5)",
    "x.new_zeros((5, 6))",
    "x.new_ones((5, 6), dtype=ms.int32)",
]


@on_mesh()
def likes(mesh: Any, dim: int) -> list[str]:
    problems = []
    plain = {"x": Tensor(np.ones((5, 6), np.float32)), "i": Tensor(np.ones((5, 6), np.int32))}
    names = {k: distribute_tensor(v, mesh, [Shard(dim)], src_data_rank=None) for k, v in plain.items()}
    scope = {"ms": ms, "ops": ops}
    for call in LIKES:
        ms.set_seed(4)
        # MindSpore's own functions of mint have no kernels on CPU.
        wanted = [eval(call.replace("ms.mint", "ops"), scope, plain) for _ in range(2)]
        manual_seed(4, mesh)
        with CommDebugMode() as comm:
            got = [eval(call, scope, names) for _ in range(2)]
        for y, t in zip(got, wanted, strict=True):
            if not isinstance(y, DTensor) or y.placements != (Shard(dim),) or y.dtype != t.dtype:
                problems.append(f"{call}: {type(y).__name__} {y.dtype}")
            elif not np.array_equal(whole(y), t.asnumpy()):
                problems.append(f"{call}: {whole(y)}, wanted {t}")
        if comm.get_total_counts():
            problems.append(f"{call}: communicates")
    x = names["x"]
    if x.new_full((5, 6), 4.0).placements != (Shard(dim),) or x.new_empty((5, 6)).placements != (Shard(dim),):
        problems.append("new_full, new_empty")
    other = [x.new_zeros(3), x.new_ones((2, 2)), x.new_full((2,), 7.0), x.new_empty((1, 1))]
    if not all(isinstance(y, DTensor) and y.placements == (Replicate(),) for y in other):
        problems.append("another shape")
    with x.device_mesh.platform.no_dispatch():
        if isinstance(x.new_zeros((2,)), DTensor):
            problems.append("under no_dispatch")
    return problems


@pytest.mark.parametrize(("world", "dim"), [(1, 0), (2, 1), (4, 0)])
def test_likes(pool: Any, world: int, dim: int) -> None:
    assert pool.run(world, likes, dim) == [[]] * world


# -------------------------------------------------------------------- draws without a rule
@on_mesh()
def other_draws(mesh: Any) -> list[Any]:
    ms.set_seed(mesh.get_local_rank(0))
    x = distribute_tensor(Tensor(np.ones((4, 50), np.float32)), mesh, [Shard(0)], src_data_rank=None)
    drawn = [ops.multinomial(x, 8), ops.random_categorical(x, 8, seed=mesh.get_local_rank(0) + 1)]
    with pytest.raises(ValueError, match=r"InplaceNormal_ draws random numbers into a DTensor.*randn of"):
        x.redistribute(placements=[Replicate()]).normal_()
    ms.set_seed(0)
    return [whole(y) for y in drawn]


def test_draws_without_a_rule(pool: Any) -> None:
    """Random functions without a rule: every rank gets the first rank's draw, or the call is refused."""
    first, second = pool.run(2, other_draws)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(np.unique(first[0])) > 3


class Dropping(nn.Cell):
    """A norm on a part of the sequence, and dropout of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((6,))

    def construct(self, x: Any) -> Any:
        y = ops.dropout(self.norm(x), 0.5)
        return y * y


@on_mesh()
def recomputed(mesh: Any) -> None:
    """Recomputation in backward drops the same elements again, because of counters."""
    found = []
    try:
        for recompute in (False, True):
            net = parallelize_module(Dropping(), mesh, {"norm": SequenceParallel(sequence_dim=0)})
            if recompute:
                net.recompute()
            manual_seed(5, mesh, parallel_rng="counter")
            x = Tensor(np.random.default_rng(mesh.get_rank()).standard_normal((8, 6)).astype(np.float32))
            _, grad = value_and_grad(lambda x, net=net: net(x).sum(), 0, None)(x)
            found.append(grad.asnumpy())
    finally:
        manual_seed(0, mesh)
    assert np.abs(found[0]).max() > 0.01
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_recomputed_by_counter(pool: Any) -> None:
    pool.run(2, recomputed)
