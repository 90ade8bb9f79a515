"""Meshes and DTensors of torch made of this library's and back: same groups, same memory, same gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as of_torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.nn.parallel import DistributedDataParallel

import hyper_parallel
from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DeviceMesh,
    PackedShard,
    Partial,
    Placement,
    Replicate,
    RowwiseParallel,
    Shard,
    StridedShard,
    distribute_parameter,
    distribute_tensor,
    fully_shard,
    get_platform,
    init_device_mesh,
    parallelize_module,
    replicate,
)
from hyper_parallel.testing.spmd import on_mesh
from hyper_parallel.torch import from_torch_dtensor, to_torch_dtensor
from tests.torch.support import close, device, randn

on_2_by_2 = on_mesh(2, 2, names=("dp", "tp"))


def groups_made(call: Any) -> tuple[Any, int]:
    """The result of ``call()``, and the number of process groups that it makes."""
    before = len(dist.distributed_c10d._world.pg_map)
    result = call()
    return result, len(dist.distributed_c10d._world.pg_map) - before


# ------------------------------------------------------------------------------------------------ meshes
@on_2_by_2
def to_torch(mesh: Any) -> None:
    theirs, made = groups_made(mesh.to_torch)
    assert made == 0
    assert theirs.mesh.tolist() == mesh.mesh.tolist() and theirs.mesh_dim_names == ("dp", "tp")
    assert theirs.device_type == device().type and theirs.get_coordinate() == mesh.get_coordinate()
    assert theirs.get_all_groups() == mesh.get_all_groups()
    parts, made = groups_made(lambda: [mesh[name].to_torch() for name in ("dp", "tp")])
    assert made == 0
    for name, part in zip(("dp", "tp"), parts, strict=True):
        assert part == theirs[name] and part._get_root_mesh() is theirs
        assert part.get_group() is mesh.get_group(name)
    assert type(theirs)._concatenate(parts) == theirs
    assert mesh.to_torch() is theirs and DeviceMesh.from_torch(theirs) is mesh
    assert DeviceMesh.from_torch(parts[1]) is mesh["tp"]
    # An equal slice of another mesh stays a slice of that one.
    others = init_torch_mesh(device().type, (2, 1, 2), mesh_dim_names=("replicas", "dp", "tp"))
    assert others["tp"] == parts[1] and DeviceMesh.from_torch(others["tp"]) is DeviceMesh.from_torch(others)["tp"]
    assert DeviceMesh.from_torch(parts[1]) is mesh["tp"]


@on_2_by_2
def taken(mesh: Any) -> None:
    """Functions that take a mesh take one of torch's own. It becomes the mesh of its ranks, names and groups."""
    theirs = init_torch_mesh(device().type, (2, 2), mesh_dim_names=("rows", "columns"))
    ours = DeviceMesh.from_torch(theirs)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).to(device())
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    _, made = groups_made(lambda: parallelize_module(model, theirs["columns"], plan))
    assert made == 0 and model[0].weight.device_mesh is ours["columns"]
    single = copy.deepcopy(model[1])
    assert (
        RowwiseParallel().apply(nn.Linear(4, 4).to(device()), theirs["columns"]).weight.device_mesh is ours["columns"]
    )
    fully_shard(model, mesh=theirs["rows"])
    assert model[0].weight.device_mesh is ours
    assert distribute_tensor(randn(4), theirs, [Shard(0), Replicate()]).device_mesh is ours
    distribute_parameter(linear := nn.Linear(4, 2).to(device()), "weight", theirs["rows"], [Shard(0)])
    assert linear.weight.device_mesh is ours["rows"] and single.weight.device_mesh is ours["columns"]
    # And what else torch's replicate takes.
    replica = nn.Linear(4, 2).to(device())
    ids = None if device().index is None else [device().index]
    replicate(replica, process_group=theirs["rows"].get_group(), device_ids=ids)
    x = randn(4, 4)[ours["rows"].get_local_rank() :: 2]
    replica(x).sum().backward()
    average = randn(4, 4).sum(0) / 2
    close(replica.weight.grad, average.expand(2, 4), "gradient")
    with pytest.raises(TypeError, match=r"takes a torch\.distributed\.ProcessGroup, got str"):
        replicate(nn.Linear(4, 2).to(device()), process_group="dp")


def test_meshes_of_torch_are_taken(pool: Any) -> None:
    pool.run(4, taken)


def test_the_alias_of_torchs_name() -> None:
    assert hyper_parallel._StridedShard is StridedShard
    assert hyper_parallel._StridedShard(0, split_factor=2) == StridedShard(0, 2)


def test_to_torch(pool: Any) -> None:
    """Slices stay slices of one mesh."""
    pool.run(4, to_torch)


@on_2_by_2
def from_torch(mesh: Any) -> None:
    theirs = init_torch_mesh(device().type, (2, 2), mesh_dim_names=("data", "model"))
    part, made = groups_made(lambda: DeviceMesh.from_torch(theirs["model"]))
    ours = DeviceMesh.from_torch(theirs)
    assert made == 0 and ours["model"] is part and part.get_root_mesh() is ours
    assert ours is not mesh and ours.mesh_dim_names == ("data", "model") and ours.shape == (2, 2)
    assert ours.get_all_groups() == theirs.get_all_groups()
    assert ours.to_torch() is theirs and part.to_torch() == theirs["model"]
    x = distribute_tensor(randn(5, 3), ours, [Shard(0), Shard(1)])
    close(x.full_tensor(), randn(5, 3))
    assert init_device_mesh(None, (2, 2), mesh_dim_names=("data", "model")) is ours
    again = init_torch_mesh(device().type, (2, 2), mesh_dim_names=("data", "model"))
    assert DeviceMesh.from_torch(again) is ours, "equal meshes are one"


def test_from_torch(pool: Any) -> None:
    pool.run(4, from_torch)


@on_mesh(2, 1, 2, names=("dp_shard", "cp", "tp"))
def flattened(mesh: Any) -> None:
    theirs = init_torch_mesh(device().type, (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    ours = DeviceMesh.from_torch(theirs)
    joined = theirs["a", "b"]._flatten("ab")
    flat, made = groups_made(lambda: DeviceMesh.from_torch(joined))
    assert made == 0 and flat.mesh_dim_names == ("ab",) and flat.get_root_mesh() is ours
    assert ours["ab"] is flat
    assert flat.mesh.tolist() == ours["a"].mesh.tolist()
    all_of_it = DeviceMesh.from_torch(theirs._flatten("all"))
    assert all_of_it.size() == 4 and all_of_it.get_root_mesh() is ours
    close(distribute_tensor(randn(5), all_of_it, [Shard(0)]).full_tensor(), randn(5))
    renamed = theirs["c"]._flatten("cc")
    alone, made = groups_made(lambda: DeviceMesh.from_torch(renamed))
    assert made == 0 and alone.mesh_dim_names == ("cc",) and alone.get_group() is ours.get_group("c")
    assert ours["a", "cc"].mesh.tolist() == ours["a", "c"].mesh.tolist()
    with pytest.raises(ValueError, match=r"was flattened with this library.*mesh first"):
        mesh["dp_shard", "cp"]._flatten("dp").to_torch()


def test_flattened_dimensions(pool: Any) -> None:
    """Torch's are known by their ranks; torch has no way to be told of one without making a group."""
    pool.run(4, flattened)


@on_mesh(4)
def meshes_refused(mesh: Any) -> None:
    split = init_torch_mesh(device().type, (4,), mesh_dim_names=("w",))._unflatten(0, (2, 2), ("x", "y"))
    with pytest.raises(ValueError, match=r"'x' has the ranks .* which no dimension of .* use hyper_parallel\.init_dev"):
        DeviceMesh.from_torch(split["x"])
    for wrong in (3, mesh, "cpu"):
        with pytest.raises(TypeError, match=r"from_torch takes a torch\.distributed\.device_mesh\.DeviceMesh, got"):
            DeviceMesh.from_torch(wrong)
    with pytest.raises(ValueError, match=r"\[\[0, 1\], \[2, 3\]\] needs names .*mesh_dim_names"):
        DeviceMesh(None, [[0, 1], [2, 3]]).to_torch()
    with pytest.raises(ValueError, match=r"\[1, 0, 3, 2\] must ascend"):
        DeviceMesh(None, [1, 0, 3, 2]).to_torch()
    with pytest.raises(
        ValueError, match=r"in the order of its dimensions, \('dp', 'tp'\), but this slice has the order \('tp', 'dp'\)"
    ):
        init_device_mesh(None, (2, 2), mesh_dim_names=("dp", "tp"))["tp", "dp"].to_torch()
    two = DeviceMesh(None, [0, 1])
    if mesh.get_rank() < 2:
        assert two.to_torch().get_group() is two.get_group()
    else:
        with pytest.raises(ValueError, match=r"rank \d is not part of"):
            two.to_torch()
    lookalike = type("DeviceMesh", (), {"device_type": device().type})()
    for wrong, words in ((3, "got builtins.int"), (lookalike, "which is not this library's")):
        with pytest.raises(TypeError, match=f"distribute_tensor needs a hyper_parallel DeviceMesh, .*{words}"):
            distribute_tensor(randn(4), wrong, [Shard(0)])
    theirs = init_torch_mesh(device().type, (2, 2), mesh_dim_names=("x", "y"))
    split = theirs["x"]._unflatten(0, (1, 2), ("x1", "x2"))
    with pytest.raises(ValueError, match=r"dimension 'x1'.*make a mesh with this dimension"):
        DeviceMesh.from_torch(split)


def test_meshes_that_are_refused(pool: Any) -> None:
    pool.run(4, meshes_refused)


def test_without_ranks_of_ones_own(pool: Any) -> None:
    """A mesh of torch's that this rank is not part of."""
    pool.run(4, elsewhere)


def elsewhere() -> None:
    theirs = torch.distributed.device_mesh.DeviceMesh(device().type, [0, 1], mesh_dim_names=("some",))
    ours = DeviceMesh.from_torch(theirs)
    assert (ours.get_coordinate() is None) == (dist.get_rank() > 1)
    if ours.get_coordinate() is not None:
        close(distribute_tensor(randn(3), ours, [Shard(0)]).full_tensor(), randn(3))


# ------------------------------------------------------------------------------------------------ DTensors
PLACEMENTS: list[tuple[Placement, Placement]] = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (StridedShard(0, split_factor=2), Shard(0)),
    (Partial(), Shard(0)),
    (Replicate(), Partial()),
    (Partial("avg"), Replicate()),
]


def same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@on_2_by_2
def converted(mesh: Any) -> None:
    for placements in PLACEMENTS:
        for shape in ((4, 6), (5, 3), (1, 3)):
            what = f"{placements} {shape}"
            strided = isinstance(placements[0], StridedShard)
            weight = randn(*shape, seed=1)
            # A rank's part of an average has its share of the gradient.
            wanted = weight / 2 if placements[0].is_partial("avg") else weight
            x = distribute_tensor(randn(*shape), mesh, list(placements)).requires_grad_()
            with CommDebugMode() as comm:
                y = to_torch_dtensor(x)
                z = from_torch_dtensor(y)
            assert comm.get_total_counts() == 0 and type(y) is of_torch.DTensor, what
            assert y.shape == x.shape and y.stride() == x.stride() and y.dtype == x.dtype, what
            assert same_memory(y._local_tensor, x.to_local()) and same_memory(z.to_local(), x.to_local()), what
            assert z._layout is x._layout and type(z) is type(x), what
            if not strided or shape == (4, 6):
                close(y.full_tensor(), x.full_tensor(), what)
            (z * distribute_tensor(weight, mesh)).sum().backward()
            close(x.grad, wanted, what)
            x.grad = None
            if not strided:
                (y.redistribute(placements=[of_torch.Replicate()] * 2).to_local() * weight).sum().backward()
                close(x.grad, wanted, what)


def test_round_trip(pool: Any) -> None:
    """Every placement, sizes that do not divide, shards without rows: memory, strides, values and gradients."""
    pool.run(4, converted)


@on_2_by_2
def in_torch(mesh: Any) -> None:
    """A program of torch's in the middle, and one of ours in the middle of torch's."""
    a, b = randn(6, 4).requires_grad_(), randn(4, 6, seed=1).requires_grad_()
    wanted = torch.relu(a @ b).square().sum()
    wanted.backward()
    x = distribute_tensor(a.detach(), mesh, [Shard(0), Replicate()]).requires_grad_()
    w = distribute_tensor(b.detach(), mesh, [Replicate(), Shard(1)]).requires_grad_()
    y = torch.relu(to_torch_dtensor(x) @ to_torch_dtensor(w))
    loss = from_torch_dtensor(y).square().sum()
    loss.backward()
    close(loss.full_tensor(), wanted)
    close(x.grad, a.grad)
    close(w.grad, b.grad)
    assert x.grad.placements == x.placements and w.grad.placements == w.placements

    theirs = mesh.to_torch()
    p = nn.Parameter(of_torch.distribute_tensor(a.detach(), theirs, [of_torch.Shard(0), of_torch.Replicate()]))
    q = nn.Parameter(of_torch.distribute_tensor(b.detach(), theirs, [of_torch.Replicate(), of_torch.Shard(1)]))
    inner = torch.relu(from_torch_dtensor(p) @ from_torch_dtensor(q))
    to_torch_dtensor(inner).square().sum().full_tensor().backward()
    for got, leaf, plain in ((p.grad, p, a), (q.grad, q, b)):
        assert got is not None and plain.grad is not None and got.placements == leaf.placements  # type: ignore[attr-defined]
        close(got.full_tensor(), plain.grad)  # type: ignore[attr-defined]


def test_gradients_through_both(pool: Any) -> None:
    pool.run(4, in_torch)


@on_2_by_2
def written(mesh: Any) -> None:
    x = distribute_tensor(torch.zeros(5, 4).to(device()), mesh, [Shard(0), Shard(1)])
    with torch.no_grad():
        to_torch_dtensor(x).add_(1)
        close(x.full_tensor(), torch.ones(5, 4))
        from_torch_dtensor(to_torch_dtensor(x)).mul_(3)
    close(x.full_tensor(), torch.full((5, 4), 3.0))


def test_writes_are_seen_by_both(pool: Any) -> None:
    pool.run(4, written)


@on_2_by_2
def tensors_refused(mesh: Any) -> None:
    x = distribute_tensor(randn(4, 4), mesh["tp"], [PackedShard(0, 2)])
    with pytest.raises(ValueError, match=r"no counterpart of PackedShard.*redistribute the tensor to Shard\(0\)"):
        to_torch_dtensor(x)
    with pytest.raises(TypeError, match="to_torch_dtensor takes a DTensor of hyper_parallel, got Tensor"):
        to_torch_dtensor(randn(2))
    with pytest.raises(TypeError, match="from_torch_dtensor takes torch's own DTensor, got Tensor"):
        from_torch_dtensor(randn(2))
    y = of_torch.distribute_tensor(randn(4), mesh.to_torch(), [of_torch.Shard(0), of_torch.Replicate()])
    with pytest.raises(TypeError, match="which needs no conversion"):
        to_torch_dtensor(y)
    with pytest.raises(TypeError, match="which needs no conversion"):
        from_torch_dtensor(from_torch_dtensor(y))
    with pytest.raises(TypeError, match="from_torch_dtensor"):
        distribute_tensor(y, mesh, [Replicate(), Replicate()])

    largest = distribute_tensor(randn(4), mesh, [Partial("max"), Replicate()])
    assert to_torch_dtensor(largest).placements[0].is_partial("max")
    with pytest.raises(ValueError, match=r"needs gradients.*'max': redistribute the DTensor to Replicate"):
        to_torch_dtensor(largest.requires_grad_())
    given = randn(4).requires_grad_()
    theirs = of_torch.DTensor.from_local(given, mesh.to_torch(), [of_torch.Partial("max"), of_torch.Replicate()])
    with pytest.raises(ValueError, match=r"needs gradients.*'max': redistribute the DTensor to Replicate"):
        from_torch_dtensor(theirs)

    class Odd(of_torch.Replicate):
        pass

    z = of_torch.DTensor.from_local(randn(4), mesh.to_torch(), [Odd(), of_torch.Replicate()], run_check=False)
    with pytest.raises(ValueError, match="no counterpart of torch's"):
        from_torch_dtensor(z)


def test_tensors_that_are_refused(pool: Any) -> None:
    pool.run(4, tensors_refused)


# ------------------------------------------------------------------------------------------------ clipping, checkpoints
@on_2_by_2
def clipped(mesh: Any) -> None:
    theirs = mesh.to_torch()

    def leaf(shape: tuple[int, ...], seed: int, on: Any, placements: list[Any]) -> Any:
        whole = randn(*shape, seed=seed)
        p = nn.Parameter(of_torch.distribute_tensor(whole, on, placements))
        p.grad = of_torch.distribute_tensor(10 * whole, on, placements)
        return p

    def make() -> list[Any]:
        shard, replicate = of_torch.Shard(0), of_torch.Replicate()
        plain = nn.Parameter(randn(3, seed=4))
        plain.grad = 10 * randn(3, seed=4)
        ours = nn.Parameter(distribute_tensor(randn(5, 2, seed=3), mesh["tp"], [Shard(0)]))
        ours.grad = distribute_tensor(10 * randn(5, 2, seed=3), mesh["tp"], [Shard(0)])
        return [
            leaf((5, 3), 1, theirs, [shard, replicate]),
            leaf((7,), 2, theirs["dp"], [shard]),
            plain,
            ours,
            nn.Parameter(randn(2)),
        ]

    def whole(x: Any) -> torch.Tensor:
        return x.full_tensor() if hasattr(x, "full_tensor") else x

    for count in (2, 3, 5):
        for order in (2.0, 1.0, torch.inf):
            singles = [nn.Parameter(whole(p).detach().clone()) for p in make()[:count]]
            for single, p in zip(singles, make(), strict=False):
                single.grad = None if p.grad is None else whole(p.grad).clone()
            wanted = nn.utils.clip_grad_norm_(singles, 1.5, order)
            for foreach in (True, False, None):
                parameters = make()[:count]
                got = nn.utils.clip_grad_norm_(parameters, 1.5, order, foreach=foreach)
                close(whole(got), wanted, f"{count} {order}")
                for p, single in zip(parameters, singles, strict=True):
                    assert (p.grad is None) == (single.grad is None)
                    if p.grad is not None:
                        close(whole(p.grad), single.grad, f"{count} {order} {foreach}")
    two = make()[:2]
    norm = nn.utils.get_total_norm([p.grad for p in two])
    assert isinstance(norm, of_torch.DTensor), "torch's own result where it can"
    nn.utils.clip_grads_with_norm_(two, 1.0, norm)
    close(nn.utils.get_total_norm([whole(p.grad) for p in two]), torch.tensor(1.0))


def test_clipping_on_several_meshes(pool: Any) -> None:
    """Torch's own DTensors on several meshes, mixed with plain tensors and DTensors, which torch alone refuses."""
    pool.run(4, clipped)


# ------------------------------------------------------------------------------------------------ wrappers
def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6)).to(device())


def batches(step: int) -> list[torch.Tensor]:
    return [randn(3, 6, seed=2 * step + i) for i in range(2)]


WRAPPERS = {
    "device_mesh": lambda model, mesh: DistributedDataParallel(model, device_mesh=mesh["dp"].to_torch()),
    "own mesh": lambda model, mesh: DistributedDataParallel(model, device_mesh=mesh["dp"]),
    "process_group": lambda model, mesh: DistributedDataParallel(model, process_group=mesh["dp"].get_group()),
    "composable": lambda model, mesh: composable(model, device_mesh=mesh["dp"].to_torch()),
    "composable group": lambda model, mesh: composable(model, process_group=mesh["dp"].get_group()),
}


def composable(model: Any, **options: Any) -> Any:
    from torch.distributed._composable.replicate import replicate

    return replicate(model, **options)


@on_2_by_2
def wrapped(mesh: Any, name: str) -> None:
    single = make_model()
    model = parallelize_module(make_model(), mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    outer = WRAPPERS[name](model, mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (single, model)]
    for step in range(2):
        parts = batches(step)
        torch.stack([single(x).square().mean() for x in parts]).mean().backward()
        outer(parts[mesh.get_local_rank("dp")]).square().mean().backward()
        for (path, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            close(p.grad, q.grad, path)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (path, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        close(p, q, path)


@pytest.mark.parametrize("name", WRAPPERS)
def test_data_parallel(pool: Any, name: str) -> None:
    pool.run(4, wrapped, name)


@on_2_by_2
def wrapped_over_all(mesh: Any) -> None:
    model = parallelize_module(make_model(), mesh["tp"], {"1": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"average '1.weight' over ranks .*device_mesh=mesh\['dp'\].to_torch\(\)"):
        DistributedDataParallel(model, device_mesh=mesh["tp"].to_torch())
    outer = composable(model, device_mesh=mesh["tp"].to_torch())
    with pytest.raises(ValueError, match=r"average '\d' over ranks"):
        outer(randn(3, 6))


def test_over_tensor_parallel_ranks(pool: Any) -> None:
    pool.run(4, wrapped_over_all)


def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from hyper_parallel import torch as names
    from hyper_parallel.platform import PlatformError

    monkeypatch.setattr(names, "get_platform", lambda: SimpleNamespace(name="mindspore"))
    for call in (to_torch_dtensor, from_torch_dtensor):
        with pytest.raises(PlatformError, match="HYPER_PARALLEL_PLATFORM=torch-cpu"):
            call(None)
    assert get_platform().name.startswith("torch-")
