"""Distributed parameters: identity, copies, data, checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

from hyper_parallel import DTensor, Shard, distribute_tensor, implicit_replication
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import Net, batch, error_of, make_net, whole


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(whole(a), whole(b)))


@on_mesh()
def identity(mesh: Any) -> dict[str, bool]:
    plain, net = make_net(), Net()
    before = dict(net.parameters_and_names())
    from hyper_parallel import ColwiseParallel, Replicate, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "head": ColwiseParallel(), "embedding": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(net, mesh, plan)
    after = dict(net.parameters_and_names())
    up = net.up.weight
    return {
        "the objects stay": all(after[name] is p for name, p in before.items()),
        "ties stay": net.head.weight is net.embedding.embedding_table,
        "names stay": [p.name for p in net.get_parameters()] == [p.name for p in plain.get_parameters()],
        "a parameter and a DTensor": isinstance(up, Parameter) and isinstance(up, DTensor),
        "global shape": up.shape == (16, 8) and up.size == 128 and up.ndim == 2 and len(up) == 16,
        "trainable": up.requires_grad and len(net.trainable_params()) == len(plain.trainable_params()),
        "printable": "DTensor(" in repr(up) and "Dense" in repr(net),
        "iterable": len(list(up)) == 16,
    }


def test_identity(pool: Any) -> None:
    for result in pool.run(2, identity):
        assert all(result.values()), result


@on_mesh()
def frozen(mesh: Any) -> list[Any]:
    from hyper_parallel import ColwiseParallel, parallelize_module

    net = Net()
    net.up.weight.requires_grad = False
    parallelize_module(net, mesh, {"up": ColwiseParallel()})
    return [net.up.weight.requires_grad, net.up.bias.requires_grad]


def test_frozen(pool: Any) -> None:
    assert pool.run(2, frozen) == [[False, True]] * 2


@on_mesh()
def copies(mesh: Any) -> dict[str, bool]:
    net = make_net(mesh)
    other = copy.deepcopy(net)
    ids = batch()[0]
    result = {
        "equal": all(same(p, q) for p, q in zip(net.get_parameters(), other.get_parameters(), strict=True)),
        "ties": other.head.weight is other.embedding.embedding_table,
        "not shared": other.up.weight is not net.up.weight,
        "runs": np.allclose(other(ids).asnumpy(), net(ids).asnumpy(), atol=1e-6),
        "distributed": isinstance(other.up.weight, DTensor) and other.up.weight.placements == (Shard(0),),
    }
    other.up.weight.set_data(ops.zeros((16, 8)))
    zeros = net.up.weight.clone("zeros")
    result["independent"] = not same(other.up.weight, net.up.weight)
    result["clone"] = isinstance(zeros, Parameter) and zeros.placements == (Shard(0),) and not whole(zeros).any()
    result["copy"] = same(copy.copy(net.up.weight), net.up.weight) and same(net.up.weight.clone(), net.up.weight)
    result["deepcopy of a DTensor"] = same(copy.deepcopy(net.up.weight * 2), net.up.weight * 2)
    return result


def test_copies(pool: Any) -> None:
    for result in pool.run(2, copies):
        assert all(result.values()), result


@on_mesh()
def set_data(mesh: Any) -> dict[str, Any]:
    weight = make_net(mesh).up.weight
    values = np.arange(128, dtype=np.float32).reshape(16, 8)
    weight.set_data(Tensor(values))
    result = {"whole": np.array_equal(whole(weight), values)}
    weight.set_data(ops.ones(weight._layout.local_shape), slice_shape=True)
    result["part"] = bool((whole(weight) == 1).all())
    weight.set_data(distribute_tensor(Tensor(values), mesh, [Shard(0)]))
    result["DTensor"] = np.array_equal(whole(weight), values)
    ops.assign(weight, distribute_tensor(Tensor(values * 2), mesh, [Shard(0)]))
    result["assign"] = np.array_equal(whole(weight), values * 2)
    result["wrong shape"] = error_of(weight.set_data, ops.ones((3, 3)))
    result["wrong placement"] = error_of(weight.set_data, distribute_tensor(Tensor(values), mesh, [Shard(1)]))
    return result


def test_set_data(pool: Any) -> None:
    for result in pool.run(2, set_data):
        assert "has shape (16, 8), and the new data has shape (3, 3)" in result.pop("wrong shape")
        assert "redistribute the data first" in result.pop("wrong placement")
        assert all(result.values()), result


@on_mesh()
def checkpoint(mesh: Any, folder: str, kind: str) -> list[bool]:
    """MindSpore's own functions save whole values, of cells and of dicts, and load them into parts."""
    net, other = make_net(mesh), make_net(mesh)
    file = str(Path(folder, f"rank{mesh.platform.rank()}"))
    found = []
    for saved in (net, {p.name: p for p in net.get_parameters()}):
        for p in other.get_parameters():
            p.set_data(ops.zeros(p.shape))
        ms.save_checkpoint(saved, file if kind == "safetensors" else f"{file}.ckpt", format=kind)
        whole = ms.load_checkpoint(f"{file}.{kind}", format=kind)
        missing = ms.load_param_into_net(other, whole)
        found += [
            missing == ([], []),
            all(same(p, q) for p, q in zip(net.get_parameters(), other.get_parameters(), strict=True)),
            isinstance(other.up.weight, DTensor),
            all(tuple(whole[p.name].shape) == tuple(p.shape) for p in net.get_parameters()),
        ]
    return found


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_checkpoint(pool: Any, tmp_path: Path, kind: str) -> None:
    assert pool.run(2, checkpoint, str(tmp_path), kind) == [[True] * 8] * 2


@on_mesh()
def host_values(mesh: Any) -> list[Any]:
    x = distribute_tensor(Tensor(np.arange(6, dtype=np.float32)), mesh, [Shard(0)])
    total = x.sum()
    return [
        x.asnumpy().tolist(),
        x.tolist(),
        np.asarray(x).shape,
        total.item(),
        float(total),
        int(total),
        bool(total > 0),
        error_of(lambda: x.__reduce_ex__(2)).split(":")[0],
        x == None,  # noqa: E711
        len({x: 1}),
    ]


def test_values_on_the_host_are_global(pool: Any) -> None:
    numbers = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert pool.run(2, host_values) == [[numbers, numbers, (6,), 15.0, 15.0, 15, True, "TypeError", False, 1]] * 2


@on_mesh()
def plain_parameters_as_left_operands(mesh: Any) -> list[Any]:
    """Python does not ask the DTensor first, and MindSpore looks at the left operand only."""
    values = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    x, scale = distribute_tensor(Tensor(values), mesh, [Shard(0)]), ms.Parameter(Tensor(3.0))
    results = [scale + x, scale - x, scale * x, scale / x, scale // x, scale % x, scale**x, scale == x, scale != x]
    wanted = [3 + values, 3 - values, 3 * values, 3 / values, 3 // values, 3 % values, 3**values]
    wanted += [values == 3, values != 3]
    ms.ops.assign(scale, x.sum())
    matrix = ms.Parameter(Tensor(np.ones((2, 4), np.float32)))
    with implicit_replication():
        product = whole(matrix @ x)
    return [
        [w.shape for r, w in zip(results, wanted, strict=True) if not np.allclose(whole(r), w)],
        float(scale),
        product.tolist(),
        error_of(lambda: matrix @ x).startswith("ValueError: MatMulExt got a plain tensor (argument 'x',"),
    ]


def test_plain_parameters_as_left_operands(pool: Any) -> None:
    wanted = [[], 36.0, [[16.0, 20.0]] * 2, True]
    assert pool.run(2, plain_parameters_as_left_operands) == [wanted] * 2
