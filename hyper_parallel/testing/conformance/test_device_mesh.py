"""DeviceMesh: structure, slicing, identity, ranks outside of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from hyper_parallel import DeviceMesh, DTensor, Partial, Shard, get_platform, init_device_mesh
from hyper_parallel.core.mesh.device_mesh import current_mesh
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter


def structure() -> None:
    mesh = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    rank = mesh.get_rank()
    assert mesh.device_type == get_platform().device_type
    assert (mesh.shape, mesh.ndim, mesh.size(), mesh.size("tp"), mesh.size(0)) == ((2, 2), 2, 4, 2, 2)
    assert mesh.get_coordinate() == (rank // 2, rank % 2)
    assert (mesh.get_local_rank("dp"), mesh.get_local_rank(1)) == (rank // 2, rank % 2)
    assert isinstance(mesh.mesh, get_platform().Tensor) and str(mesh.mesh.dtype).lower().endswith("int32")
    assert mesh.ranks.tolist() == [[0, 1], [2, 3]]
    if hasattr(mesh.mesh, "tolist"):  # which the contract does not ask of tensors
        assert mesh.mesh.tolist() == mesh.ranks.tolist()
        assert DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=("dp", "tp")) is mesh
    tp, dp = mesh["tp"], mesh["dp"]
    assert (tp.shape, tp.mesh_dim_names, tp.get_local_rank()) == ((2,), ("tp",), rank % 2)
    assert tp.ranks.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dp.ranks.tolist() == [rank % 2, rank % 2 + 2]
    assert tp.get_group() is mesh.get_group("tp")
    assert mesh["dp", "tp"] is mesh
    assert mesh["tp", "dp"].ranks.tolist() == [[0, 2], [1, 3]]

    # Structural identity: the same mesh is the same object, and another name or order is another mesh.
    assert init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp")) is mesh
    assert DeviceMesh(mesh.device_type, [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")) == mesh
    assert init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("a", "b")) != mesh
    assert DeviceMesh(mesh.device_type, [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp")) != mesh
    assert copy.deepcopy(mesh) is mesh
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert mesh["tp"] is tp

    assert current_mesh() is None
    with mesh, tp:
        assert current_mesh() is tp
        adapter = get_adapter()
        assert DTensor.from_local(adapter.tensor(np.zeros(2, np.float32)), None, [Shard(0)]).device_mesh is tp
    assert current_mesh() is None


def outside() -> str:
    mesh = DeviceMesh(None, [1, 3])
    rank = mesh.get_rank()
    if rank in (0, 2):
        assert mesh.get_coordinate() is None
        try:
            mesh.get_local_rank()
        except ValueError as error:
            return str(error)
        return ""
    assert mesh.get_coordinate() == ((rank - 1) // 2,)
    adapter = get_adapter()
    x = DTensor.from_local(adapter.tensor(np.full((2,), rank, np.float32)), mesh, [Shard(0)])
    assert adapter.numpy(x).tolist() == [1, 1, 3, 3]
    return "inside"


def test_structure(pool: Any) -> None:
    pool.run(4, structure)


def test_ranks_outside(pool: Any) -> None:
    results = pool.run(4, outside)
    assert results[1] == results[3] == "inside"
    assert "rank 0 is not part of" in results[0]


def test_default_is_the_whole_world(pool: Any) -> None:
    assert pool.run(4, whole_world) == [(4,)] * 4


def whole_world() -> tuple[int, ...]:
    return init_device_mesh().shape


def made_after_slices() -> None:
    """Check that all ranks create a mesh even if some ranks have it as a dimension of another mesh already."""
    whole = spmd.device_mesh(2, 2, names=("rows", "cols"))
    assert whole["cols"].size() == 2
    row = DeviceMesh(None, [0, 1], mesh_dim_names=("cols",))
    assert DeviceMesh(None, [0, 1], mesh_dim_names=("cols",)) is row
    crossed = DeviceMesh(None, [[0, 3], [1, 2]])
    x = DTensor.from_local(get_adapter().tensor(np.ones(2, np.float32)), crossed, [Partial(), Partial()])
    assert get_adapter().numpy(x).tolist() == [4, 4]


def test_mesh_that_is_a_dimension_of_another_one_on_some_ranks(pool: Any) -> None:
    pool.run(4, made_after_slices)


def roots() -> None:
    """Check the root of slices.

    Slices of different meshes are different objects, even with equal ranks. Two slices with equal rows of ranks count
    as the same dimension.
    """
    mesh = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    assert mesh.get_root_mesh() is mesh and tp.get_root_mesh() is mesh
    assert mesh["tp", "dp"]["dp"] is mesh["dp"] and mesh["tp", "dp"].get_root_mesh() is mesh
    assert tp["tp"] is tp and tp._flatten() is tp
    ranks = mesh.ranks.tolist()
    alone = [DeviceMesh(None, row, mesh_dim_names=("tp",)) for row in ranks][mesh.get_local_rank("dp")]
    assert alone.ranks.tolist() == tp.ranks.tolist() and alone is not tp and alone.get_root_mesh() is alone
    other = DeviceMesh(None, [ranks], mesh_dim_names=("pp", "dp", "tp"))
    assert other["tp"].ranks.tolist() == tp.ranks.tolist() and other["tp"] is not tp
    for one in (mesh, tp, alone, other["tp"], other["dp", "tp"]):
        assert pickle.loads(pickle.dumps(one)) is one
    assert DeviceMesh._concatenate([tp, other["dp"]]) is mesh
    assert DeviceMesh._concatenate([other["dp"], tp]) is other["dp", "tp"]
    assert tp.is_beside(other["dp"]) and other["dp", "tp"].contains(tp) and other.index_of(tp, 0) == 2
    assert not tp.is_beside(other["tp"]) and not mesh.contains(other["pp"]) and not mesh.is_beside(alone)
    crossed = DeviceMesh(None, mesh.ranks.T, mesh_dim_names=("dp", "tp"))
    for pair in ([tp, alone], [tp, crossed["tp"], alone]):
        assert "are not slices of one mesh. Make one" in message(lambda pair=pair: DeviceMesh._concatenate(pair))
    assert "is not a slice of" in message(lambda: mesh.index_of(alone, 0))
    assert DeviceMesh._concatenate([tp, crossed["tp"]]) is mesh  # whose "tp" are the ranks of "dp"
    assert "share a dimension" in message(lambda: DeviceMesh._concatenate([mesh, tp]))
    assert DeviceMesh._concatenate([tp, mesh["dp"]]) is mesh
    assert DeviceMesh._concatenate([other["tp"], other["pp"]]) is other["pp", "tp"]
    unnamed = DeviceMesh(None, [[0, 1], [2, 3]])
    assert DeviceMesh._concatenate([unnamed]) is unnamed
    assert "has no mesh_dim_names" in message(unnamed._flatten)


def flattened(shape: tuple[int, ...]) -> None:
    """Check that several dimensions can be flattened to one with its own process group."""
    mesh = init_device_mesh(mesh_shape=shape, mesh_dim_names=("replicate", "shard", "tp"))
    both = mesh["replicate", "shard"]
    dp = both._flatten("dp")
    assert (dp.shape, dp.mesh_dim_names, dp.get_root_mesh()) == ((shape[0] * shape[1],), ("dp",), mesh)
    assert dp.ranks.tolist() == both.ranks.ravel().tolist()
    assert mesh["dp"] is dp and both["dp"] is dp and both._flatten("dp") is dp and pickle.loads(pickle.dumps(dp)) is dp
    assert both._flatten().mesh_dim_names == ("replicate_shard",)
    assert mesh["dp", "tp"].shape == (dp.size(), shape[2])
    assert DeviceMesh._concatenate([mesh["tp"], dp]) is mesh["dp", "tp"]
    assert DeviceMesh._concatenate([mesh["tp"], both]) is mesh
    assert "share a dimension of their root mesh" in message(lambda: DeviceMesh._concatenate([mesh["shard"], dp]))
    assert "another dimension named 'tp'" in message(lambda: both._flatten("tp"))
    assert "another dimension named 'dp'" in message(lambda: mesh["shard", "tp"]._flatten("dp"))
    for wrong in (lambda: mesh["dp", "shard"], lambda: mesh["tp"]["dp"]):
        try:
            wrong()
        except KeyError as error:
            assert "a dimension is named twice" in str(error) or "has no dimension 'dp'" in str(error)
        else:
            raise AssertionError("no KeyError")
    adapter = get_adapter()
    x = DTensor.from_local(adapter.tensor(np.ones(1, np.float32)), mesh["dp", "tp"], [Partial(), Shard(0)])
    assert adapter.numpy(x).tolist() == [dp.size()] * shape[2]


def message(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError")


def test_roots(pool: Any) -> None:
    pool.run(4, roots)


@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 1, 2), (1, 2, 2)], ids=str)
def test_flattened_dimensions(pool: Any, shape: tuple[int, ...]) -> None:
    pool.run(4, flattened, shape)


def loaded() -> None:
    """Check that a pickled mesh is loaded as the existing mesh with the same ranks and names. No other mesh is
    created."""
    platform = get_platform()
    size = platform.world_size()
    mesh = init_device_mesh(mesh_shape=(size // 2, 2), mesh_dim_names=("dp", "tp"))
    rebuild, arguments = mesh["tp"].__reduce__()
    assert rebuild(*arguments) is mesh["tp"]
    everyone = rebuild(mesh.device_type, list(range(size)), ("all ranks of a file",))
    assert everyone.shape == (size,) and everyone.mesh_dim_names == ("all ranks of a file",)
    for ranks, names in (([0, size + 3], None), ([0, 1], ("no such name",)), ([1, 0], ("tp",))):
        with pytest.raises(RuntimeError, match="Make the mesh first"):
            rebuild(mesh.device_type, ranks, names)


def test_meshes_of_what_was_saved(pool: Any) -> None:
    pool.run(4, loaded)
