"""`local_map`: functions of local tensors applied to DTensors; and `visualize_sharding`."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel import DTensor, PackedShard, Partial, Replicate, Shard, init_device_mesh, zeros
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.debug import visualize_sharding
from hyper_parallel.experimental import local_map
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@on_mesh()
def products(mesh: Any) -> None:
    """Check ``x @ w`` with w sharded by rows: the result, and the gradient of a replicated x, are partial sums."""
    adapter, size = get_adapter(), mesh.size()
    x, w, weights = floats(3, 2 * size), floats(2 * size, 4), floats(3, 4)
    expected = x @ w

    def by_parts(a: Any, b: Any, scale: int) -> tuple[Any, int]:
        return (a @ b) * scale, scale

    mapped = local_map(
        by_parts,
        out_placements=([Partial()], None),
        in_placements=([S1], [S0], None),
        redistribute_inputs=True,
    )
    part = get_layout(mesh, (S0,), w.shape).local_index()

    def loss(a: Any, b: Any) -> tuple[Any, Any]:
        whole = DTensor.from_local(a, mesh, [R])
        y, scale = mapped(whole, DTensor.from_local(b, mesh, [S0]), 2)
        assert scale == 2 and y.placements == (Partial(),) and tuple(y.shape) == (3, 4)
        y = y.redistribute(placements=[R])
        return adapter.weighted_sum(y.to_local(), adapter.tensor(weights)), y

    y, (grad_x, grad_w) = adapter.value_and_grads(loss, [x, w[part]])
    same(adapter.numpy(y), 2 * expected, "product", 1e-4)
    same(grad_x, 2 * weights @ w.T, "gradient of the replicated input", 1e-4)
    same(grad_w, (2 * x.T @ weights)[part], "gradient of the shard", 1e-4)


@on_ranks(1, 2, 3)
def test_products(pool: Any, world_size: int) -> None:
    pool.run(world_size, products)


@on_mesh()
def gradients_of_parts(mesh: Any) -> None:
    """Check a replicated input of which each rank uses a different part."""
    adapter, size, rank = get_adapter(), mesh.size(), mesh.get_local_rank()
    x = floats(size, 3)

    @local_map(out_placements=[S0], in_placements=([R],), in_grad_placements=([Partial()],))
    def own_row(a: Any) -> Any:
        return a[rank : rank + 1] * 3.0

    def loss(a: Any) -> tuple[Any, Any]:
        y = own_row(DTensor.from_local(a, mesh, [R]))
        return adapter.weighted_sum(y.to_local(), adapter.tensor(np.ones((1, 3), np.float32))), y

    y, (grad,) = adapter.value_and_grads(loss, [x])
    same(adapter.numpy(y), 3 * x, "rows", 1e-5)
    same(grad, np.full((size, 3), 3.0, np.float32), "gradient", 1e-5)


@on_ranks(1, 2)
def test_gradients_of_parts(pool: Any, world_size: int) -> None:
    pool.run(world_size, gradients_of_parts)


@on_mesh()
def refused(mesh: Any) -> None:
    adapter = get_adapter()
    plain = adapter.tensor(floats(2, 2))
    x = DTensor.from_local(plain, mesh, [S0])
    assert local_map(lambda a: a, [S0])(plain) is plain  # no DTensor: the function itself
    nested = local_map(lambda pair: {"sum": pair[0] + pair[1], "rest": None}, out_placements=([S0], None))
    assert nested([x, x])["rest"] is None and nested((x, x))["sum"].placements == (S0,)
    assert local_map(lambda a, b=1: a * b, [S0])(x, b=2).placements == (S0,)
    with fails(ValueError, "argument 0", "redistribute_inputs=True"):
        local_map(lambda a: a, [S0], in_placements=([R],))(x)
    with fails(ValueError, "got 1 argument(s), but in_placements has 2 entries"):
        local_map(lambda a: a, [S0], in_placements=([R], [R]))(x)
    with fails(ValueError, "got 1 argument(s), but in_grad_placements has 2 entries"):
        local_map(lambda a: a, [S0], in_grad_placements=([R], [R]))(x)
    with fails(TypeError, "in_placements has None for it"):
        local_map(lambda a: a, [S0], in_placements=(None,))(x)
    with fails(ValueError, "returned 2 result(s), but out_placements has 1 entries"):
        local_map(lambda a: (a, a), [S0])(x)
    with fails(TypeError, "result 0 is a int"):
        local_map(lambda a: 3, [S0])(x)
    with fails(TypeError, "placements for tensors"):
        local_map(lambda a: a)(x)
    with fails(TypeError, "result 0 is a DTensor"):
        local_map(lambda a: x, [S0])(x)
    with fails(TypeError, "takes a DTensor"):
        visualize_sharding(plain)
    with fails(ValueError, "one or two dimensions"):
        visualize_sharding(zeros(2, 2, 2, device_mesh=mesh, placements=[S0]))


def test_refused(pool: Any) -> None:
    pool.run(2, refused)


def shown() -> list[str]:
    mesh = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    texts = []
    for size, placements in (((3, 4), [S0, S1]), ((3,), [S0, R]), ((4, 2), [R, PackedShard(0, 2)]), ((0, 2), [R, R])):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            visualize_sharding(zeros(size, device_mesh=mesh, placements=placements), header="x")
        # The device may have a longer name; the width of columns stays.
        text = re.sub(rf"{mesh.device_type}(:\S+)", lambda m: f"cpu{m[1]}".ljust(len(m[0])), out.getvalue())
        texts.append(re.sub(" +\n", "\n", text))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "x.svg"
        for size, placements in (((2, 4), [R, S1]), ((99, 2), [R, R])):
            visualize_sharding(zeros(size, device_mesh=mesh, placements=placements), path=str(path))
            assert path.exists() == (mesh.get_rank() == 0)
            texts.append(path.read_text() if path.exists() else "")
    return texts


def test_shown(pool: Any) -> None:
    first, *others = pool.run(4, shown)
    *first, cut, whole = first
    assert first == [
        "x\n         Col 0-1  Col 2-3\nRow 0-1  cpu:0    cpu:1\nRow 2-2  cpu:2    cpu:3\n",
        "x\n         Col 0-0\nRow 0-1  cpu:0,1\nRow 2-2  cpu:2,3\n",
        "x\n         Col 0-1\nRow 0-0  cpu:0,2\nRow 1-1  cpu:1,3\nRow 2-2  cpu:0,2\nRow 3-3  cpu:1,3\n",
        "",
    ]
    assert others == [[""] * 6] * 3
    # Two parts, of two ranks each, with lines between the elements; one that every rank has, too small for lines.
    assert cut.startswith("<svg") and ">0, 2<" in cut and ">1, 3<" in cut and cut.count("<line") == 4
    assert "0, 1, 2, 3" in whole and "#e8e8e8" in whole and "<line" not in whole and "99 x 2 elements" in whole
