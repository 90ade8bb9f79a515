"""Less common questions to a distributed tensor, and less common ways to fill, copy and update one."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import DTensor, Partial, Replicate, Shard, get_platform, manual_seed
from hyper_parallel.core.dtensor.tensor import DTensor as CoreDTensor
from hyper_parallel.platform import torch as torch_package
from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch import op_table
from hyper_parallel.platform.torch.dtensor_class import make_dtensor_class
from hyper_parallel.platform.torch.handlers.copying import rebuild_dtensor
from hyper_parallel.platform.torch.handlers.optimizers import local_step
from hyper_parallel.platform.torch.op_table.binding import find
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.conftest import PLATFORM
from tests.torch.support import close, device, randn, shard


@on_mesh()
def metadata(mesh: Any) -> None:
    x = shard(randn(5, 3), mesh, Shard(0))
    whole = shard(randn(5, 3), mesh, Replicate())
    assert whole.data_ptr() == whole.to_local().data_ptr()
    if mesh.size() > 1:
        with pytest.raises(RuntimeError, match=r"full_tensor\(\) for the full tensor"):
            x.data_ptr()
    with pytest.raises(TypeError, match="0-d"):
        len(x.sum())
    assert x.is_same_size(whole) and torch.is_same_size(whole, x) and not x.is_same_size(x[:4])
    row = shard(randn(1, 3), mesh, Shard(1))
    assert row.expand(4, 3).stride() == (0, 1) == randn(1, 3).expand(4, 3).stride()


@on_mesh()
def copies(mesh: Any) -> None:
    x = shard(randn(5, 3), mesh, Shard(0))
    twice = copy.deepcopy([x, x])
    assert twice[0] is twice[1] and twice[0] is not x
    restore, (rebuild, layout, coordinate, local, *flags) = x.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    assert rebuild is rebuild_dtensor
    close(restore(rebuild, layout, coordinate, local.clone(), *flags), randn(5, 3))
    with pytest.raises(RuntimeError, match=r"saved with a local shape of \(7, 3\).*load the file of this rank"):
        restore(rebuild, layout, coordinate, torch.zeros(7, 3), *flags)


@on_mesh()
def drawing(mesh: Any) -> None:
    for placement in (Shard(0), Replicate()):
        x, chances = shard(randn(5, 3), mesh, placement), torch.linspace(0, 1, 15, device=device()).reshape(5, 3)
        got = x.normal_(generator=torch.Generator(device()).manual_seed(3))
        assert got is x and x.placements == (placement,)
        close(x, torch.empty(5, 3, device=device()).normal_(generator=torch.Generator(device()).manual_seed(3)))
    # Probabilities in a tensor have no rule: the draw needs the whole tensor, on which it is torch's.
    replicated = shard(randn(5, 3), mesh, Replicate())
    manual_seed(4, mesh)
    replicated.bernoulli_(shard(chances, mesh, Replicate()))
    torch.manual_seed(4)
    close(replicated, torch.empty(5, 3, device=device()).bernoulli_(chances))
    meta = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [Replicate()])
    assert nn.init.normal_(meta) is meta and meta.is_meta and meta.placements == (Replicate(),)


@on_mesh()
def kernels_over_lists(mesh: Any) -> None:
    a, b = shard(randn(5, 3), mesh, Shard(0)), shard(randn(5, 3, seed=1), mesh, Shard(0))
    torch._foreach_copy_([a], [b])
    assert a.placements == (Shard(0),)
    close(a, randn(5, 3, seed=1))
    summand = DTensor.from_local(randn(5, 3), mesh, [Partial()])
    close(torch._foreach_norm([summand, a])[0], (mesh.size() * randn(5, 3)).norm())
    torch._foreach_zero_([a])
    close(a, torch.zeros(5, 3))
    options = dict.fromkeys(["weight_decay", "momentum", "dampening"], 0.0)
    torch._fused_sgd_([a], [b], [], lr=0.5, nesterov=False, maximize=False, is_first_step=True, **options)
    close(a, -0.5 * randn(5, 3, seed=1))
    assert a.placements == (Shard(0),)


class Descent(torch.optim.Optimizer):
    """An element-wise optimizer that counts its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(0.1 * p.grad)


@on_mesh()
def optimizers(mesh: Any) -> None:
    # Once torch has seen an instance, the class's step is wrapped in hooks, which stay outside of ours.
    original = Descent.step
    try:
        Descent([randn(2).requires_grad_()])
        assert Descent.step.hooked  # type: ignore[attr-defined]
        p = shard(randn(5, 3), mesh, Shard(0)).requires_grad_()
        Descent.step = local_step(Descent.step)  # type: ignore[method-assign]
        optimizer, seen = Descent([p]), []
        optimizer.register_step_post_hook(lambda *_: seen.append(True))
        for _ in range(2):
            optimizer.zero_grad()
            (p * p).sum().backward()
            optimizer.step()
        assert (optimizer.steps, seen) == (2, [True, True])
        close(p, 0.8 * 0.8 * randn(5, 3))
        assert optimizer.state[p]["sum"].placements == (Shard(0),)
        close(optimizer.state[p]["sum"], 2 * 1.8 * randn(5, 3))
    finally:
        Descent.step = original  # type: ignore[method-assign]


@on_mesh()
def a_partial_parameter_trains_through_ordinary_operations(mesh: Any) -> None:
    p = DTensor.from_local(randn(5, 3), mesh, [Partial()]).detach().requires_grad_()
    value, gradient = mesh.size() * randn(5, 3), randn(5, 3, seed=1)
    p.grad = shard(gradient, mesh, Replicate())
    torch.optim.SGD([p], lr=0.5).step()
    close(p, value - 0.5 * gradient)
    assert p.placements == (Partial(),)


@on_mesh()
def a_gradient_from_before_other_data(mesh: Any) -> None:
    """The data came with another layout, the gradient keeps its own, and the step brings them together."""
    for is_read in (True, False):
        p = shard(randn(5, 3), mesh, Shard(0)).requires_grad_()
        (p * p).sum().backward()
        if is_read:
            assert p.grad.placements == (Shard(0),)
        p.data = shard(randn(5, 3, seed=1), mesh, Replicate())
        assert (p.placements, p.grad.placements) == ((Replicate(),), (Shard(0),))
        torch.optim.SGD([p], lr=0.5).step()
        assert p.placements == (Replicate(),)
        close(p, randn(5, 3, seed=1) - randn(5, 3), f"the gradient was read before: {is_read}")


@on_mesh()
def verbs(mesh: Any) -> None:
    platform, module = get_platform(), nn.Linear(3, 5)
    with pytest.raises(AttributeError, match="Linear has no buffer 'running_mean'"):
        platform.set_buffer(module, "running_mean", randn(3))
    module.counts = nn.Parameter(torch.arange(6), requires_grad=False)
    before, part = module.counts, shard(torch.arange(6).to(device()), mesh, Shard(0))
    platform.set_distributed_parameter(module, "counts", part.to_local(), part._layout)
    assert module.counts is before and isinstance(before, nn.Parameter) and before.dtype is torch.int64
    close(before, torch.arange(6))


@on_ranks(1, 3)
@pytest.mark.parametrize(
    "job",
    [
        metadata,
        copies,
        drawing,
        kernels_over_lists,
        optimizers,
        a_partial_parameter_trains_through_ordinary_operations,
        a_gradient_from_before_other_data,
        verbs,
    ],
    ids=lambda job: job.__name__,
)
def test_rare_handlers(pool: Any, job: Any, world_size: int) -> None:
    pool.run(world_size, job)


# ------------------------------------------------------------------------------------------------ one class, one table


def test_the_class_is_made_once() -> None:
    made = type(DTensor.from_local(randn(2), get_platform_mesh(), [Replicate()]))
    assert make_dtensor_class(CoreDTensor, lambda *_: None) is made
    with pytest.raises(RuntimeError, match="made already"):
        make_dtensor_class(nn.Module, lambda *_: None)


def get_platform_mesh() -> Any:
    from hyper_parallel import init_device_mesh

    return init_device_mesh(None, (1,))


def test_a_function_has_one_row() -> None:
    rows = [
        NativeOp(name, lambda func, args, kwargs: (args, None), lambda func, ops, static_args: None) for name in "ab"
    ]
    with pytest.raises(AssertionError, match="has two rows: a and b"):
        op_table._merge({torch.relu: rows[0]}, {torch.relu: rows[1]})
    merged = {torch.relu: rows[0], torch.tanh: rows[1]}
    assert op_table._merge({torch.relu: rows[0]}, {torch.tanh: rows[1]}) == merged
    # A name that this torch does not have, or that is no function (a dtype), gets no row.
    assert find("relu no_such_function", torch, torch.Tensor) == [torch.relu, torch.Tensor.relu]
    assert find("float", torch, torch.Tensor) == [torch.Tensor.float]


# ------------------------------------------------------------------------------------------------ importing torch


@pytest.mark.skipif(PLATFORM != "torch-cpu", reason="speaks about a machine without the extension")
@pytest.mark.parametrize("before", [None, "1"])
def test_torch_with_an_extension_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: str | None
) -> None:
    """An installed torch_npu without CANN: torch is imported without it, its failure is only said."""
    seen: list[str | None] = []

    def load() -> None:
        seen.append(os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"))
        raise RuntimeError("libascendcl.so: cannot open shared object file")

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "torch_npu" else find(name))
    monkeypatch.setattr(torch, "_import_device_backends", load)
    if before is None:
        monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    else:
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", before)
    torch_package._import_torch()
    assert seen == []  # torch is there already: nothing to decide
    monkeypatch.setattr(torch_package, "sys", SimpleNamespace(modules={}))  # as if nothing were imported yet
    with caplog.at_level("INFO", logger="hyper_parallel"):
        torch_package._import_torch()
    assert seen == [before] and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == before
    assert "torch is used without its extension: libascendcl.so" in caplog.text


@pytest.mark.skipif(PLATFORM != "torch-cpu", reason="speaks about gloo")
def test_a_torch_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = get_platform()
    assert platform.unavailable_reason() is None
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert platform.unavailable_reason() == "this torch was built without torch.distributed or without gloo"
