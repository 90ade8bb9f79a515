"""Meshes of existing process groups, of ranks in any order, unflattened, and sliced by index."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    fully_shard,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_fully_shard_2d import train
from hyper_parallel.testing.extent import in_gate


def check_use(mesh: Any, dims: int = 1) -> None:
    """Check gathering, summing and sharding over the mesh, for shards of different sizes."""
    if mesh.get_coordinate() is None:
        return
    adapter = get_adapter()
    whole = np.arange(15, dtype=np.float32).reshape(5, 3)
    x = DTensor.from_local(adapter.tensor(whole), mesh, None).redistribute(placements=[Shard(0)] * dims)
    same(adapter.numpy(x.full_tensor()), whole, f"shards on {mesh}")
    place = int(np.argwhere(mesh.ranks.ravel() == mesh.get_rank())[0][0])
    summed = DTensor.from_local(adapter.tensor(whole * (place + 1)), mesh, [Partial()] * dims)
    parts = summed.redistribute(placements=[Shard(0)] * dims)
    total = mesh.size() * (mesh.size() + 1) // 2
    same(adapter.numpy(parts.full_tensor()), whole * total, f"sums on {mesh}")
    across = x.redistribute(placements=[Shard(1)] * dims)
    same(adapter.numpy(across.full_tensor()), whole, f"the other dimension on {mesh}")


def in_any_order() -> None:
    for ranks in ([2, 0, 1], [3, 1], [[3, 0], [1, 2]], [3, 2, 1, 0]):
        check_use(DeviceMesh(None, ranks), np.ndim(ranks))
    assert DeviceMesh(None, [3, 1], preserve_rank_order=True) is DeviceMesh(None, [3, 1])


def test_ranks_in_any_order(pool: Any) -> None:
    """Check that shards, and the ranks of process groups, are in the order of the mesh."""
    pool.run(4, in_any_order)


def of_groups() -> None:
    platform = get_platform()
    mesh = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    groups = mesh.get_all_groups()
    assert DeviceMesh.from_group(groups, mesh.device_type, mesh.ranks, mesh_dim_names=("dp", "tp")) is mesh
    named = DeviceMesh.from_group(groups, mesh.device_type, mesh.ranks, mesh_dim_names=("rows", "columns"))
    assert named is not mesh and named.get_all_groups() == groups and named["rows"].get_group() == groups[0]
    check_use(named, 2)
    row = DeviceMesh.from_group(groups[1], mesh.device_type, mesh_dim_names=("one",))
    assert row.ranks.tolist() == mesh["tp"].ranks.tolist() and row.get_group() == groups[1]
    assert DeviceMesh.from_group([groups[1]], mesh.device_type, mesh_dim_names=("one",)) is row
    check_use(row)
    for one in (named, row):
        assert pickle.loads(pickle.dumps(one)) is one
    with fails(TypeError, "from_group takes"):
        DeviceMesh.from_group(3, mesh.device_type)
    with fails(ValueError, "needs mesh and mesh_dim_names for 2 process groups"):
        DeviceMesh.from_group(groups, mesh.device_type)
    with fails(ValueError, "got none"):
        DeviceMesh.from_group([], mesh.device_type)
    with fails(ValueError, "has 1 dimension(s), got 2 group(s)"):
        DeviceMesh.from_group(groups, mesh.device_type, [0, 1], mesh_dim_names=("a",))
    with fails(ValueError, "but no row of the mesh"):
        DeviceMesh.from_group(groups[1], mesh.device_type, [[0, 2], [1, 3]][mesh.get_local_rank("dp")])
    known = platform.describe_group(groups[0])
    assert list(known.ranks) == mesh["dp"].ranks.tolist()


def test_of_groups(pool: Any) -> None:
    pool.run(4, of_groups)


def cut() -> None:
    world = init_device_mesh(mesh_dim_names=("world",))
    both = world._unflatten("world", (2, 2), ("dp", "tp"))
    assert both.shape == (2, 2) and both.mesh_dim_names == ("dp", "tp") and both.get_root_mesh() is both
    assert both is world._unflatten(0, [2, 2], ["dp", "tp"])
    check_use(both, 2)
    check_use(both["tp"])
    deep = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("a", "b"))._unflatten("b", (1, 2), ("c", "d"))
    assert deep.shape == (2, 1, 2) and deep.mesh_dim_names == ("a", "c", "d")
    part = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("a", "b"))["b"]._unflatten(0, (2, 1), ("e", "f"))
    assert part.shape == (2, 1) and part.mesh_dim_names == ("e", "f") and part.get_root_mesh().shape == (2, 2, 1)
    check_use(part, 2)
    with fails(ValueError, "is 6", "has 4 rank(s)"):
        world._unflatten(0, (2, 3), ("x", "y"))
    with fails(ValueError, "one name for each size"):
        world._unflatten(0, (2, 2), ("x",))
    with fails(ValueError, "no dimension named 'tp'"):
        world._unflatten("tp", (2, 2), ("x", "y"))
    with fails(ValueError, "must differ"):
        both._unflatten("tp", (2, 1), ("dp", "x"))
    with fails(ValueError, "has no mesh_dim_names"):
        DeviceMesh(None, [0, 1, 2, 3])._unflatten(0, (2, 2), ("x", "y"))
    flat = both._flatten("all")
    with fails(ValueError, "is a flattened dimension"):
        flat._unflatten(0, (4, 1), ("x", "y"))


def test_dimensions_cut_into_several(pool: Any) -> None:
    pool.run(4, cut)


def sliced() -> None:
    mesh = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh[0] is mesh["dp"] and mesh[-1] is mesh["tp"] and mesh[0, 1] is mesh and mesh[1, 0] is mesh["tp", "dp"]
    assert mesh["dp", 1] is mesh and list(mesh) == [mesh["dp"], mesh["tp"]]
    unnamed = DeviceMesh(None, [[0, 1], [2, 3]])
    assert unnamed[1].shape == (2,) and unnamed[1].mesh_dim_names is None and unnamed[1] is unnamed[1]
    assert unnamed[1].get_group() == unnamed.get_group(1)
    check_use(unnamed[0])
    with pytest.raises(IndexError, match="no dimension"):
        mesh[2]
    with pytest.raises(KeyError, match="named twice"):
        mesh[0, 0]
    rows = mesh._get_all_submeshes("tp")
    assert [row.ranks.tolist() for row in rows] == [[0, 1], [2, 3]] and mesh._get_all_submeshes("tp") == rows
    assert rows[mesh.get_local_rank("dp")] is mesh["tp"]
    other = rows[1 - mesh.get_local_rank("dp")]
    assert other.get_coordinate() is None and other.get_group() is None and other.mesh_dim_names == ("tp",)
    flat = mesh._flatten("all")
    assert mesh.get_group("all") == flat.get_group() and mesh.get_group(mesh_dim="all") == flat.get_group()
    x = DTensor.from_local(get_adapter().tensor(np.ones(1, np.float32)), flat, [Shard(0)])
    assert x.redistribute(placements=[Replicate()]).shape == (4,)


def test_slices_by_index(pool: Any) -> None:
    pool.run(4, sliced)


def overridden() -> None:
    platform = get_platform()
    names = ("x", "y")
    for override in ({"x": platform.comm_backend}, {0: (platform.comm_backend, None)}, {}):
        mesh = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=names, backend_override=override)
        check_use(mesh, 2)
        again = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=names, backend_override=override)
        assert again is mesh
    plain = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=names)
    assert mesh is plain
    pairs = ((platform.comm_backend, None), (None, None))
    assert DeviceMesh(None, plain.ranks, mesh_dim_names=names, backend_override=pairs) is not plain
    for wrong, words in (
        ({"z": "gloo"}, "names the dimension 'z'"),
        ({2: "gloo"}, "names the dimension 2"),
        ({"x": "gloo", 0: "gloo"}, "names dimension 0 twice"),
        ([(None, None)], "has 1 entries"),
    ):
        with fails(ValueError, words):
            init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=names, backend_override=wrong)  # type: ignore[arg-type]
    with fails(TypeError, "needs the ranks"):
        DeviceMesh(None)


def test_other_backends(pool: Any) -> None:
    pool.run(4, overridden)


#: name -> how the world is cut for tensor parallelism, and its dimension; how for data parallelism, and its dimensions.
TWICE: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "equal": (((2, 2), ("batch", "tp")), "tp", ((2, 2), ("fsdp", "tp")), ("fsdp",)),
    "other names": (((2, 2), ("batch", "model")), "model", ((1, 2, 2), ("pp", "fsdp", "tp")), ("fsdp",)),
    "two of data": (((2, 1, 2), ("batch", "cp", "tp")), "tp", ((1, 2, 2), ("rep", "fsdp", "tp")), ("rep", "fsdp")),
    "one rank each": (((4, 1), ("batch", "tp")), "tp", ((4, 1), ("fsdp", "tp")), ("fsdp",)),
    "several as one": (((4,), ("tp",)), "tp", ((1, 2, 2), ("fsdp", "a", "b")), ("fsdp",)),
    "the outer one": (((2, 2), ("tp", "rest")), "tp", ((2, 2), ("x", "fsdp")), ("fsdp",)),
}


def trained_on_two(name: str, in_parts: bool) -> None:
    """Check a plan on one mesh and `fully_shard` on another.

    With ``in_parts``, a submodule is a separate unit.
    """
    (sizes, names), tensor, (data_sizes, data_names), data = TWICE[name]
    world, adapter = init_device_mesh(mesh_dim_names=("world",)), get_adapter()
    tp = world._unflatten(0, sizes, names)[tensor]
    dp = world._unflatten(0, data_sizes, data_names)[data]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    train(
        *(DeviceMesh._concatenate([dp, tp]), dp, tp, lambda: adapter.Mlp(6, 7), plan),
        lambda model: [fully_shard(part, mesh=dp) for part in ((model.down, model) if in_parts else (model,))],
        lambda rng, rows: rng.standard_normal((rows, 1, 6)).astype(np.float32),
    )


@pytest.mark.parametrize("name", in_gate(TWICE, ("equal", "two of data", "several as one")))
def test_plan_on_one_mesh_and_data_on_another(pool: Any, name: str) -> None:
    """Check a plan and `fully_shard` on two meshes that were unflattened from one mesh, as in torchtitan.

    Dimensions with the same ranks in the same order count as one dimension.
    """
    pool.run(4, trained_on_two, name, name != "two of data")


def of_other_ranks() -> None:
    world, adapter = init_device_mesh(mesh_dim_names=("world",)), get_adapter()
    first, second = world._unflatten(0, (2, 2), ("tp", "rest")), world._unflatten(0, (2, 2), ("fsdp", "tp"))
    model = adapter.Mlp(6, 5)
    parallelize_module(model, first["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with fails(ValueError, "fully_shard needs another dimension"):
        fully_shard(model, mesh=second["fsdp"])
    crossed = DeviceMesh(None, [[0, 2, 3, 1]], mesh_dim_names=("x", "fsdp"))
    with fails(ValueError, "Make one mesh with init_device_mesh"):
        fully_shard(model, mesh=crossed["fsdp"])


def test_dimensions_that_share_ranks(pool: Any) -> None:
    pool.run(4, of_other_ranks)
