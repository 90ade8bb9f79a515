"""`loss_parallel` on torch: against torch itself, narrow dtypes, autocast, modules, bad targets on accelerators."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs_dtensor
import torch.distributed.tensor.parallel as theirs_parallel
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode as TheirCommDebugMode
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    fully_shard,
    get_platform,
    loss_parallel,
    parallelize_module,
    vocab_parallel_cross_entropy,
)
from hyper_parallel.core.rules.vocab_parallel import vocab_parallel_of
from hyper_parallel.testing import spmd
from tests.torch.support import close, device, randn

_THEIR_MESHES: dict[tuple[int, ...], Any] = {}


def their_mesh(*shape: int) -> Any:
    """A mesh of torch over the first ranks; to be called on all ranks of the pool."""
    if shape not in _THEIR_MESHES:
        ranks = torch.arange(math.prod(shape)).reshape(shape)
        _THEIR_MESHES[shape] = theirs_dtensor.DeviceMesh(device().type, ranks)
    return _THEIR_MESHES[shape]


def targets(*shape: int, classes: int) -> torch.Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(1)).to(device())


# ---------------------------------------------------------------------- against torch's own


def against_torch(reduction: str, weighted: bool, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Value and gradient of both libraries, and the collectives of each."""
    theirs, ours = their_mesh(2), spmd.device_mesh(2)
    if ours is None:
        return None
    x, classes = randn(*shape), shape[1]
    t = targets(shape[0], *shape[2:], classes=classes)
    if not weighted:  # with weights torch looks the weight of class -100 up
        t.view(-1)[0] = -100
    weight = randn(classes, seed=2).abs() if weighted else None
    cotangent = randn(t.numel(), seed=3).view_as(t) if reduction == "none" else randn(1, seed=3)[0]
    found = []
    for shard, replicate, mesh, distribute, context, counter, dtensor in (
        (
            theirs_dtensor.Shard(1),
            theirs_dtensor.Replicate(),
            theirs,
            theirs_dtensor.distribute_tensor,
            theirs_parallel.loss_parallel,
            TheirCommDebugMode,
            theirs_dtensor.DTensor,
        ),
        (Shard(1), Replicate(), ours, distribute_tensor, loss_parallel, CommDebugMode, None),
    ):
        logits = distribute(x, mesh, [shard]).detach().requires_grad_()
        with counter() as comm, context():
            y = F.cross_entropy(logits, t, weight, reduction=reduction)
            assert tuple(y.placements) == (replicate,)
            local = y.to_local() if dtensor is None else y
            seed = cotangent if dtensor is None else dtensor.from_local(cotangent, mesh, [replicate], run_check=False)
            (local * seed).sum().backward()
        found.append((y.full_tensor().detach(), logits.grad.full_tensor(), comm.get_total_counts()))
    (their_y, their_grad, their_count), (our_y, our_grad, our_count) = found
    close(our_y, their_y, "value")
    close(our_grad, their_grad, "gradient")
    return their_count, our_count


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_against_torch(pool: Any, reduction: str) -> None:
    for weighted in (False, True):
        for shape in ((6, 8), (2, 5, 3)):
            for theirs, ours in pool.run(2, against_torch, reduction, weighted, shape):
                assert ours == 2 < theirs


def mean_over_samples() -> float | None:
    """A mean over sharded samples, which torch refuses."""
    theirs, ours = their_mesh(2, 2), spmd.device_mesh(2, 2)
    if ours is None:
        return None
    x, t = randn(6, 8), targets(6, classes=8)
    refused = theirs_dtensor.distribute_tensor(x, theirs, [theirs_dtensor.Shard(0), theirs_dtensor.Shard(1)])
    with pytest.raises(NotImplementedError), theirs_parallel.loss_parallel():
        F.cross_entropy(
            refused, theirs_dtensor.distribute_tensor(t, theirs, [theirs_dtensor.Shard(0), theirs_dtensor.Replicate()])
        )
    with theirs_parallel.loss_parallel():
        pass  # an exception leaves torch's context open; the end of another one closes it
    with loss_parallel():
        y = F.cross_entropy(distribute_tensor(x, ours, [Shard(0), Shard(1)]), t)
    assert y.placements == (Partial(), Replicate())
    close(y, F.cross_entropy(x, t))
    return y.full_tensor().item()


def test_mean_over_samples(pool: Any) -> None:
    assert len(set(pool.run(4, mean_over_samples))) == 1


# ---------------------------------------------------------------------- inside of torch's own context


@spmd.on_mesh()
def inside_of_torchs(mesh: Any) -> None:
    """Value, gradient of the logits, and communication: as inside of `loss_parallel`, for all arguments."""
    calls: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((6, 8), {}),
        ((6, 5), {"reduction": "sum", "ignore_index": 3}),
        ((2, 5, 3), {"reduction": "none"}),
        ((5,), {"label_smoothing": 0.2}),
        ((4, 7), {"weight": randn(7, seed=2).abs()}),
    ]
    for shape, options in calls:
        dim = min(1, len(shape) - 1)
        x, t = randn(*shape), targets(*shape[:dim], *shape[dim + 1 :], classes=shape[dim])
        single = x.clone().requires_grad_()
        wanted = F.cross_entropy(single, t, **options)
        wanted.sum().backward()
        for nest in (False, True):
            logits = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
            refused(logits, t, options)
            with CommDebugMode() as comm, theirs_parallel.loss_parallel():
                with loss_parallel() if nest else contextlib.nullcontext():
                    y = F.cross_entropy(logits, t, **options)
                assert y.placements == (Replicate(),)
                y.sum().backward()
            assert comm.get_comm_counts() == {"all_reduce": 2}
            close(y, wanted, f"value {shape} {options}")
            close(logits.grad, single.grad, f"gradient {shape} {options}")
        refused(logits, t, options)


def refused(logits: Any, t: torch.Tensor, options: dict[str, Any]) -> None:
    """Plain targets are refused outside of both contexts; a number is the same on all ranks, and always taken."""
    if t.ndim:
        with pytest.raises(ValueError, match="got a plain tensor"):
            F.cross_entropy(logits, t, **options)


@spmd.on_mesh()
def nothing_else_inside_of_torchs(mesh: Any) -> None:
    """Other operations refuse plain tensors there too; other losses, and logits that are not sharded, are right."""
    x, t = randn(4, 6), targets(4, classes=6)
    logits = distribute_tensor(x, mesh, [Shard(1)])
    whole = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    with theirs_parallel.loss_parallel():
        with pytest.raises(ValueError, match="plain"):
            logits + x
        close(F.nll_loss(F.log_softmax(logits, 1), t), F.cross_entropy(x, t))
        with CommDebugMode() as comm:
            close(F.cross_entropy(whole, t), F.cross_entropy(x, t))
        assert not comm.get_total_counts()
    # Bytes: a class of another rank minus this rank's first one is negative, and -100 is 156 in a byte.
    x, t = randn(4, 300), torch.tensor([20, 156, 240, 255], dtype=torch.uint8, device=device())
    local = distribute_tensor(x, mesh, [Shard(1)]).to_local()
    close(vocab_parallel_cross_entropy(local, t, mesh), F.cross_entropy(x, t.long()))


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def samples_inside_of_torchs(mesh: Any) -> None:
    """A head under tensor parallelism, samples over another dimension: plain targets are all or this rank's."""
    x, t = randn(6, 4), targets(6, classes=5)
    torch.manual_seed(0)
    single = nn.Linear(4, 5).to(device())
    model = parallelize_module(copy.deepcopy(single), mesh["tp"], ColwiseParallel(use_local_output=False))
    fully_shard(model, mesh=mesh["dp"])
    wanted = F.cross_entropy(single(x), t)
    wanted.backward()
    mine = distribute_tensor(t, mesh["dp"], [Shard(0)]).to_local()
    for given in (t, mine):
        model.zero_grad()
        with theirs_parallel.loss_parallel():
            loss = F.cross_entropy(model(distribute_tensor(x, mesh["dp"], [Shard(0)])), given)
            loss.backward()
        close(loss, wanted, "value")
        close(model.weight.grad, single.weight.grad, "gradient")


def test_inside_of_torchs_own_context(pool: Any) -> None:
    """Torch's own `loss_parallel` around this library's logits."""
    pool.run(3, inside_of_torchs)
    pool.run(2, nothing_else_inside_of_torchs)
    pool.run(4, samples_inside_of_torchs)


# ---------------------------------------------------------------------- dtypes


@spmd.on_mesh()
def narrow(mesh: Any, dtype: torch.dtype) -> None:
    """Sums are in float32: as good as torch's own kernel, and dtypes are torch's."""
    x, t = (randn(16, 1000) * 4).to(dtype), targets(16, classes=1000)
    for function in (
        lambda x: F.cross_entropy(x, t),
        lambda x: F.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
        lambda x: F.log_softmax(x, 1),
        lambda x: F.softmax(x, 1),
        lambda x: torch.logsumexp(x, 1),
        # Some devices have no float64.
        lambda x: F.softmax(x, 1, dtype=torch.float64 if device().type == "cpu" else torch.float32),
    ):
        exact = x.double().requires_grad_()
        wanted = function(exact)
        wanted.sum().backward()
        logits = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            y = function(logits)
        y.sum().backward()
        assert y.dtype == function(x).dtype and logits.grad.dtype == dtype
        close(y.full_tensor().double(), wanted, "value", 2e-2)
        close(logits.grad.full_tensor().double(), exact.grad, "gradient", 2e-2)
    local = distribute_tensor(x, mesh, [Shard(1)]).to_local()
    assert vocab_parallel_cross_entropy(local, t, mesh).dtype == dtype
    # Thousands of equal logits: a sum in the narrow dtype would stop growing.
    flat = distribute_tensor(torch.zeros(2, 8192, dtype=dtype, device=device()), mesh, [Shard(1)])
    close(F.log_softmax(flat, 1).full_tensor()[0, 0].float(), torch.tensor(-math.log(8192)), "sum", 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(pool: Any, dtype: torch.dtype) -> None:
    pool.run(2, narrow, dtype)


@spmd.on_mesh()
def autocast(mesh: Any) -> None:
    """Autocast works as for plain tensors: the head in bfloat16, its loss in float32; on and off with the same
    layouts."""
    x, t = randn(4, 8), targets(4, classes=6)
    torch.manual_seed(0)
    plain, sharded = nn.Linear(8, 6), nn.Linear(8, 6)
    sharded.load_state_dict(plain.state_dict())
    plain.to(device())
    parallelize_module(sharded.to(device()), mesh, ColwiseParallel(use_local_output=False))
    for function in (
        F.cross_entropy,
        lambda x, t: F.nll_loss(x.log_softmax(1), t),
        lambda x, t: (x.softmax(1) ** 2).sum(),
    ):
        for enabled in (False, True, False):
            for module in (plain, sharded):
                module.zero_grad()
            with torch.autocast(device().type, torch.bfloat16, enabled=enabled), loss_parallel():
                wanted, got = function(plain(x), t), function(sharded(x), t)
            assert got.dtype == wanted.dtype
            wanted.backward()
            got.backward()
            tolerance = 1e-2 if enabled else 1e-5
            close(got, wanted, "value", tolerance)
            close(sharded.weight.grad, plain.weight.grad, "gradient", tolerance)


def test_autocast(pool: Any) -> None:
    pool.run(2, autocast)


# ---------------------------------------------------------------------- modules, targets


@spmd.on_mesh()
def modules(mesh: Any) -> None:
    """nn.CrossEntropyLoss with its buffer of class weights, nn.NLLLoss, and targets of bytes."""
    x, t = randn(6, 5), targets(6, classes=5)
    weight = randn(5, seed=2).abs()
    logits = distribute_tensor(x, mesh, [Shard(1)])
    with loss_parallel():
        for module in (
            nn.CrossEntropyLoss(weight, ignore_index=2, label_smoothing=0.1).to(device()),
            nn.Sequential(nn.LogSoftmax(1)),
        ):
            if isinstance(module, nn.CrossEntropyLoss):
                close(module(logits, t), module(x, t))
            else:
                loss = nn.NLLLoss(weight).to(device())
                close(loss(module(logits), t), loss(module(x), t))
        close(F.cross_entropy(logits, t.to(torch.uint8)), F.cross_entropy(x, t))
        close(
            F.kl_div(F.log_softmax(logits, 1), F.softmax(logits * 2, 1)),
            F.kl_div(F.log_softmax(x, 1), F.softmax(x * 2, 1)),
        )


def test_modules(pool: Any) -> None:
    pool.run(4, modules)


@spmd.on_mesh()
def weight_with_gradient(mesh: Any) -> None:
    """Class weights have no gradient with classes as target, as in torch; with probabilities they have."""
    x, t = randn(4, 6), targets(4, classes=6)
    weight = randn(6, seed=2).abs()
    logits = distribute_tensor(x, mesh, [Shard(1)])
    sharded = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(ValueError, match="class weights"), loss_parallel():
        F.cross_entropy(logits, t, sharded)
    p = randn(4, 6, seed=3).softmax(1)
    placed = distribute_tensor(p, mesh, [Replicate()])
    logits.requires_grad_()
    with CommDebugMode() as comm:
        loss = F.cross_entropy(logits, placed, sharded)
        assert comm.get_comm_counts() == {"all_reduce": 3}
        loss.backward()
    assert comm.get_comm_counts() == {"all_reduce": 4}
    plain = weight.clone().requires_grad_()
    F.cross_entropy(x, p, plain).backward()
    close(sharded.grad, plain.grad)


def test_weight_with_gradient(pool: Any) -> None:
    pool.run(2, weight_with_gradient)


@spmd.on_mesh()
def elsewhere(mesh: Any) -> None:
    """Logits that were not computed with a head are not its part, even if they have as many classes."""
    x, t = randn(4, 6), targets(4, classes=6)
    model = parallelize_module(nn.Sequential(nn.Linear(6, 12)).to(device()), mesh, {"0": ColwiseParallel()})
    other, again = nn.Linear(6, 6).to(device()), copy.deepcopy(model)
    with pytest.raises(ValueError, match="shard of the 12"):
        F.cross_entropy(other(x), t)  # a head that was not called is unknown
    mine = model(x)
    assert mine.shape == (4, 6) == again(x).shape
    for _ in range(2):  # the second time with a head that has learned
        F.cross_entropy(other(x), t).backward()
        for logits in (mine, mine.double()[:, :6] * other(x), checkpoint(again, x, use_reentrant=False)):
            with pytest.raises(ValueError, match="shard of the 12 output features of '0'"):
                F.cross_entropy(logits, t)
        mine.sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        mine = model(x)
    frozen = copy.deepcopy(model).requires_grad_(False)
    scale = torch.ones((), device=device(), requires_grad=True)
    for logits in (frozen(x) * scale, checkpoint(again, x + scale, use_reentrant=True)):
        with pytest.raises(ValueError, match="shard of the 12"):
            F.cross_entropy(logits, t)
    del frozen
    gc.collect()
    again(x), model(x)
    F.cross_entropy(other(x), t)
    with torch.no_grad(), pytest.raises(ValueError, match="shard of the 12"):
        F.cross_entropy(other(x), t)  # nothing is recorded


def test_logits_from_elsewhere(pool: Any) -> None:
    pool.run(2, elsewhere)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def gathered_head(mesh: Any) -> None:
    """A head whose weight data parallelism has cut further, and gathers for a forward."""
    x, t = randn(4, 6), targets(4, classes=6)
    model = parallelize_module(nn.Sequential(nn.Linear(6, 12)).to(device()), mesh["tp"], {"0": ColwiseParallel()})
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh["dp"])
    logits = model(x)
    with pytest.raises(ValueError, match="shard of the 12"):
        F.cross_entropy(logits, t)


def test_a_gathered_head(pool: Any) -> None:
    pool.run(4, gathered_head)


@spmd.on_mesh()
def without_looking(mesh: Any) -> None:
    """An invalid target makes its loss not a number where checking targets would make the host wait."""
    functions = vocab_parallel_of(get_platform())
    x, t = randn(4, 6), targets(4, classes=6)
    t[1], t[2] = 6, -100
    local = distribute_tensor(x, mesh, [Shard(1)]).to_local().requires_grad_()
    known, functions._looks = functions._looks, lambda: False
    try:
        loss = vocab_parallel_cross_entropy(local, t, mesh, reduction="none")
    finally:
        functions._looks = known
    loss.nansum().backward()
    assert loss.isnan().tolist() == [False, True, False, False]
    assert local.grad.isnan().all(1).tolist() == [False, True, False, False]
    assert local.grad[2].abs().max() == 0


def test_bad_targets_on_accelerators(pool: Any) -> None:
    pool.run(2, without_looking)
