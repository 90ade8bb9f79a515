"""Distributed parameters: made in place, copied, saved, loaded, converted, initialised."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import DTensor, Partial, Replicate, Shard, get_platform, manual_seed
from hyper_parallel.core.dtensor.tensor import bind_platform
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, full, randn, shard


def distribute(module: nn.Module, name: str, mesh: Any, placement: Any) -> None:
    parameter = getattr(module, name)
    layout = get_layout(mesh, (placement,), tuple(parameter.shape))
    local = parameter.detach()[layout.local_index()].clone()
    bind_platform(get_platform()).set_distributed_parameter(module, name, local, layout)


def linear(mesh: Any, placement: Any = None) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(3, 5).to(device())
    distribute(module, "weight", mesh, placement or Shard(0))
    return module


@on_mesh()
def identity_and_ties_stay(mesh: Any) -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(3, 5, bias=False).to(device()), nn.Linear(3, 5, bias=False).to(device())
    b.weight = a.weight
    before, whole = a.weight, a.weight.detach().clone()
    before.extra = "kept"
    optimizer = torch.optim.SGD(a.parameters(), lr=1.0)
    a.weight.requires_grad_(False)
    distribute(a, "weight", mesh, Shard(0))
    assert a.weight is before is b.weight and before.extra == "kept"
    assert isinstance(before, nn.Parameter) and isinstance(before, DTensor) and before.is_leaf
    assert not before.requires_grad
    assert tuple(before.shape) == (5, 3) and before.placements == (Shard(0),)
    close(before, whole)
    before.requires_grad_()
    before.sum().backward()
    optimizer.step()
    close(before, whole - 1)
    assert [name for name, _ in a.named_parameters()] == ["weight"]
    distribute_again(a, mesh, whole - 1)


def distribute_again(module: nn.Module, mesh: Any, whole: torch.Tensor) -> None:
    layout = get_layout(mesh, (Replicate(),), tuple(whole.shape))
    get_platform().set_distributed_parameter(module, "weight", whole.clone(), layout)
    assert module.weight.placements == (Replicate(),)
    close(module.weight, whole)


@on_mesh()
def a_graph_from_before_does_no_harm(mesh: Any) -> None:
    module = nn.Linear(3, 5).to(device())
    alive = module(randn(2, 3)).sum()
    distribute(module, "weight", mesh, Shard(0))
    module.weight.sum().backward()
    close(module.weight.grad, torch.ones(5, 3))
    assert alive.requires_grad


@on_mesh()
def gradient_from_before_is_cut_up(mesh: Any) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 5).to(device())
    module(randn(2, 3)).pow(2).sum().backward()
    wanted = module.weight.grad.clone()
    distribute(module, "weight", mesh, Shard(0))
    assert module.weight.grad.placements == (Shard(0),)
    close(module.weight.grad, wanted)


@on_mesh()
def meta_parameters(mesh: Any) -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 5)
    before = module.weight
    distribute(module, "weight", mesh, Shard(0))
    assert module.weight is before and before.is_meta and tuple(before.shape) == (5, 3)
    layout = before._layout
    get_platform().set_distributed_parameter(module, "weight", randn(5, 3)[layout.local_index()], layout)
    assert module.weight is before and not before.is_meta and isinstance(before, nn.Parameter) and before.requires_grad
    close(before, randn(5, 3))
    with torch.device("meta"):
        empty = nn.Linear(3, 5)
    distribute(empty, "weight", mesh, Shard(0))
    distribute(empty, "bias", mesh, Shard(0))
    empty.to_empty(device=device())
    manual_seed(0, mesh)
    empty.reset_parameters()
    torch.manual_seed(0)
    close(empty.weight, nn.Linear(3, 5, device=device()).weight)


@on_mesh()
def missing_parameter(mesh: Any) -> None:
    with pytest.raises(AttributeError, match="Linear has no parameter 'wieght'"):
        get_platform().set_distributed_parameter(nn.Linear(3, 5), "wieght", randn(1), None)


@on_mesh()
def deepcopy_keeps_everything_apart(mesh: Any) -> None:
    module = linear(mesh)
    module.weight.note = ["mine"]
    module.weight.sum().backward()
    other = copy.deepcopy(module)
    assert isinstance(other.weight, nn.Parameter) and type(other.weight) is type(module.weight)
    assert other.weight.placements == (Shard(0),)
    assert other.weight.to_local().data_ptr() != module.weight.to_local().data_ptr()
    assert other.weight.note == ["mine"] and other.weight.note is not module.weight.note
    close(other.weight.grad, module.weight.grad)
    with torch.no_grad():
        other.weight.zero_()
    assert full(module.weight).abs().sum() > 0
    tied = nn.ModuleList([module, nn.Linear(3, 5)])
    tied[1].weight = module.weight
    clone = copy.deepcopy(tied)
    assert clone[0].weight is clone[1].weight
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(module.weight * 2)
    assert copy.copy(module.weight).placements == (Shard(0),)


@on_mesh()
def saving_and_loading(mesh: Any) -> None:
    module = linear(mesh)
    buffer = io.BytesIO()
    torch.save({"model": module.state_dict(), "parameter": module.weight}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for x in (loaded["model"]["weight"], loaded["parameter"]):
        assert x._layout is module.weight._layout
        close(x, module.weight)
    assert isinstance(loaded["parameter"], nn.Parameter) and loaded["parameter"].requires_grad
    assert not loaded["model"]["weight"].requires_grad
    for assign in (False, True):
        other = linear(mesh)
        with torch.no_grad():
            other.weight.zero_()
        before = other.weight
        other.load_state_dict(loaded["model"], assign=assign)
        close(other.weight, module.weight)
        assert (other.weight is before) is not assign and isinstance(other.weight, nn.Parameter)
        assert other.weight.requires_grad


@on_mesh()
def loading_a_whole_plain_state_dict(mesh: Any) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(3, 5).to(device())
    module = linear(mesh)
    module.load_state_dict(plain.state_dict())
    assert module.weight.placements == (Shard(0),)
    close(module.weight, plain.weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict(nn.Linear(3, 4).state_dict())


@on_mesh()
def conversions(mesh: Any) -> None:
    for swap in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            module = linear(mesh)
            module.weight.sum().backward()
            whole, before = full(module.weight), module.weight
            module.to(torch.bfloat16)
            assert module.weight is before and before.dtype is torch.bfloat16 and isinstance(before, nn.Parameter)
            assert before.placements == (Shard(0),) and before.grad.dtype is torch.bfloat16
            close(before.float(), whole, tolerance=1e-2)
            before.sum().backward()
            close(before.grad.float(), torch.full((5, 3), 2.0))
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


@on_mesh()
def a_parameter_of_a_dtensor(mesh: Any) -> None:
    p = nn.Parameter(shard(randn(5, 3), mesh, Shard(0)))
    assert isinstance(p, nn.Parameter) and p.placements == (Shard(0),) and p.requires_grad and p.is_leaf
    module = nn.Module()
    module.p = p
    assert dict(module.named_parameters())["p"] is p


@on_mesh()
def metadata(mesh: Any) -> None:
    x = shard(randn(5, 3), mesh, Shard(0))
    assert (x.shape, x.size(), x.size(0), x.size(-1)) == ((5, 3), (5, 3), 5, 3) and isinstance(x.shape, torch.Size)
    assert (x.numel(), x.nelement(), torch.numel(x), x.nbytes, len(x)) == (15, 15, 15, 60, 5)
    assert (x.dim(), x.ndim, x.stride(), x.stride(0), x.T.stride()) == (2, 2, (3, 1), 3, (1, 3))
    assert x.dtype is torch.float32 and x.is_floating_point() and not x.is_meta and x.is_leaf
    assert f"{x.sum():.3f}" == f"{float(randn(5, 3).sum()):.3f}"
    assert randn(5, 3)[0, 0].item() in x and 1e9 not in x
    assert len({x: 1, x.clone(): 2}) == 2
    assert x.new_tensor([1, 2]).dtype is torch.float32 and type(x.new_tensor([1, 2])) is torch.Tensor
    assert x.new_zeros(2, 2).placements == (Replicate(),) and x.new_zeros(5, 3).placements == (Shard(0),)
    assert "Shard(dim=0)" in repr(x) and "Shard(dim=0)" in f"{x}"


# ------------------------------------------------------------------------------------------------ initialisation

INITIALISERS = {
    "uniform_": {},
    "normal_": {"std": 0.5},
    "trunc_normal_": {},
    "constant_": {"val": 2.0},
    "ones_": {},
    "zeros_": {},
    "eye_": {},
    "xavier_uniform_": {},
    "xavier_normal_": {"gain": 2.0},
    "kaiming_uniform_": {"a": math.sqrt(5)},
    "kaiming_normal_": {"mode": "fan_out"},
    "orthogonal_": {},
}


@on_mesh()
def initialisation(mesh: Any) -> None:
    for placement in (Shard(0), Shard(1), Replicate()):
        for name, options in INITIALISERS.items():
            module, plain = linear(mesh, placement), nn.Linear(3, 5).to(device())
            manual_seed(1, mesh)
            result = getattr(nn.init, name)(module.weight, **options)
            torch.manual_seed(1)
            getattr(nn.init, name)(plain.weight, **options)
            assert result is module.weight
            close(module.weight, plain.weight, name)
        for draw in (
            lambda x: x.uniform_(-1, 1),
            lambda x: x.normal_(mean=1.0),
            lambda x: x.bernoulli_(0.3),
            lambda x: x.exponential_(),
            torch.rand_like,
            lambda x: torch.randint_like(x, 10),
            lambda x: torch.randn_like(x, dtype=torch.float64),
        ):
            manual_seed(2, mesh)
            got = draw(shard(randn(5, 3), mesh, placement))
            assert got.placements == (placement,)
            torch.manual_seed(2)
            close(got, draw(randn(5, 3)))


@on_mesh()
def initialising_a_partial_sum(mesh: Any) -> None:
    with pytest.raises(TypeError, match="partial tensor"):
        nn.init.normal_(DTensor.from_local(randn(3), mesh, [Partial()]))


JOBS = [
    identity_and_ties_stay,
    a_graph_from_before_does_no_harm,
    gradient_from_before_is_cut_up,
    meta_parameters,
    missing_parameter,
    deepcopy_keeps_everything_apart,
    saving_and_loading,
    loading_a_whole_plain_state_dict,
    conversions,
    a_parameter_of_a_dtensor,
    metadata,
    initialisation,
    initialising_a_partial_sum,
]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_parameters(pool: Any, job: Any, world_size: int) -> None:
    pool.run(world_size, job)
