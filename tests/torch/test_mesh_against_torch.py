"""Meshes against torch's: the same ranks, groups and slices for the same calls; groups of other backends; functional
collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

from hyper_parallel import DeviceMesh, DTensor, Partial, Replicate, init_device_mesh
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_mesh_groups import check_use
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device


def same_mesh(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours.mesh, theirs.mesh) and ours.mesh.dtype == theirs.mesh.dtype
    assert ours.mesh.device.type == "cpu" and (ours.shape, ours.ndim) == (theirs.shape, theirs.ndim)
    assert ours.mesh_dim_names == theirs.mesh_dim_names and ours.get_coordinate() == theirs.get_coordinate()
    assert ours.size() == theirs.size() and ours.device_type == theirs.device_type
    for dim in range(ours.ndim):
        assert ours.size(dim) == theirs.size(dim) and ours.get_local_rank(dim) == theirs.get_local_rank(dim)
        groups = [mesh.get_group(dim) for mesh in (ours, theirs)]
        assert dist.get_process_group_ranks(groups[0]) == dist.get_process_group_ranks(groups[1])


def both_libraries() -> None:
    kind = device().type
    ours = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = init_torch_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
    for pick in (lambda m: m, lambda m: m["tp"], lambda m: m["dp", "tp"], lambda m: m["dp"]):
        same_mesh(pick(ours), pick(theirs))
    same_mesh(ours._flatten("all"), theirs._flatten("all"))
    same_mesh(DeviceMesh._concatenate([ours["dp"], ours["tp"]]), TorchMesh._concatenate([theirs["dp"], theirs["tp"]]))
    rows = ours._get_all_submeshes("dp"), theirs._get_all_submeshes("dp")
    assert [row.mesh.tolist() for row in rows[0]] == [row.mesh.tolist() for row in rows[1]]
    one, other = (init(kind, (4,), mesh_dim_names=("w",)) for init in (init_device_mesh, init_torch_mesh))
    for dim in (0, "w"):
        same_mesh(one._unflatten(dim, (2, 2), ("a", "b")), other._unflatten(dim, (2, 2), ("a", "b")))
    world = dist.group.WORLD
    same_mesh(DeviceMesh.from_group(world, kind), TorchMesh.from_group(world, kind))
    groups = theirs.get_all_groups()
    same_mesh(
        DeviceMesh.from_group(groups, kind, theirs.mesh, mesh_dim_names=("x", "y")),
        TorchMesh.from_group(groups, kind, theirs.mesh, mesh_dim_names=("x", "y")),
    )


def test_the_same_calls(pool: Any) -> None:
    pool.run(4, both_libraries)


def with_options() -> None:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=77)
    made = []
    for override in ({"a": ("gloo", options)}, {"a": options, "b": "gloo"}):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override=override)
        check_use(mesh, 2)
        assert dist.get_backend(mesh.get_group("a")) == "gloo"
        backend: Any = mesh.get_group("a")._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=77)
        made.append(mesh)
    assert made[0] is not made[1]
    flat = made[0]._flatten("flat", backend_override="gloo")
    check_use(flat)
    assert flat.get_group() is not dist.group.WORLD


def test_groups_with_options(pool: Any) -> None:
    if device().type == "cpu":
        pool.run(4, with_options)


@on_mesh(2, 2, names=("dp", "tp"))
def functional(mesh: Any) -> None:
    """Groups given as in ``funcol.all_reduce(x, "sum", group=(mesh, dim))``."""
    DTensor.from_local(torch.ones(1, device=device()), mesh, [Partial(), Replicate()])  # patches torch
    x = torch.full((2,), float(mesh.get_rank()), device=device())
    theirs = mesh.to_torch()
    for dim in (0, 1):
        for call in (
            lambda group: funcol.all_reduce(x, "sum", group),
            lambda group: funcol.all_gather_tensor(x, 0, group),
            lambda group: funcol.reduce_scatter_tensor(x, "sum", 0, group),
        ):
            expected = funcol.wait_tensor(call((theirs, dim)))
            close(funcol.wait_tensor(call((mesh, dim))), expected)
            close(funcol.wait_tensor(call((mesh, mesh.mesh_dim_names[dim]))), expected)
            close(funcol.wait_tensor(call(mesh[dim])), expected)
    close(funcol.wait_tensor(funcol.all_reduce(x, "sum", mesh._flatten("all"))), torch.full((2,), 6.0))
    with fails(ValueError, "name one"):
        funcol.all_reduce(x, "sum", mesh)


def test_functional_collectives(pool: Any) -> None:
    pool.run(4, functional)
