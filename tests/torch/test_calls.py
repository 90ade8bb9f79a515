"""Parallelised modules are called without the detour of `torch.nn.Module.__call__`: no hook must notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    Replicate,
    SequenceParallel,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from tests.torch.support import device

R = Replicate()


class Outer(nn.Module):
    """A module that is prepared, around one that is parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return self.inner(x) * scale


def outer() -> Any:
    style = PrepareModuleInputOutput(
        input_layouts=R, desired_input_layouts=R, use_local_input=True, output_layouts=R, desired_output_layouts=R
    )
    return parallelize_module(
        Outer().to(device()), init_device_mesh(None, (1,)), {"": style, "inner": ColwiseParallel()}
    )


def x() -> torch.Tensor:
    return torch.arange(8.0, device=device()).reshape(2, 4).requires_grad_()


#: name -> a function that registers a hook on a module, which appends to a list when it runs.
HOOKS: dict[str, Callable[[Any, list], Any]] = {
    "before": lambda m, seen: m.register_forward_pre_hook(lambda m, args: seen.append(len(args))),
    "before, with keywords": lambda m, seen: m.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True
    ),
    "before, first": lambda m, seen: m.register_forward_pre_hook(lambda m, args: seen.append(args), prepend=True),
    "after": lambda m, seen: m.register_forward_hook(lambda m, args, y: seen.append(y)),
    "after, with keywords": lambda m, seen: m.register_forward_hook(
        lambda m, args, kwargs, y: seen.append(kwargs), with_kwargs=True
    ),
    "after, always": lambda m, seen: m.register_forward_hook(lambda m, args, y: seen.append(y), always_call=True),
    "backward": lambda m, seen: m.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_out)),
    "before backward": lambda m, seen: m.register_full_backward_pre_hook(lambda m, grad_out: seen.append(grad_out)),
    "all modules, before": lambda m, seen: nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: seen.append(args) if module is m else None
    ),
    "all modules, after": lambda m, seen: nn.modules.module.register_module_forward_hook(
        lambda module, args, y: seen.append(y) if module is m else None
    ),
    "all modules, backward": lambda m, seen: nn.modules.module.register_module_full_backward_hook(
        lambda module, grad_in, grad_out: seen.append(grad_out) if module is m else None
    ),
}


@pytest.mark.parametrize("path", ["", "inner"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name: str, path: str) -> None:
    model, seen = outer(), []
    wanted = model(x(), scale=2.0)
    handle = HOOKS[name](model.get_submodule(path), seen)
    try:
        y = model(x(), scale=2.0)
        y.sum().backward()
        assert len(seen) == 1
        torch.testing.assert_close(y, wanted)
    finally:
        handle.remove()
    model(x())
    assert len(seen) == 1


def test_hooks_change_what_they_return() -> None:
    model = outer()
    plain = model(x())
    model.register_forward_pre_hook(lambda m, args, kwargs: (args, {"scale": 3.0}), with_kwargs=True)
    model.register_forward_hook(lambda m, args, y: y + 1)
    torch.testing.assert_close(model(x()), 3 * plain + 1)
    model.inner.register_forward_pre_hook(lambda m, args: (args[0] * 0,))
    torch.testing.assert_close(model(x()), 3 * model.inner.bias.full_tensor().expand(2, 4) + 1)


def test_wrong_hook() -> None:
    model = outer()
    model.register_forward_pre_hook(lambda m, args, kwargs: args, with_kwargs=True)
    with pytest.raises(RuntimeError, match="pre-hook must return None or a tuple"):
        model(x())


def test_hooks_that_remove_themselves() -> None:
    model, seen = outer(), []

    def once(m: Any, args: tuple, kwargs: dict) -> None:
        seen.append(args)
        handle.remove()

    handle = model.register_forward_pre_hook(once, with_kwargs=True)
    model(x())
    model(x())
    assert len(seen) == 1


@pytest.mark.parametrize("path", ["", "inner"])
def test_forward_of_the_object(path: str) -> None:
    """Libraries that wrap a model put another forward on the object."""
    model = outer()
    module = model.get_submodule(path)
    module.forward = lambda *args, **kwargs: torch.full((2, 4), 7.0, device=device())
    torch.testing.assert_close(module(x()), torch.full((2, 4), 7.0, device=device()))


def test_identity() -> None:
    model = outer()
    assert isinstance(model, Outer) and type(model).__name__ == "Outer" and repr(model).startswith("Outer(")
    assert isinstance(model.inner, nn.Linear) and type(model.inner).__qualname__ == "Linear"
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.inner.weight.mul_(0)
        other.inner.bias.mul_(0)
    assert not other(x()).any() and model(x()).any()


def test_a_call_of_its_own() -> None:
    calls: list[tuple] = []

    class Counting(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return super().__call__(*args, **kwargs)

    model = nn.Sequential(Counting(4, 4)).to(device())
    parallelize_module(model, init_device_mesh(None, (1,)), {"0": ColwiseParallel()})
    model(x())
    assert len(calls) == 1


def test_both_on_one_module() -> None:
    """A style that prepares inputs on a module that another style runs."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4)).to(device())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh(None, (1,))
    parallelize_module(model, mesh, {"0": PrepareModuleInput(input_layouts=R, desired_input_layouts=R)})
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    torch.testing.assert_close(model(x()), plain(x()))
    torch.testing.assert_close(model(DTensor.from_local(x(), mesh, [R])), plain(x()))


class ScaleNorm(nn.Module):
    """A norm of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.seen: list[type] = []

    def forward(self, x: Any) -> Any:
        self.seen.append(type(x))
        return self.scale * x / x.norm(dim=-1, keepdim=True)


def test_registered_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = get_platform()
    monkeypatch.setattr(type(platform), "norm_kinds", dict(platform.norm_kinds))
    mesh = init_device_mesh(None, (1,))
    plain = ScaleNorm().to(device())
    for known in (False, True):
        if known:
            platform.register_norm_module(ScaleNorm)
        model = parallelize_module(copy.deepcopy(plain), mesh, SequenceParallel(sequence_dim=0))
        model.seen.clear()
        y = model(x())
        assert isinstance(y, DTensor)
        # A norm that the style knows runs on the local tensor.
        (seen,) = model.seen
        assert issubclass(seen, DTensor) is not known
        torch.testing.assert_close(y.to_local(), plain(x()))
        y.to_local().sum().backward()
        plain.zero_grad()
        plain(x()).sum().backward()
        torch.testing.assert_close(model.scale.grad.full_tensor(), plain.scale.grad)


def test_wrong_registration() -> None:
    with pytest.raises(TypeError, match="register_norm_module takes a class of modules, got 3"):
        get_platform().register_norm_module(3)
    with pytest.raises(ValueError, match="a norm normalises at least 1 dimension, got dims=0"):
        get_platform().register_norm_module(ScaleNorm, dims=0)
