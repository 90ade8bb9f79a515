"""torch's helpers for the state of optimizers: saved in any form and loaded into any optimizer, whose next steps are
those of the single device."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import ColwiseParallel, DTensor, RowwiseParallel, fully_shard, parallelize_module
from hyper_parallel.testing.extent import everything, in_gate
from hyper_parallel.testing.spmd import device_mesh, on_mesh
from tests.torch.support import close, device


class Net(nn.Module):
    """Sizes that do not divide, a number, a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale)


def make(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().to(device())


def sharded(kind: str, mesh: Any, seed: int) -> nn.Module:
    model: Any = make(seed)
    if "tp" in kind:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    if "dp" in kind:
        fully_shard(model.down, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


#: Those whose moments have the shape of their parameter, other shapes, none, and no tensors at all.
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.05, amsgrad=True, foreach=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.05),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.05),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.05),
}
#: Options of saving and of loading. Full ones go together, and so do shards.
OPTIONS: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "shards": ({}, {}),
    "flat": ({"flatten_optimizer_state_dict": True}, {"flatten_optimizer_state_dict": True}),
    "full": ({"full_state_dict": True}, {"full_state_dict": True}),
    "first": (
        {"full_state_dict": True, "cpu_offload": True},
        {"full_state_dict": True, "broadcast_from_rank0": True},
    ),
    "first on the host": (
        {"full_state_dict": True, "cpu_offload": True},
        {"full_state_dict": True, "broadcast_from_rank0": True, "cpu_offload": True},
    ),
}
GROUPS = ("one", "two", "two optimizers")


def optimizers(name: str, groups: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Optimizers with the matrices and the rest in two groups, or one optimizer for each."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if groups == "one":
        return [OPTIMIZERS[name](parameters)]
    parts = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]]
    if groups == "two":
        return [OPTIMIZERS[name]([{"params": parts[0]}, {"params": parts[1], "lr": 0.02}])]
    return [OPTIMIZERS[name](part) for part in parts]


def step(model: nn.Module, steps: list[torch.optim.Optimizer], seed: int) -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)).to(device())
    model(x).square().mean().backward()
    for optimizer in steps:
        optimizer.step()
        optimizer.zero_grad()


def goes_on(kind: str, mesh: Any, name: str, options: str, groups: str, used: bool, whole: bool) -> None:
    """Two steps, save, load into another model, two steps; ``whole``: the single device has saved the loaded state."""
    from torch.distributed.checkpoint import state_dict as helpers

    save, load = (helpers.StateDictOptions(**o) for o in OPTIONS[options])
    reference = make(0)
    wanted = optimizers(name, groups, reference)
    source = copy.deepcopy(reference) if whole else sharded(kind, mesh, 0)
    saved = optimizers(name, groups, source)
    for seed in (1, 2):
        step(reference, wanted, seed)
        step(source, saved, seed)
    states: Any = helpers.get_state_dict(source, saved, options=save)
    if whole and load.broadcast_from_rank0 and dist.get_rank():
        states = ({}, {})
    model = sharded(kind, mesh, 5)
    now = optimizers(name, groups, model)
    if used:
        step(model, now, 7)
    for optimizer in now:
        optimizer.param_groups[0]["lr"] = 0.7
    parameters = list(model.parameters())
    # `set_state_dict` takes an empty state dict of the model for none that is to be loaded, and other ranks wait.
    helpers.set_model_state_dict(model, states[0], options=load)
    helpers.set_optimizer_state_dict(model, now, states[1], options=load)
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    for optimizer in now:
        for p, own in optimizer.state.items():
            for value in own.values():
                if isinstance(p, DTensor) and isinstance(value, torch.Tensor) and value.shape == p.shape and p.ndim:
                    assert isinstance(value, DTensor) and value.placements == p.placements
    for seed in (3, 4):
        step(reference, wanted, seed)
        step(model, now, seed)
    for key, p in model.state_dict().items():
        close(p, reference.state_dict()[key], key)


def rows(kind: str) -> list[tuple]:
    """All variations, or some that differ in everything, other ones for each kind."""
    found = [
        row
        for row in itertools.product(OPTIMIZERS, OPTIONS, GROUPS, (False, True), (False, True))
        if not row[-1] or row[1] in ("full", "first")
    ]
    return found if everything() else random.Random(kind).sample(found, 16)


def run_rows(kind: str) -> None:
    mesh = device_mesh(2, 2, names=("dp", "tp")) if kind == "dp tp" else device_mesh(4, names=(kind,))
    for row in rows(kind):
        try:
            goes_on(kind, mesh, *row)
        except Exception as error:
            raise AssertionError(f"{kind} {row}: {error}") from error


@pytest.mark.parametrize("kind", in_gate(["dp", "tp", "dp tp"], ["dp tp"]))
def test_training_goes_on(pool: Any, kind: str) -> None:
    """Training goes on on all ranks of the pool, over which torch broadcasts; some shards are empty."""
    pool.run(4, run_rows, kind)


# ---------------------------------------------------------------------- misfits
@on_mesh(4, names=("dp",))
def refused(mesh: Any) -> None:
    """All ranks raise, and the optimizer's state stays as it is."""
    from torch.distributed.checkpoint import state_dict as helpers

    full, first = (
        helpers.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast) for broadcast in (False, True)
    )
    model = sharded("dp", mesh, 0)
    (optimizer,) = optimizers("AdamW", "one", model)
    step(model, [optimizer], 1)
    whole: Any = helpers.get_optimizer_state_dict(model, optimizer, options=full)
    shards: Any = helpers.get_optimizer_state_dict(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())

    def check(match: str, options: Any, state: Any) -> None:
        with pytest.raises(ValueError, match=match):
            helpers.set_optimizer_state_dict(model, optimizer, state, options=options)
        after = optimizer.state_dict()
        for number, own in before["state"].items():
            for key, value in own.items():
                close(after["state"][number][key], value, key)

    other = copy.deepcopy(whole)
    other["state"]["up.weight"]["exp_avg"] += dist.get_rank()
    check("the ranks passed different state dicts.*set broadcast_from_rank0=True", full, other)
    other = copy.deepcopy(whole)
    other["state"]["up.weight"]["step"] += dist.get_rank()
    check("the ranks passed different state dicts", full, other)
    check("needs full plain tensors, but these are DTensors: .*up.weight.exp_avg", full, shards)
    check("needs full plain tensors, but these are DTensors: .*exp_avg", first, {} if dist.get_rank() else shards)
    other = copy.deepcopy(whole)
    other["state"]["up.weight"]["exp_avg"] = torch.zeros(4, 6, device=device())
    for options in (full, first):
        check(
            r"does not fit: state.up.weight.exp_avg has shape \(5, 6\) in the optimizer and \(4, 6\) in the state dict",
            options,
            other,
        )

    # Not by torch's helper: its moments are whole next to shards.
    for name, p in zip(whole["param_groups"][0]["params"], optimizer.param_groups[0]["params"], strict=True):
        optimizer.state[p] = whole["state"][name]
    optimizer.state = dict(optimizer.state)  # another object, as `load_state_dict` makes
    with pytest.raises(ValueError, match=r"an unsharded state was loaded.*set_optimizer_state_dict"):
        step(model, [optimizer], 1)


def test_what_does_not_fit(pool: Any) -> None:
    pool.run(4, refused)
