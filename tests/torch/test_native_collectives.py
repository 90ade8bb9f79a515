"""Functions of torch.distributed on DTensors, imported before the library: they act on the local storage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import (
    P2POp,
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    batch_isend_irecv,
    broadcast,
    gather,
    irecv,
    isend,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)
from torch.distributed import _functional_collectives as functional

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device

on_2_by_2 = on_mesh(2, 2, names=("dp", "tp"))
BATCH, WIDTH, HIDDEN = 4, 6, 5  # uneven over two ranks


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, WIDTH)
    ).to(device())


def parallel(model: torch.nn.Module, mesh: Any, norm: bool = True) -> torch.nn.Module:
    plan: dict[str, Any] = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    if norm:
        plan |= {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
    return parallelize_module(model, mesh["tp"], plan)


def data() -> torch.Tensor:
    return torch.randn(BATCH, 4, WIDTH, generator=torch.Generator().manual_seed(1)).to(device())


def reference() -> dict[str, torch.Tensor]:
    model = make_model()
    model(data()).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def own_batch(mesh: Any) -> torch.Tensor:
    return data().chunk(2)[mesh.get_local_rank("dp")]


def own_gradients(mesh: Any, seed: int = 0) -> torch.nn.Module:
    """A parallel model whose gradients are those of this data-parallel rank's half of the batch."""
    model = parallel(make_model(seed), mesh)
    x = own_batch(mesh)
    x = x.chunk(2, dim=1)[mesh.get_local_rank("tp")]
    model(x).square().mean().backward()
    return model


def same_gradients(model: torch.nn.Module) -> None:
    for name, wanted in reference().items():
        close(model.get_parameter(name).grad, wanted, name)


# ------------------------------------------------------------------------------------------------ data parallelism
def sums_of(model: torch.nn.Module, group: Any) -> None:
    for p in model.parameters():
        all_reduce(p.grad, group=group)
        p.grad /= 2


def sums_of_data(model: torch.nn.Module, group: Any) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad.data, op=ReduceOp.SUM, group=group)
        p.grad.data.div_(2)


def awaited(model: torch.nn.Module, group: Any) -> None:
    works = [all_reduce(p.grad, group=group, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()
    for p in model.parameters():
        p.grad.mul_(0.5)


def coalesced(model: torch.nn.Module, group: Any) -> None:
    with dist._coalescing_manager(group):
        for p in model.parameters():
            all_reduce(p.grad, group=group)
    for p in model.parameters():
        p.grad /= 2


def coalesced_at_once(model: torch.nn.Module, group: Any) -> None:
    dist.all_reduce_coalesced([p.grad for p in model.parameters()], group=group)
    for p in model.parameters():
        p.grad /= 2


def flat(model: torch.nn.Module, group: Any) -> None:
    """Reduce gradients by hand, in one buffer."""
    locals_ = [p.grad.to_local() for p in model.parameters()]
    buffer = torch._utils._flatten_dense_tensors(locals_)
    all_reduce(buffer, group=group)
    for local, new in zip(locals_, torch._utils._unflatten_dense_tensors(buffer / 2, locals_), strict=True):
        local.copy_(new)


def gathered(model: torch.nn.Module, group: Any) -> None:
    for p in model.parameters():
        both = [torch.zeros_like(p.grad) for _ in range(2)]
        all_gather(both, p.grad, group=group)
        p.grad = (both[0] + both[1]) / 2


def to_first_and_back(model: torch.nn.Module, group: Any) -> None:
    for p in model.parameters():
        reduce(p.grad, group_dst=0, group=group)
        broadcast(p.grad, group_src=0, group=group)
        p.grad /= 2


def differentiable(model: torch.nn.Module, group: Any) -> None:
    from torch.distributed.nn.functional import all_reduce as reduced

    for p in model.parameters():
        p.grad = reduced(p.grad, group=group) / 2


WAYS = [sums_of, sums_of_data, awaited, coalesced, coalesced_at_once, flat, gathered, to_first_and_back, differentiable]


@on_2_by_2
def train(mesh: Any, name: str) -> None:
    model = own_gradients(mesh)
    globals()[name](model, mesh["dp"].get_group())
    same_gradients(model)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_data_parallel_loop(pool: Any, way: Callable) -> None:
    """The gradients of two data-parallel ranks, each of two tensor-parallel ones, are the single device's."""
    pool.run(4, train, way.__name__)


@on_2_by_2
def start_alike(mesh: Any) -> None:
    dp = mesh["dp"]
    group, first = dp.get_group(), int(dp.ranks[0])
    ours = own_gradients(mesh, seed=mesh.get_local_rank("dp"))
    ours(own_batch(mesh).chunk(2, dim=1)[mesh.get_local_rank("tp")]).sum().backward()  # views are kept on parameters
    for p in ours.parameters():
        broadcast(p.data, src=first, group=group)
    ours.zero_grad()
    ours(own_batch(mesh).chunk(2, dim=1)[mesh.get_local_rank("tp")]).square().mean().backward()
    sums_of(ours, group)
    same_gradients(ours)


def test_broadcast_of_parameters(pool: Any) -> None:
    """Models that started from other seeds train in the same way after a broadcast of ``p.data``."""
    pool.run(4, start_alike)


@on_2_by_2
def averages(mesh: Any) -> None:
    x = distribute_tensor(torch.full((3,), float(dist.get_rank())), mesh["tp"], [Shard(0)], src_data_rank=None)
    all_reduce(x, op=ReduceOp.MAX, group=mesh["dp"].get_group())
    wanted = float(2 + mesh.get_local_rank("tp"))
    assert x.to_local().tolist() == [wanted] * len(x.to_local())
    y = DTensor.from_local(torch.tensor([float(dist.get_rank())]).to(device()), mesh["tp"], [Partial()])
    all_reduce(y, group=mesh["dp"].get_group())  # a sum of sums
    assert y.full_tensor().tolist() == [6.0]
    z = distribute_tensor(torch.ones(1, 2), mesh["tp"], [Shard(0)])  # one rank's shard is empty
    all_reduce(z, group=mesh["dp"].get_group())
    assert z.full_tensor().tolist() == [[2, 2]]
    w = distribute_tensor(torch.ones(2), mesh["tp"], [Replicate()])
    all_reduce(w)  # over all ranks, on which it is the same
    assert w.to_local().tolist() == [4, 4]


def test_other_reductions(pool: Any) -> None:
    pool.run(4, averages)


# ------------------------------------------------------------------------------------------------ the other functions
@on_2_by_2
def every_function(mesh: Any) -> None:
    dp, tp = mesh["dp"], mesh["tp"]
    group, mine, other = dp.get_group(), dp.get_local_rank(), 1 - dp.get_local_rank()
    peer = int(dp.ranks[other])

    def value(i: float) -> Any:
        """Different on data-parallel ranks, a shard on tensor-parallel ones."""
        return distribute_tensor(torch.arange(8.0).reshape(2, 4) + 10 * i, tp, [Shard(1)])

    def holds(x: Any, i: float) -> bool:
        return torch.equal(x.full_tensor() if isinstance(x, DTensor) else x, value(i).full_tensor().to(x.device))

    def local_of(i: float) -> torch.Tensor:
        return value(i).to_local()

    both = [value(7), value(7)]
    all_gather(both, value(mine), group=group)
    assert holds(both[0], 0) and holds(both[1], 1)
    plain = [torch.zeros_like(local_of(0)) for _ in range(2)]
    all_gather(plain, value(mine), group=group)
    assert torch.equal(plain[0], local_of(0)) and torch.equal(plain[1], local_of(1))
    rows = torch.zeros(4, 2, device=device())
    all_gather_into_tensor(rows, value(mine), group=group)
    assert torch.equal(rows, torch.cat([local_of(0), local_of(1)]))
    rows = distribute_tensor(torch.zeros(4, 4), tp, [Shard(1)])
    all_gather_into_tensor(rows, value(mine), group=group)
    assert torch.equal(rows.full_tensor(), torch.cat([value(0).full_tensor(), value(1).full_tensor()]))

    whole = distribute_tensor(torch.ones(4, 4) * (mine + 1), tp, [Shard(1)])
    half = value(0)
    reduce_scatter_tensor(half, whole, group=group)
    assert half.full_tensor().tolist() == [[3.0] * 4] * 2
    reduce_scatter(half, [value(0), value(1)], group=group)
    assert torch.equal(half.full_tensor(), 2 * value(mine).full_tensor())
    received = [value(7), value(7)]
    all_to_all(received, [value(2 * mine), value(2 * mine + 1)], group=group)
    assert holds(received[0], mine) and holds(received[1], 2 + mine)
    swapped = value(0)
    all_to_all_single(swapped, value(mine), group=group)
    assert torch.equal(swapped.full_tensor(), torch.stack([value(i).full_tensor()[mine] for i in range(2)]))

    collected = [value(7), value(7)] if mine == 0 else None
    gather(value(mine), collected, dst=int(dp.ranks[0]), group=group)
    assert collected is None or (holds(collected[0], 0) and holds(collected[1], 1))
    part = value(7)
    scatter(part, [value(4), value(5)] if mine == 0 else None, src=int(dp.ranks[0]), group=group)
    assert holds(part, 4 + mine)

    part = value(7)
    if mine == 0:
        send(value(3), peer, group=group)
        isend(value(4), group_dst=1, group=group).wait()
    else:
        recv(part, peer, group=group)
        assert holds(part, 3)
        irecv(part, group_src=0, group=group).wait()
        assert holds(part, 4)
    part = value(7)
    works = batch_isend_irecv([P2POp(isend, value(mine), peer, group), P2POp(irecv, part, peer, group)])
    for work in works:
        work.wait()
    assert holds(part, other)
    if device().type != "cpu":
        return  # hccl refuses to receive from anybody; nccl could not be asked
    if mine == 0:
        send(value(8), peer)
    else:
        assert recv(part) == peer  # from anybody
        assert holds(part, 8)


@on_2_by_2
def caches_are_cleared(mesh: Any) -> None:
    """A view that was kept of a tensor is not used after a collective has written the tensor."""
    x = distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]).redistribute(placements=[Replicate()])
    x.requires_grad_()
    weight = distribute_tensor(torch.eye(4), mesh["tp"], [Shard(0)])
    torch.nn.functional.linear(x, weight)
    with torch.no_grad():
        all_reduce(x, group=mesh["dp"].get_group())
    y = torch.nn.functional.linear(x, weight)
    assert torch.equal(y.full_tensor(), 2 * torch.ones(4, 4, device=device()))


@on_2_by_2
def objects(mesh: Any) -> None:
    """Object collectives carry DTensors between ranks that hold the same part."""
    dp = mesh["dp"]
    group, first = dp.get_group(), int(dp.ranks[0])
    x = distribute_tensor(torch.arange(4.0), mesh, [Replicate(), Shard(0)])
    collected: list[Any] = [None, None]
    dist.all_gather_object(collected, {"x": x}, group=group)
    assert all(torch.equal(entry["x"].full_tensor(), x.full_tensor()) for entry in collected)
    sent = [x if dp.get_local_rank() == 0 else None]
    dist.broadcast_object_list(sent, src=first, group=group)
    assert torch.equal(sent[0].full_tensor(), x.full_tensor())


JOBS = [every_function, caches_are_cleared, objects]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_functions(pool: Any, job: Callable) -> None:
    pool.run(4, job)


# ------------------------------------------------------------------------------------------------ refusals
def placed(mesh: Any, placement: Any, *shape: int) -> Any:
    return distribute_tensor(torch.ones(shape or (4, 4)), mesh["tp"], [placement])


def empty(n: int) -> list[torch.Tensor]:
    return [torch.empty(2, 4, device=device()) for _ in range(n)]


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "shards, whole world": (lambda m: all_reduce(placed(m, Shard(0))), ValueError, r"different shards.*'dp'"),
    "shards, own group": (
        lambda m: all_reduce(placed(m, Shard(0)), group=m["tp"].get_group()),
        ValueError,
        r"all_reduce over ranks \[.*mesh dimension 0 \('tp'\).*different shards.*full_tensor\(\)",
    ),
    "broadcast": (lambda m: broadcast(placed(m, Shard(0)).data, src=0), ValueError, "different shards"),
    "partial sums": (
        lambda m: all_reduce(placed(m, Partial()), group=m["tp"].get_group()),
        ValueError,
        r"a partial sum: reduce it with redistribute\(\)",
    ),
    "largest of partial sums": (
        lambda m: all_reduce(placed(m, Partial()), op=ReduceOp.MAX, group=m["dp"].get_group()),
        ValueError,
        r"call redistribute\(\) first",
    ),
    "one of several": (
        lambda m: dist.all_reduce_coalesced([placed(m, Replicate()), placed(m, Shard(0))]),
        ValueError,
        "different shards",
    ),
    "coalescing": (lambda m: _coalesced(placed(m, Shard(0))), ValueError, "different shards"),
    "gathered into DTensors": (
        lambda m: all_gather([placed(m, Shard(0)) for _ in range(4)], placed(m, Shard(0))),
        ValueError,
        "different shards",
    ),
    "uneven shards": (
        lambda m: all_gather(empty(2), placed(m, Shard(0), 3, 4), group=m["tp"].get_group()),
        ValueError,
        "the shards have different sizes",
    ),
    "rows of shards": (
        lambda m: all_gather_into_tensor(placed(m, Shard(0), 8, 4), placed(m, Shard(0)), group=m["dp"].get_group()),
        ValueError,
        r"does not concatenate or split the global tensors. Pass to_local\(\)",
    ),
    "to a rank with another shard": (
        lambda m: send(placed(m, Shard(0)), int(m["tp"].ranks[1 - m.get_local_rank("tp")])),
        ValueError,
        "different shards",
    ),
    "parts of equal values": (
        lambda m: reduce_scatter(
            distribute_tensor(torch.ones(2), m, [Replicate(), Shard(0)]), empty(2), group=m["dp"].get_group()
        ),
        ValueError,
        "would differ between ranks afterwards",
    ),
    "functional": (
        lambda m: functional.all_reduce(placed(m, Replicate()), "sum", m["dp"].get_group()),
        TypeError,
        r"functional collective of torch.*to_local\(\)",
    ),
}


def _coalesced(x: Any) -> None:
    group = dist.group.WORLD
    try:
        with dist._coalescing_manager(group):
            all_reduce(x)
    finally:
        dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)


@on_2_by_2
def refuse(mesh: Any, case: str) -> str:
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=f"(?s){message}") as caught:
        call(mesh)
    return type(caught.value).__name__


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(pool: Any, case: str) -> None:
    """All ranks refuse before communication; otherwise the pool would hang."""
    assert len(set(pool.run(4, refuse, case))) == 1


@on_2_by_2
def shards_of_ranks(mesh: Any) -> None:
    """Shards may be collected from the ranks that hold them, in plain tensors."""
    x = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh["tp"], [Shard(0)])
    parts = [torch.empty(2, 2, device=device()) for _ in range(2)]
    all_gather(parts, x, group=mesh["tp"].get_group())
    assert torch.equal(torch.cat(parts), x.full_tensor())
    whole = torch.empty(4, 2, device=device())
    all_gather_into_tensor(whole, x, group=mesh["tp"].get_group())
    assert torch.equal(whole, x.full_tensor())


def test_shards_of_all_ranks(pool: Any) -> None:
    pool.run(4, shards_of_ranks)


def one_rank_is_outside() -> None:
    """A rank that is not in the group does nothing, as with plain tensors."""
    from hyper_parallel import DeviceMesh

    mesh = DeviceMesh(None, [0, 1, 2, 3], mesh_dim_names=("tp",))
    group = dist.new_group([0])
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    copied = copy.deepcopy(x)
    if dist.get_rank():
        with pytest.warns(UserWarning, match="does not belong to"):
            all_reduce(x, group=group)
    else:
        all_reduce(x, group=group)
    assert torch.equal(x.to_local(), copied.to_local())


def test_outside_the_group(pool: Any) -> None:
    pool.run(4, one_rank_is_outside)
