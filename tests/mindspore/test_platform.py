"""The verbs of the platform, one by one, in this process."""

from __future__ import annotations

import importlib
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import DTensor, Shard, distribute_tensor, get_platform, init_device_mesh
from hyper_parallel.core.dtensor.tensor import bind_platform
from hyper_parallel.core.operations.binding import bind_of
from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.platform.mindspore.op_table import OPS, VARIANTS
from hyper_parallel.platform.mindspore.processes.collectives import dense

FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def platform() -> Any:
    mesh = init_device_mesh("cpu", (1,))
    return bind_platform(mesh.platform)  # with the patches of the DTensor class


def test_facts(platform: Any) -> None:
    assert platform is get_platform("mindspore")
    assert (platform.name, platform.device_type, platform.comm_backend) == ("mindspore", "cpu", "mccl")
    assert platform.unavailable_reason() is None
    assert (platform.rank(), platform.world_size()) == (0, 1)
    assert platform.world() is platform.world()


def test_types(platform: Any) -> None:
    p = Parameter(Tensor(FLOATS), name="p")
    assert platform.is_tensor(p) and not platform.is_tensor(FLOATS)
    assert platform.is_floating_point(Tensor(FLOATS)) and not platform.is_floating_point(Tensor([1]))
    assert platform.shape_of(p) == (2, 3) and not platform.is_meta(p)


@pytest.mark.parametrize(
    ("module", "linear", "embedding", "weight", "bias"),
    [
        (nn.Dense(3, 2), True, False, "weight", "bias"),
        (nn.Dense(3, 2, has_bias=False), True, False, "weight", None),
        (mint.nn.Linear(3, 2), True, False, "weight", "bias"),
        (mint.nn.Linear(3, 2, bias=False), True, False, "weight", None),
        (nn.Embedding(4, 3), False, True, "embedding_table", None),
        (mint.nn.Embedding(4, 3), False, True, "weight", None),
        (nn.EmbeddingLookup(4, 3), False, True, "embedding_table", None),
        (nn.LayerNorm([3]), False, False, "gamma", "beta"),
        (mint.nn.LayerNorm(3), False, False, "weight", "bias"),
    ],
)
def test_modules_that_styles_know(
    platform: Any, module: nn.Cell, linear: bool, embedding: bool, weight: str, bias: str | None
) -> None:
    assert platform.is_linear_module(module) is linear
    assert platform.is_embedding_module(module) is embedding
    own = dict(platform.named_parameters(module))
    assert weight in own
    if linear or embedding:
        kind = platform.kind_of(module)
        assert kind.weight == weight
        assert (kind.bias if kind.bias in own else None) == bias
    else:
        with pytest.raises(TypeError, match="not a linear or embedding module"):
            platform.kind_of(module)


def test_walking(platform: Any) -> None:
    net = nn.SequentialCell(nn.Dense(3, 2), nn.SequentialCell(nn.ReLU()))
    net.register_buffer("mask", Tensor(FLOATS))
    assert [path for path, _ in platform.named_modules(net)] == ["", "0", "1", "1.0"]
    assert [name for name, _ in platform.named_parameters(net[0])] == ["weight", "bias"]
    assert [name for name, _ in platform.named_buffers(net)] == ["mask"]
    platform.set_buffer(net, "mask", Tensor(FLOATS * 2))
    assert np.array_equal(net.mask.asnumpy(), FLOATS * 2)


def test_hooks(platform: Any) -> None:
    cell, seen = nn.ReLU(), []
    platform.register_forward_pre_hook(cell, lambda m, args: seen.append("second"))
    platform.register_forward_pre_hook(
        cell,
        lambda m, args, kwargs: (seen.append("first"), ((args[0] * 2,), kwargs))[1],
        prepend=True,
        with_kwargs=True,
    )
    platform.register_forward_hook(cell, lambda m, args, output: output + 1)
    assert np.array_equal(cell(Tensor(FLOATS)).asnumpy(), FLOATS * 2 + 1)
    assert seen == ["first", "second"]


def test_autograd_function(platform: Any) -> None:
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * x * factor

    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return g * x * (2 * ctx.factor)

    apply = platform.autograd_function(forward, backward)
    x = Tensor(FLOATS)
    first = ms.grad(lambda x: apply(x, 3.0).sum())
    assert np.array_equal(first(x).asnumpy(), 6 * FLOATS)
    assert np.array_equal(ms.grad(lambda x: first(x).sum())(x).asnumpy(), np.full((2, 3), 6.0))


@pytest.mark.parametrize("transposed", [False, True])
def test_alias_and_detach(platform: Any, transposed: bool) -> None:
    def function(x: Any) -> Any:
        y = (x * 2).T if transposed else x * 2
        alias, detached = platform.alias(y), platform.detach(y)
        assert alias is not y and alias._data_ptr() == y._data_ptr() == detached._data_ptr()
        assert platform.requires_grad(alias) and not platform.requires_grad(detached)
        return (alias * detached).sum()

    assert np.array_equal(ms.grad(function)(Tensor(FLOATS)).asnumpy(), 4 * FLOATS)


def test_requires_grad(platform: Any) -> None:
    x, constant, seen = Tensor(FLOATS), Tensor(FLOATS), []

    def function(x: Any) -> Any:
        with platform.no_grad():
            seen.append(platform.requires_grad(x))
        seen.extend(platform.requires_grad(t) for t in (x, x + 1, constant))
        return x.sum()

    ms.grad(function)(x)
    assert [*seen, platform.requires_grad(x)] == [False, True, True, False, False]


def test_cache_lives_for_one_recording(platform: Any) -> None:
    x, found = Tensor(FLOATS), []

    def function(x: Any) -> Any:
        found.append(platform.read_cache(x, "key"))
        view = platform.alias(x)
        platform.write_cache(x, "key", view)
        found.append(platform.read_cache(x, "key") is view)
        found.append(platform.read_cache(x, "other"))
        platform.write_cache(x, "other", x)
        found.append(platform.read_cache(x, "other") is x and platform.read_cache(x, "key") is view)
        return view.sum()

    ms.grad(function)(x)
    ms.grad(function)(x)
    assert found == [None, True, None, True] * 2
    assert platform.read_cache(x, "key") is None
    platform.write_cache(x, "key", x * 1)
    assert platform.read_cache(x, "key") is None, "outside a recording nothing is kept"

    def cleared(x: Any) -> Any:
        platform.write_cache(x, "key", x * 1)
        platform.clear_cache(x)
        assert platform.read_cache(x, "key") is None
        return x.sum()

    ms.grad(cleared)(x)


def test_local_operations(platform: Any) -> None:
    x = Tensor(FLOATS)
    same = np.testing.assert_array_equal
    same(platform.narrow(x, 1, 1, 2).asnumpy(), FLOATS[:, 1:])
    same(platform.cat([x, x], 0).asnumpy(), np.concatenate([FLOATS, FLOATS]))
    same(platform.masked_fill(x, x > 2, -1.0).asnumpy(), np.where(FLOATS > 2, -1, FLOATS))
    same(platform.unsqueeze(x, 1).asnumpy(), FLOATS[:, None])
    assert platform.zeros((2,), x).asnumpy().tolist() == [0, 0] and platform.ones((0, 2), x).shape == (0, 2)
    for value in (x, x > 2, x.astype(ms.int64), x[:0]):
        copy = platform.clone(value)
        same(copy.asnumpy(), value.asnumpy())
        assert copy.dtype == value.dtype and (0 in copy.shape or copy._data_ptr() != value._data_ptr())


def test_contiguous_is_dense(platform: Any) -> None:
    """MindSpore calls part of a larger storage contiguous, and its collectives then do nothing."""
    x = Tensor(FLOATS)
    assert platform.contiguous(x) is x and dense(x) is x
    for rows in (mint.narrow(x, 0, 0, 1), mint.narrow(x, 0, 1, 1)):
        assert rows.is_contiguous() and rows.untyped_storage().nbytes() == 24
        assert platform.contiguous(rows).untyped_storage().nbytes() == 12
    assert platform.contiguous(x.T).is_contiguous()


def test_bytes(platform: Any) -> None:
    for dtype in (ms.bfloat16, ms.float16, ms.int64, ms.bool_):
        for x in (Tensor(np.arange(6.0).reshape(2, 3)).astype(dtype), ops.zeros((0, 3), dtype)):
            back = platform.from_bytes(platform.bytes_of(x), x.shape, dtype)
            assert (back.dtype, back.shape) == (dtype, x.shape) and platform.bytes_of(back) == platform.bytes_of(x)
            parameter = Parameter(ops.zeros(x.shape, dtype)) if x.size else ops.zeros(x.shape, dtype)
            platform.write(parameter, back)
            assert platform.bytes_of(parameter) == platform.bytes_of(x)


def test_factories(platform: Any) -> None:
    for dtype in (ms.float16, ms.bfloat16, ms.int8, ms.bool_):
        for value in (0.0, 1.0, 7):
            t = platform.factory("full", (2, 3), value, dtype)
            wanted = bool(value) if dtype == ms.bool_ else value
            assert t.dtype == dtype and (t.astype(ms.float32).asnumpy() == wanted).all()
            like = platform.full((0, 3), value, t)
            assert like.dtype == dtype and like.shape == (0, 3)
    ones = platform.ones((2, 3), Tensor(FLOATS.astype(np.int64)))
    assert ones.dtype == ms.int64 and (ones.asnumpy() == 1).all()
    assert platform.factory("full", (2,), 1, None).dtype == ms.int64
    assert platform.factory("empty", (0, 3), None, None).shape == (0, 3)
    assert platform.factory("rand", (0, 3), None, None).shape == (0, 3)


def test_random_state(platform: Any) -> None:
    platform.manual_seed(5)
    state = platform.get_rng_state()
    first = [platform.factory(name, (4,), None, None).asnumpy() for name in ("rand", "randn")]
    platform.set_rng_state(state)
    second = [platform.factory(name, (4,), None, None).asnumpy() for name in ("rand", "randn")]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_random_state_without_a_seed(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore would draw from nowhere: a seed is chosen, from NumPy's generator, and belongs to the state."""
    seeds = importlib.import_module("mindspore.common.seed")
    chosen = []
    for host_seed in (1, 1, 2):
        monkeypatch.setattr(seeds, "_GLOBAL_SEED", None)
        np.random.seed(host_seed)
        state = platform.get_rng_state()
        draws = []
        for _ in range(2):
            platform.set_rng_state(state)
            draws.append(ops.dropout(ops.ones((64,)), 0.5, True).asnumpy())
        assert np.array_equal(*draws)
        chosen.append(ms.get_seed())
    assert chosen[0] == chosen[1] != chosen[2] and None not in chosen


def test_interception(platform: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(Tensor(FLOATS), mesh, [Shard(0)])
    assert isinstance(x, DTensor) and isinstance(x + 1, DTensor) and isinstance(x[0], DTensor)
    with platform.no_dispatch():
        assert not isinstance(x + 1, DTensor) and not isinstance(x[0], DTensor)
        assert x.shape == x._shape == (2, 3)
    assert isinstance(Tensor(FLOATS) + Tensor(FLOATS), Tensor)
    with pytest.raises(TypeError, match="from_local"):
        type(x)(Tensor(FLOATS))
    again = type(x)(x)
    assert again.placements == (Shard(0),) and np.array_equal(again.asnumpy(), FLOATS)


def test_wrap_keeps_what_somebody_holds(platform: Any) -> None:
    """An operation may return its operand, which has a layout, or is a parameter."""
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(Tensor(FLOATS), mesh, [Shard(0)])
    other = distribute_tensor(Tensor(FLOATS), mesh, [Shard(1)])._layout
    assert platform.wrap(x, x._layout) is x
    wrapped = platform.wrap(x, other)
    assert wrapped is not x and x.placements == (Shard(0),) and wrapped.placements == (Shard(1),)
    p = Parameter(Tensor(FLOATS), name="p")
    assert isinstance(platform.wrap(p, other), DTensor) and type(p) is not type(wrapped)


def test_the_op_table_speaks_of_canonical_operations(platform: Any) -> None:
    assert {row.name for row in platform.op_table.values()} <= set(OPERATIONS)
    assert not set(OPS) & set(VARIANTS), "a name has a row or a chooser"


def test_values_of_empty_parts() -> None:
    """Results that kernels leave uninitialised."""
    for _ in range(20):
        ops.full((64,), 7.0)  # so that fresh memory is not zero
        nothing, rows = bind_of(OPS["MatMulExt"])(None, (ops.zeros((3, 0)), ops.zeros((0, 4))), {})
        product = OPS["MatMulExt"].call(mint.matmul, nothing, rows)
        total = OPS["SumExt"].call(mint.sum, (ops.zeros((0, 5)),), (None, False, None))
        assert not product.asnumpy().any() and total.asnumpy() == 0
