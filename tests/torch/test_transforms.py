"""Function transforms and forward-mode AD are refused on all ranks; features built on backward are right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Partial,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.platform.torch.basics.transforms import MAYBE_INSIDE
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn, shard

REFUSED = (
    r"distributed tensors and parallelised modules do not work inside .* compute gradients with torch\.autograd\.grad"
)


class Block(nn.Module):
    """Linear, tanh, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def block(mesh: Any = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A block, parallelised over ``mesh``."""
    torch.manual_seed(0)
    model = Block().to(device(), dtype)
    if mesh is not None:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def scalar(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: f(x).square().sum()


def dual(f: Callable[..., Any], x: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def batched(f: Callable[..., Any], x: Any) -> Any:
    x = x.detach().requires_grad_()
    y = f(x)
    return torch.autograd.grad(y, x, torch.ones_like(y)[None], is_grads_batched=True)[0]


#: Transforms of a function of a tensor.
TRANSFORMS: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(scalar(f))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(scalar(f))(x),
    "linearize": lambda f, x: torch.func.linearize(f, x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "dual": dual,
    "vectorized jacobian": lambda f, x: functional.jacobian(f, x, vectorize=True),
    "vectorized hessian": lambda f, x: functional.hessian(scalar(f), x, vectorize=True),
    "forward jacobian": lambda f, x: functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    "batched gradients": batched,
}

#: The same without a batch of cotangents.
ONE_BY_ONE: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "vectorized jacobian": functional.jacobian,
    "vectorized hessian": lambda f, x: functional.hessian(scalar(f), x),
    "batched gradients": lambda f, x: functional.vjp(f, x, torch.ones_like(f(x)))[1][None],
}


@on_mesh(2)
def try_transforms(mesh: Any) -> dict[str, str]:
    """The outcome of each transform for functions of DTensors and for parallelised modules of plain tensors."""
    x, model = randn(4, 4), block(mesh)
    norm = parallelize_module(nn.LayerNorm(4).to(device()), mesh, SequenceParallel(use_local_output=True))
    prepared = parallelize_module(
        nn.Sequential(nn.Tanh()),
        mesh,
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True),
    )
    # From now on modules compare the shapes of plain shards in each call.
    uneven = parallelize_module(nn.LayerNorm(4), mesh, SequenceParallel(sequence_dim=0))
    uneven(shard(randn(3, 4), mesh, Shard(0)))
    weight = shard(randn(4, 4), mesh, Shard(0))
    number = shard(torch.tensor(2.0, device=device()), mesh, Replicate())
    cases: dict[str, tuple[Callable[..., Any], Any]] = {
        "sharded": (torch.tanh, weight),
        "replicated": (torch.tanh, shard(randn(4, 4), mesh, Replicate())),
        "module": (model, x),
        "norm": (lambda x: norm(x[None] * 1)[0], x),
        "prepared": (prepared, x),
        "made inside": (lambda x: DTensor.from_local(x, mesh, [Shard(0)]).sum().full_tensor() * x, x),
        "closure": (lambda x: (weight * (x.sum() * number)).full_tensor(), x),
    }
    found = {}
    for name, transform in TRANSFORMS.items():
        for what, (f, given) in cases.items():
            with CommDebugMode() as comm:
                try:
                    result = transform(f, given)
                    found[f"{name} of {what}"] = "nothing was raised"
                    if name in ONE_BY_ONE:  # backward without communication
                        close(result, ONE_BY_ONE[name](f, given))
                        found[f"{name} of {what}"] = "right"
                except Exception as error:  # the type and the words are compared
                    found[f"{name} of {what}"] = f"{type(error).__name__}: {error}"
            # These run the function itself outside of the transform, and its backward inside.
            if not name.startswith(("vectorized", "batched", "linearize")) and comm.get_total_counts():
                found[f"{name} of {what}"] += " after communication"
    return found


#: Here torch.fx, which traces the function, may meet the DTensor before we do, and refuses it.
TRACED = {"linearize of sharded", "linearize of replicated", "linearize of closure"}


def test_transforms_are_refused_on_all_ranks(pool: Any) -> None:
    first, second = pool.run(2, try_transforms)
    assert len(first) == len(TRANSFORMS) * 7
    for name, said in first.items():
        if name in TRACED:
            for words in (said, second[name]):
                assert words.startswith(("TypeError: ", "ValueError: distributed tensors and")), (name, words)
            continue
        assert said == second[name]
        if said == "right":
            continue
        assert said.startswith("ValueError: ") and not said.endswith("communication"), (name, said)
        batched = "is_grads_batched=True" in said and "call autograd.grad once for each of the grad_outputs" in said
        inside = "distributed tensors and parallelised modules do not work inside" in said
        assert batched or (inside and "compute gradients with torch.autograd.grad" in said), (name, said)


@on_mesh(2)
def after_transforms(mesh: Any) -> tuple:
    """Plain tensors go through transforms, and afterwards nothing is asked any more."""
    x, model, reference = randn(3, 4), block(mesh), block()
    with pytest.raises(ValueError, match=REFUSED):
        torch.vmap(model)(x)
    close(torch.vmap(reference)(x), reference(x))
    seen = bool(MAYBE_INSIDE)
    close(model(x), reference(x))
    inside: list[Any] = []
    with forward_ad.dual_level():
        thread = threading.Thread(target=lambda: inside.append(torch.vmap(torch.sin)(x)))
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="inside forward-mode AD"):
            model(x)
    close(inside[0], x.sin())
    MAYBE_INSIDE.clear()
    return seen, len(MAYBE_INSIDE)


def test_transforms_of_plain_tensors_cost_nothing_afterwards(pool: Any) -> None:
    assert pool.run(2, after_transforms) == [(True, 0)] * 2


@on_mesh()
def differentiate(mesh: Any, outermost: str) -> None:
    """Check `torch.autograd.functional`, which is built on backward, for DTensors and for modules."""
    dtype = torch.float32 if device().type == "npu" else torch.float64  # its modules do not take the second
    x, v = randn(3, 4).to(dtype), randn(3, 4, seed=1).to(dtype)
    model, reference = block(mesh, dtype), block(dtype=dtype)
    placement = Shard(0) if outermost == "sharded" else Replicate()
    if outermost == "plain":
        given, direction, f = x, v, model
    else:
        given, direction = shard(x, mesh, placement), shard(v, mesh, placement)
        f = lambda x: x.tanh() @ x.T @ x  # noqa: E731
        reference = f
    pairs = {
        "jacobian": lambda f, x, v: functional.jacobian(scalar(f), x),
        "hvp": lambda f, x, v: functional.hvp(scalar(f), x, v)[1],
        "vhp": lambda f, x, v: functional.vhp(scalar(f), x, v)[1],
        "jvp": lambda f, x, v: functional.jvp(f, x, v)[1],
        "vjp": lambda f, x, v: functional.vjp(f, x, v)[1],
    }
    for name, compute in pairs.items():
        close(compute(f, given, direction), compute(reference, x, v), name)
    if outermost == "plain":
        close(functional.hessian(scalar(f), x), functional.hessian(scalar(reference), x), "hessian")
        close(functional.jacobian(f, x), functional.jacobian(reference, x), "jacobian")


@pytest.mark.parametrize("outermost", ["plain", "sharded", "replicated"])
@on_ranks(2, 4, name="ranks")
def test_derivatives_made_of_backward(pool: Any, ranks: int, outermost: str) -> None:
    pool.run(ranks, differentiate, outermost)


@on_mesh(2)
def call_functionally(mesh: Any) -> None:
    """`torch.func.functional_call` with distributed parameters is no transform."""
    x, model, reference = randn(3, 4), block(mesh), block()
    parameters = {name: (p * 2).detach().requires_grad_() for name, p in model.named_parameters()}
    doubled = {name: (p * 2).detach().requires_grad_() for name, p in reference.named_parameters()}
    functional_call(model, parameters, (x,)).square().sum().backward()
    functional_call(reference, doubled, (x,)).square().sum().backward()
    for name, p in doubled.items():
        close(parameters[name].grad, p.grad, name)


def test_functional_call(pool: Any) -> None:
    pool.run(2, call_functionally)


@on_mesh()
def start_at_partial(mesh: Any) -> None:
    """Backward that begins at values that are still to be reduced."""
    for name, f in {
        "amax": lambda x: x.amax(),
        "amin": lambda x: x.amin((0, 1)),
        "max": lambda x: x.max(),
        "tie": lambda x: (x * 0).amax(),
        "sum": lambda x: x.sum(),
    }.items():
        plain = randn(5, 3).requires_grad_()
        x = shard(plain.detach(), mesh, Shard(0)).requires_grad_()
        y = f(x)
        assert y._layout.placements[0].is_partial() == (mesh.size() == 2 or name == "sum")  # else a shard is empty
        y.backward(retain_graph=True)
        f(plain).backward()
        close(x.grad, plain.grad, name)
        close(torch.autograd.grad(y, x)[0], plain.grad, name)
    local = randn(3, 2).requires_grad_()
    with torch.no_grad():
        values = torch.ones_like(local)
    DTensor.from_local(local, mesh, [Partial("avg")]).backward(DTensor.from_local(values, mesh, [Replicate()]))
    close(local.grad, values / mesh.size())


@on_ranks(2, 4, name="ranks")
def test_backward_begins_at_partial_values(pool: Any, ranks: int) -> None:
    pool.run(ranks, start_at_partial)
