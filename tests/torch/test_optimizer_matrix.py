"""Steps with every optimizer of torch.optim equal those of the unsharded model. The table records the results of
torch's own DTensor too."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import _muon as muon

from hyper_parallel import DTensor, Shard
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.decoder import UNEVEN, Sizes, batch, decoder, plan
from tests.torch.support import close, randn, shard
from tests.torch.test_against_torch import meshes, whole

#: Enough for all moments, and for one save of the state in between.
STEPS = 10 if everything() else 4
#: torch's DTensor takes longer, and refuses at the first step.
STEPS_OF_TORCH = 3

#: name -> (options, further variants of them)
OPTIMIZERS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "SGD": ({"lr": 0.1}, [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1, "maximize": True}]),
    "Adam": ({"lr": 1e-2}, [{"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}]),
    "AdamW": ({"lr": 1e-2}, [{"amsgrad": True}]),
    "Adagrad": ({"lr": 1e-1}, [{"lr_decay": 0.1}]),
    "Adadelta": ({"lr": 1.0}, []),
    "Adamax": ({"lr": 1e-2}, []),
    "NAdam": ({"lr": 1e-2}, [{"decoupled_weight_decay": True, "weight_decay": 0.1}]),
    "RAdam": ({"lr": 1e-2}, []),
    "RMSprop": ({"lr": 1e-2}, [{"centered": True, "momentum": 0.5}]),
    "Rprop": ({"lr": 1e-2}, []),
    "ASGD": ({"lr": 1e-1}, [{"t0": 3.0}]),
    "Adafactor": ({"lr": 1e-2}, [{"weight_decay": 0.1}]),
    # Small, because clipping would lead it astray, and rounding differences with it.
    "LBFGS": ({"lr": 2e-3, "max_iter": 2}, [{"line_search_fn": "strong_wolfe", "lr": 0.1}]),
    "Muon": ({"lr": 1e-2}, [{"nesterov": False}]),
}
#: Their state has other shapes than the parameters.
OTHER_STATE = ("LBFGS", "Adafactor")


def modes(name: str) -> list[dict[str, Any]]:
    """The implementations that an optimizer has."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    found: list[dict[str, Any]] = [{"foreach": value} for value in (False, True) if "foreach" in known] or [{}]
    return found + [{"fused": True}] * ("fused" in known)


@dataclass(frozen=True)
class Run:
    """The record of a training run: losses, norms before clipping, final parameters by name."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor] = field(repr=False)


def train(
    model: nn.Module,
    sizes: Sizes,
    name: str,
    options: dict[str, Any],
    clip: bool = False,
    steps: int = STEPS,
    reload: bool = False,
) -> Run:
    """Train with one optimizer; with ``reload``, a new one takes over its state in the middle."""
    # Muon takes matrices only.
    parameters = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    make = lambda: getattr(torch.optim, name)(parameters, **{**OPTIMIZERS[name][0], **options})  # noqa: E731
    optimizer, losses, norms = make(), [], []
    for step in range(steps):

        def closure(step: int = step, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            # LBFGS compares gradients of one function.
            loss = model(*batch(sizes, 0 if name == "LBFGS" else step))
            loss.backward()
            losses.append(float(whole(loss)))
            if clip:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=options.get("foreach"))
                norms.append(float(whole(norm)))
            return loss

        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if reload and step == steps // 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make()
            optimizer.load_state_dict(state)
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(p, DTensor) and name not in OTHER_STATE and isinstance(value, torch.Tensor) and value.dim():
                assert value._layout is p._layout, f"{name} keeps {key} as {value.placements}"
    return Run(losses, norms, {n: whole(p) for n, p in model.named_parameters()})


def compare(got: Run, wanted: Run, what: str, tolerance: float = 1e-8) -> None:
    for key in ("losses", "norms"):
        numbers = [torch.tensor(getattr(run, key), dtype=torch.float64) for run in (got, wanted)]
        close(*numbers, f"{what}: {key}", tolerance)
    for name, p in wanted.parameters.items():
        close(got.parameters[name], p, f"{what}: {name}", tolerance)


@contextmanager
def in_full_precision() -> Iterator[None]:
    """Muon iterates in bfloat16, which rounds differently on shards; here the algorithm is compared."""
    original = muon._zeropower_via_newtonschulz
    source = inspect.getsource(original)
    # As torch 2.13 and as later ones write it.
    precise = source.replace("grad.bfloat16()", "grad.double()").replace("dtype=torch.bfloat16", "dtype=torch.float64")
    assert precise != source, "torch's Muon converts to bfloat16 in another way"
    exec(precise, vars(muon))
    try:
        yield
    finally:
        muon._zeropower_via_newtonschulz = original


# ---------------------------------------------------------------------- ours


def run_every_mode(name: str) -> None:
    """Each implementation, without and with clipping; in the gate only with it."""
    for lib, mesh in meshes(2)[1:]:
        for mode in modes(name):
            for clip in (False, True) if everything() else (True,):
                compare_with_plain(lib, mesh, Sizes(), name, mode, clip)


def run_variants_on_uneven_shards(name: str) -> None:
    for lib, mesh in meshes(3)[1:]:
        for variant in OPTIMIZERS[name][1] or [{}]:
            compare_with_plain(lib, mesh, UNEVEN, name, variant, clip=name != "LBFGS")


def compare_with_plain(lib: Any, mesh: Any, sizes: Sizes, name: str, options: dict[str, Any], clip: bool) -> None:
    what = f"{name} {options}{' clipped' if clip else ''}"
    with in_full_precision():
        wanted = train(decoder(sizes), sizes, name, options, clip)
        assert abs(wanted.losses[0] - wanted.losses[-1]) > 1e-3, f"{what}: nothing was trained"
        assert not clip or max(wanted.norms) > 0.5, f"{what}: nothing was clipped"
        sharded = lib.parallelize_module(decoder(sizes), mesh, plan(lib))
        compare(train(sharded, sizes, name, options, clip, reload=clip), wanted, what)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(pool: Any, name: str) -> None:
    pool.run(2, run_every_mode, name)
    pool.run(3, run_variants_on_uneven_shards, name)


@on_mesh()
def muon_in_bfloat16(mesh: Any) -> None:
    """Muon in bfloat16 rounds, so the changes of both runs in ten steps are compared, to five percent."""
    from hyper_parallel import parallelize_module
    from tests.torch.test_against_torch import OURS

    sizes, start = UNEVEN, dict(decoder(UNEVEN).named_parameters())
    wanted = train(decoder(sizes), sizes, "Muon", {}, steps=10).parameters
    got = train(parallelize_module(decoder(sizes), mesh, plan(OURS)), sizes, "Muon", {}, steps=10).parameters
    for name, p in wanted.items():
        assert (got[name] - p).norm() <= 0.05 * (p - start[name].detach()).norm(), name


@on_mesh()
def steps_that_are_differentiated(mesh: Any) -> None:
    """``differentiable=True``: the parameters after a step have gradients by those before it and by the gradients."""
    for name in OPTIMIZERS:
        if "differentiable" not in inspect.signature(getattr(torch.optim, name)).parameters:
            continue
        results = []
        for distribute in (lambda x: x, lambda x: shard(x, mesh, Shard(0))):
            leaf, gradient = (distribute(randn(5, 3, seed=s).double()).requires_grad_() for s in (0, 1))
            p = leaf.clone()
            p.grad = gradient.clone()
            options = {**OPTIMIZERS[name][0], "differentiable": True}
            optimizer = getattr(torch.optim, name)([p], **options)
            optimizer.step()
            p.pow(2).sum().backward()
            results.append((p, leaf.grad, gradient.grad))
        for got, wanted, what in zip(
            *reversed(results), ("parameter", "by the parameter", "by the gradient"), strict=True
        ):
            assert (got is None) == (wanted is None), f"{name}: {what}"
            if wanted is not None:
                close(got, wanted, f"{name}: {what}", 1e-9)


@on_mesh()
def what_torch_refuses(mesh: Any) -> None:
    """Graph capture on a CPU, a sparse optimizer and dense gradients: the same errors as on plain parameters."""
    for name, options in [*[(n, {"capturable": True}) for n in OPTIMIZERS], ("SparseAdam", {})]:
        if not set(options) <= set(inspect.signature(getattr(torch.optim, name)).parameters):
            continue
        outcomes = []
        for p in (randn(4, 3), shard(randn(4, 3), mesh, Shard(0))):
            p.requires_grad_().pow(2).sum().backward()
            try:
                getattr(torch.optim, name)([p], **options).step()
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")
            else:
                outcomes.append("no error")
        assert outcomes[0] == outcomes[1], name


@pytest.mark.parametrize("job", [muon_in_bfloat16, steps_that_are_differentiated, what_torch_refuses])
def test_jobs(pool: Any, job: Any) -> None:
    pool.run(2, job)


# ---------------------------------------------------------------------- torch's DTensor

#: Results of torch 2.13, 2.14 and 2.15 with their own DTensor and styles, for those that do not equal the unsharded
#: run.
TORCH_FAILS = {
    "SGD {'fused': True}": "NotImplementedError",
    "Adagrad {'fused': True}": "NotImplementedError",
    "Rprop {'foreach': False}": "RuntimeError",
    "Rprop {'foreach': True}": "NotImplementedError",
    "Adafactor {'foreach': False}": "RuntimeError",
    "Adafactor {'foreach': True}": "RuntimeError",
}


def run_with_torch(name: str) -> dict[str, str]:
    """Every mode with torch's DTensor: "equal", "differs" or the error."""
    outcomes = {}
    for lib, mesh in meshes(2)[:1]:
        for mode in modes(name):
            with in_full_precision():
                wanted = train(decoder(), Sizes(), name, mode, steps=STEPS_OF_TORCH)
                sharded = lib.parallelize_module(decoder(), mesh, plan(lib))
                try:
                    compare(train(sharded, Sizes(), name, mode, steps=STEPS_OF_TORCH), wanted, name)
                    outcome = "equal"
                except AssertionError:
                    outcome = "differs"
                except Exception as error:
                    outcome = type(error).__name__
                outcomes[f"{name} {mode}"] = outcome
    return outcomes


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_torch_supports(pool: Any, name: str) -> None:
    for outcomes in pool.run(2, run_with_torch, name):
        assert outcomes == {what: TORCH_FAILS.get(what, "equal") for what in outcomes} and outcomes
