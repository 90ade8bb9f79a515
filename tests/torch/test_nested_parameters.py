"""Parameters that tensor parallelism has cut first and data parallelism then: optimizers, clipping, initialisation,
saving, and which elements torch gives each rank."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.distributed.tensor.parallel as their_styles
from torch import nn
from torch.distributed.fsdp import fully_shard

from hyper_parallel import (
    DTensor,
    PackedShard,
    Replicate,
    Shard,
    StridedShard,
    check_ranks,
    distribute_parameter,
    distribute_tensor,
    manual_seed,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.layouts.nesting import nest
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.spmd import device_mesh, on_mesh
from tests.torch.support import close, device, full, randn
from tests.torch.test_optimizer_matrix import OPTIMIZERS, in_full_precision, modes

STEPS = 4
#: Shape, how tensor parallelism cuts it, and how data parallelism cuts the rest; None where tensor parallelism does
#: not. Uneven, empty on some ranks, packed; with other dimensions and with the same.
PARAMETERS: list[tuple[tuple[int, ...], Any, Any]] = [
    ((5, 3), Shard(0), Shard(0)),
    ((3, 7), Shard(1), Shard(1)),
    ((6, 4), PackedShard(0, (2, 4)), Shard(0)),
    ((4, 7), PackedShard(1, (3, 4)), Shard(0)),
    ((7,), Shard(0), Shard(0)),
    ((1, 3), Shard(0), Shard(0)),
    ((3, 2), Replicate(), Shard(0)),
    ((4, 3), None, Shard(0)),
]
MESHES = {
    (2, 2): (("dp", "tp"), ("dp",)),
    (2, 1, 2): (("replicate", "dp", "tp"), ("replicate", "dp")),
    (1, 2, 2): (("replicate", "dp", "tp"), ("replicate", "dp")),
}


def layouts_on(shape: tuple[int, ...]) -> list[Any]:
    names, over = MESHES[shape]
    mesh = device_mesh(*shape, names=names)
    outer, found = mesh[over], []
    for size, inner, placement in PARAMETERS:
        known = None if inner is None else get_layout(mesh["tp"], (inner,), size)
        found.append(nest(known, outer, [*[Replicate()] * (len(over) - 1), placement], size))
    return found


def parameters_on(shape: tuple[int, ...]) -> tuple[nn.Module, nn.Module]:
    """Plain parameters, and the same ones distributed."""
    plain = nn.ParameterList([nn.Parameter(randn(*size, seed=i).double()) for i, (size, *_) in enumerate(PARAMETERS)])
    ours = copy.deepcopy(plain)
    for i, layout in enumerate(layouts_on(shape)):
        distribute_parameter(ours, str(i), layout.mesh, layout.placements)
        assert ours[i]._layout is layout
    return plain, ours


def set_gradients(plain: Any, ours: Any, step: int) -> None:
    for i, (p, q) in enumerate(zip(plain, ours, strict=True)):
        p.grad = randn(*p.shape, seed=100 * step + i).double()
        q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements)


def steps(shape: tuple[int, ...], names: list[str]) -> None:
    for name in names:
        for mode in modes(name):
            with in_full_precision():
                train(shape, name, mode)


def suits(name: str, p: Any) -> bool:
    """Muon takes matrices only. Adafactor writes into the mean of one row, which is a partial sum and so refused."""
    return not ((name == "Muon" and p.dim() != 2) or (name == "Adafactor" and p.shape[0] == 1))


def train(shape: tuple[int, ...], name: str, mode: dict[str, Any]) -> None:
    plain, ours = parameters_on(shape)
    what = f"{name} {mode} on {shape}"
    pairs = [(p, q) for p, q in zip(plain, ours, strict=True) if suits(name, p)]
    optimizers = [getattr(torch.optim, name)(of, **{**OPTIMIZERS[name][0], **mode}) for of in zip(*pairs, strict=True)]
    for step in range(STEPS):
        set_gradients(plain, ours, step)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (plain, ours)]
        close(norms[1], norms[0], f"{what}: norm", 1e-10)
        for optimizer in optimizers:
            optimizer.step()
    for i, (p, q) in enumerate(zip(plain, ours, strict=True)):
        close(q, p, f"{what}: parameter {i}", 1e-9)
        for key, value in optimizers[1].state.get(q, {}).items():
            if name not in ("Adafactor", "LBFGS") and isinstance(value, torch.Tensor) and value.dim():
                assert value._layout is q._layout, f"{what}: {key}"
                close(value, optimizers[0].state[p][key], f"{what}: {key} of parameter {i}", 1e-9)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_steps(pool: Any, shape: tuple[int, ...]) -> None:
    others = [name for name in OPTIMIZERS if name != "LBFGS"] if everything() else ["SGD", "AdamW", "Adafactor", "Muon"]
    pool.run(4, steps, shape, others if shape == (2, 2) else ["SGD", "AdamW"])


# ---------------------------------------------------------------- initialisation, copies, files
@on_mesh(2, 2, names=("dp", "tp"))
def initialised(mesh: Any) -> None:
    """Modules built without memory get the numbers of the single device."""
    for weight, bias in (
        ((StridedShard(0, 2), Shard(0)), (StridedShard(0, 2), Shard(0))),
        ((StridedShard(0, 2), PackedShard(0, (4, 3))), (StridedShard(0, 2), PackedShard(0, (4, 3)))),
        ((StridedShard(1, 2), Shard(1)), (Shard(0), Replicate())),
        ((PackedShard(0, (4, 3)), Shard(0)), (Replicate(), Replicate())),
    ):
        with torch.device("meta"):
            linear = nn.Linear(5, 7)
        distribute_parameter(linear, "weight", mesh, weight)
        distribute_parameter(linear, "bias", mesh, bias)
        linear.to_empty(device=device())
        manual_seed(0, mesh)
        linear.reset_parameters()
        torch.manual_seed(0)
        wanted = nn.Linear(5, 7).to(device())
        assert linear.weight.placements == weight and linear.bias.placements == bias
        close(linear.weight, wanted.weight, f"weight placed {weight}", 0.0)
        close(linear.bias, wanted.bias, f"bias placed {bias}", 0.0)
        nn.init.zeros_(linear.weight)
        linear.load_state_dict(wanted.state_dict())  # of whole tensors
        close(linear.weight, wanted.weight, "loaded", 0.0)


@on_mesh(2, 2, names=("dp", "tp"))
def kept(mesh: Any) -> None:
    _, ours = parameters_on((2, 2))
    torch_file = io.BytesIO()
    torch.save(ours.state_dict(), torch_file)
    torch_file.seek(0)
    loaded = torch.load(torch_file, weights_only=True)
    for name, p in ours.named_parameters():
        for q in (copy.deepcopy(p), pickle.loads(pickle.dumps(p)), loaded[name]):
            assert isinstance(q, DTensor) and q._layout is p._layout and q.device_mesh is p.device_mesh
            close(q, p, name, 0.0)
        again = DTensor.from_local(p.to_local(), p.device_mesh, p.placements, shape=p.shape)
        assert again._layout is p._layout
        close(again, p, name, 0.0)


@on_mesh(2, 2, names=("dp", "tp"))
def operations(mesh: Any) -> None:
    """Operations that keep the order of the cuts, and those that are right in another order. Gradients are checked, in
    step on all ranks."""
    x, y = randn(5, 7).requires_grad_(), randn(7, 4, seed=1).requires_grad_()
    with check_ranks(mesh):
        for at in (
            (StridedShard(0, 2), Shard(0)),
            (StridedShard(1, 2), Shard(1)),
            (StridedShard(0, 2), PackedShard(0, (2, 3))),
        ):
            z = distribute_tensor(x.detach(), mesh, at).requires_grad_()
            w = distribute_tensor(y.detach(), mesh, [Replicate(), Shard(1)]).requires_grad_()
            assert (z * 2 + z.relu()).placements == at
            for name, function in {
                "elements": lambda a, b: (a * 2 + a.relu()).square().sum(),
                "product": lambda a, b: (a @ b).square().sum(),
                "rows": lambda a, b: torch.softmax(a, -1).square().sum() + a[1:4].sum() + a[:, 2].square().sum(),
                "columns": lambda a, b: torch.softmax(a, 0).square().sum() + a.t().reshape(-1)[3:9].square().sum(),
                "norm": lambda a, b: torch.linalg.vector_norm(a, 3) + a.amax() + a.mean(0).square().sum(),
                "parts": lambda a, b: sum(part.square().sum() * i for i, part in enumerate(a.split((2, 3)), 1)),
                "other order": lambda a, b: (a + distributed_alike(a)).square().sum(),
            }.items():
                wanted, got = function(x, y), function(z, w)
                close(got, wanted, f"{name} of {at}")
                for own, other in ((x, z), (y, w)):
                    own.grad = other.grad = None
                wanted.backward()
                got.backward()
                for own, other in ((x, z), (y, w)):
                    if own.grad is not None:
                        close(other.grad, own.grad, f"gradient of {name} of {at}")
                        assert other.grad._layout is other._layout


def distributed_alike(a: Any) -> Any:
    """Distribute another tensor in the natural order of cuts."""
    other = randn(*a.shape, seed=7)
    return distribute_tensor(other, a.device_mesh, [Shard(0), Shard(0)]) if isinstance(a, DTensor) else other


def test_initialised(pool: Any) -> None:
    pool.run(4, initialised)


def test_kept(pool: Any) -> None:
    pool.run(4, kept)


def test_operations(pool: Any) -> None:
    pool.run(4, operations)


# ---------------------------------------------------------------- torch's own
def as_torch_places() -> None:
    """Placements and local elements equal those of torch's styles and its fully_shard."""
    mesh = device_mesh(2, 2, names=("dp", "tp"))
    their_mesh = theirs.init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    for i, p in enumerate(model.parameters()):
        p.data = randn(*p.shape, seed=i)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = model.to(device())
    plan = {"0": their_styles.ColwiseParallel(), "1": their_styles.RowwiseParallel()}
    their_styles.parallelize_module(model, their_mesh["tp"], plan)
    fully_shard(model, mesh=their_mesh["dp"])
    strided = 0
    for name, p in model.named_parameters():
        inner = [{"0.weight": Shard(0), "0.bias": Shard(0), "1.weight": Shard(1), "1.bias": Replicate()}[name]]
        layout = nest(get_layout(mesh["tp"], tuple(inner), p.shape), mesh["dp"], [Shard(0)], p.shape)
        assert (layout.mesh.mesh_dim_names, tuple(p.device_mesh.mesh_dim_names)) == (("dp", "tp"),) * 2
        for ours, torchs in zip(layout.placements, p.placements, strict=True):
            assert getattr(ours, "dim", None) == getattr(torchs, "dim", None), name
            assert getattr(ours, "split_factor", 1) == getattr(torchs, "split_factor", 1), name
            assert isinstance(ours, StridedShard) == type(torchs).__name__.endswith("StridedShard"), name
            strided += isinstance(ours, StridedShard)
        mine = distribute_tensor(values[name], mesh, layout.placements)
        assert torch.equal(mine.to_local(), p.to_local()), name
        assert torch.equal(full(mine), p.full_tensor()), name
    assert strided == 2


def test_as_torch_places(pool: Any) -> None:
    pool.run(4, as_torch_places)
