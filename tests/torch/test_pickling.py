"""Pickle, torch.save and torch.load of DTensors and parallelised modules: right, or refused with the remedy."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing  # how tensors go to other processes

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    PackedShard,
    Partial,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_module,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.testing.spmd import device_mesh, on_mesh
from tests.torch.support import close, device

PLATFORM = os.environ.get("HYPER_PARALLEL_PLATFORM")


class Model(torch.nn.Module):
    """A class that can be pickled by name, as users' are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 6))
        self.tied = torch.nn.Linear(6, 7, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tied(self.mlp(self.norm(self.embedding(ids))))


PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
    "tied": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    "": PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()),
}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Model().to(device())


def ids() -> torch.Tensor:
    return torch.arange(12).reshape(3, 4).to(device()) % 7


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    y = model(ids())
    y.square().mean().backward()
    return y, {name: p.grad for name, p in model.named_parameters()}


def through_file(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "oldest protocol": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": through_file,
    "deepcopy": copy.deepcopy,
    "twice": lambda model: through_file(copy.deepcopy(through_file(model))),
}


@on_mesh(2)
def copied_model(mesh: Any, how: str) -> None:
    model = parallelize_module(make_model(), mesh, PLAN)
    wanted, gradients = step(make_model())
    other = COPIES[how](model)
    assert type(other).__name__ == "Model" and isinstance(other, Model) and other is not model
    assert other.tied.weight is other.embedding.weight is not model.embedding.weight
    for which in (model, other):
        y, got = step(which)
        close(y, wanted)
        for name, gradient in gradients.items():
            close(got[name], gradient, name)
    with pytest.raises(ValueError, match=r"has the style .* already"):
        parallelize_module(other, mesh, {"mlp.0": ColwiseParallel()})
    with torch.no_grad():
        other.mlp[0].weight.zero_()
    close(step(model)[0], wanted)  # the original has parameters of its own


@pytest.mark.parametrize("how", COPIES)
def test_modules(pool: Any, how: str) -> None:
    """A copy gives the single device's values and gradients, and shares nothing with the original."""
    pool.run(2, copied_model, how)


class Careful(torch.nn.Linear):
    """Says itself how it is copied."""

    def __reduce__(self) -> Any:
        return (str, ("its own",))

    def __deepcopy__(self, memo: dict) -> str:
        return "its own copy"


@on_mesh(2)
def own_way(mesh: Any) -> None:
    module = parallelize_module(Careful(2, 2).to(device()), mesh, ColwiseParallel())
    assert pickle.loads(pickle.dumps(module)) == "its own" and copy.deepcopy(module) == "its own copy"
    shallow = copy.copy(parallelize_module(torch.nn.Linear(2, 2).to(device()), mesh, ColwiseParallel()))
    close(shallow(torch.zeros(1, 2).to(device())), shallow.bias.to_local()[None])  # shares the parameters


@on_mesh(2)
def with_hooks(mesh: Any) -> None:
    """A hook of the user's is kept if it can be pickled, and else the error names the remedy."""
    model = parallelize_module(make_model(), mesh, PLAN)
    model.mlp[0].register_forward_hook(doubled)
    other = through_file(model)
    close(step(other)[0], step(model)[0])
    assert list(other.mlp[0]._forward_hooks.values()) == [doubled]
    model.mlp[0].register_forward_hook(tripled, with_kwargs=True)
    other = through_file(model)
    close(step(other)[0], step(model)[0])
    assert len(other.mlp[0]._forward_hooks_with_kwargs) == 1
    distribute_module(model.mlp[1], mesh, input_fn=lambda module, args, mesh: args)
    parallelize_module(
        model.mlp[1], mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    )
    with pytest.raises(TypeError, match=r"hook .*<locals>.* cannot be pickled: save module.state_dict\(\)"):
        pickle.dumps(model)


def doubled(module: Any, args: tuple, y: Any) -> Any:
    return 2 * y


def tripled(module: Any, args: tuple, kwargs: dict, y: Any) -> Any:
    assert kwargs == {}
    return 3 * y


@on_mesh(2)
def weights_only(mesh: Any) -> None:
    """A state dict of DTensors, also of an optimizer, is made of nothing that torch does not allow."""
    model = parallelize_module(make_model(), mesh, PLAN)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    packed = distribute_tensor(torch.arange(8.0), mesh, [PackedShard(0, 2)])
    partial = DTensor.from_local(torch.ones(2).to(device()), mesh, [Partial()])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "others": [packed, partial]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for name, value in model.state_dict().items():
        assert loaded["model"][name].placements == value.placements
        close(loaded["model"][name], value)
    other = parallelize_module(make_model(), mesh, PLAN)
    other.load_state_dict(loaded["model"])
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(loaded["optimizer"])
    for which, by in ((model, optimizer), (other, again)):
        step(which)
        by.step()
    for name, p in model.named_parameters():
        close(other.get_parameter(name), p, name)
    assert loaded["others"][0].placements == packed.placements and loaded["others"][1].placements == (Partial(),)
    close(loaded["others"][1].full_tensor(), 2 * torch.ones(2))


@on_mesh(2)
def between_processes(mesh: Any) -> None:
    """Send tensors as a queue of torch.multiprocessing does."""
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    y = pickle.loads(ForkingPickler.dumps(x))
    assert y.placements == x.placements
    close(y, x)


@pytest.mark.parametrize("job", [own_way, with_hooks, weights_only], ids=lambda job: job.__name__)
def test_values(pool: Any, job: Callable) -> None:
    pool.run(2, job)


@pytest.mark.skipif(
    PLATFORM == "torch-npu" and "ASCEND_HOME_PATH" not in os.environ,
    reason="simulated NPUs share no memory between processes",
)
@pytest.mark.skipif(PLATFORM == "torch-cuda", reason="CUDA opens shared memory in other processes alone")
def test_queues(pool: Any) -> None:
    pool.run(2, between_processes)


# ------------------------------------------------------------------------------------------------ elsewhere
@on_mesh(2)
def saved(mesh: Any, placement: Any) -> bytes:
    return pickle.dumps(distribute_tensor(torch.arange(4.0), mesh, [placement]))


@on_mesh(2)
def load_on_all(mesh: Any, data: bytes) -> str:
    return load(data)


def load(data: bytes) -> str:
    try:
        return str(pickle.loads(data).to_local().tolist())
    except RuntimeError as error:
        return str(error)


def test_another_rank_s_shard(pool: Any) -> None:
    first, second = pool.run(2, saved, Shard(0))
    for own, data in enumerate((first, second)):
        message = pool.run(2, load_on_all, data)[1 - own]
        assert "and has another shard along mesh dimension" in message
    whole, _ = pool.run(2, saved, Replicate())
    assert pool.run(2, load_on_all, whole) == ["[0.0, 1.0, 2.0, 3.0]"] * 2


def test_another_world(pool: Any) -> None:
    """Loading in a process without the mesh fails at once, because making the mesh would wait for other ranks."""
    (data, _) = pool.run(2, saved, Shard(0))
    message = load(data)
    assert "has not made. Make the mesh first" in message and "save full_tensor() of each entry" in message


@on_mesh(2, 2, names=("dp", "tp"))
def slices(mesh: Any) -> None:
    """The mesh of a DTensor is found as the dimension of another, without making groups."""
    from hyper_parallel.core.mesh.slices import MESHES

    data = pickle.dumps(distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)]))
    known = mesh["tp"]
    every = dict(MESHES)
    del MESHES[next(key for key, m in every.items() if m is known)]
    found = pickle.loads(data).device_mesh
    assert found is not known and found is mesh["tp"] and found.mesh.tolist() == known.mesh.tolist()
    whole = DeviceMesh(None, [0, 1, 2, 3])
    del MESHES[next(key for key, m in MESHES.items() if m is whole)]
    assert pickle.loads(pickle.dumps(whole)) is DeviceMesh(None, [0, 1, 2, 3])  # needs no group
    MESHES.update(every)  # those of the other tests


def test_slices_of_meshes(pool: Any) -> None:
    pool.run(4, slices)


def test_mesh_of_one_rank() -> None:
    mesh = DeviceMesh(None, [0], mesh_dim_names=("tp",))
    args = mesh.__reduce__()
    assert args[0](*args[1]) is mesh
    assert device_mesh(1) is not None
