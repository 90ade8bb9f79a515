"""torch's own `fully_shard` on parallelised models: unmodified, and as on a single device."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.tensor.parallel as of_torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils.checkpoint import checkpoint

import hyper_parallel
from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    Replicate,
    RowwiseParallel,
    coalesce_gradients,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.communication.recorder import LISTENERS
from hyper_parallel.core.tensor_parallel.styles.weight import WeightParallel
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.decoder import UNEVEN, Decoder, Sizes, batch, plan
from tests.torch.decoder import decoder as decoder_of
from tests.torch.support import close, device

on_2_by_2 = on_mesh(2, 2, names=("dp", "tp"))
SIZES = {"even": Sizes(), "uneven": UNEVEN}


def real() -> torch.dtype:
    """HCCL reduces no double precision."""
    return torch.float32 if device().type == "npu" else torch.float64


def decoder(sizes: Sizes = SIZES["even"], **options: Any) -> Decoder:
    return decoder_of(sizes, real(), **options)


def tensor_parallel(lib: Any) -> dict[str, Any]:
    """Tensor parallelism without sequence parallelism: norms stay plain."""
    whole = lib.Replicate()
    return {
        "embedding": lib.RowwiseParallel(input_layouts=whole),
        "block.attention.w[qkv]": lib.ColwiseParallel(),
        "block.attention.wo": lib.RowwiseParallel(),
        "block.feed_forward.gate": lib.ColwiseParallel(),
        "block.feed_forward.up": lib.ColwiseParallel(),
        "block.feed_forward.down": lib.RowwiseParallel(),
        "head": lib.ColwiseParallel(output_layouts=whole),
    }


#: torch's own names, for `plan`.
TORCH: Any = SimpleNamespace(**{**vars(of_torch), **vars(torch.distributed.tensor)})
PLANS = {"tp": tensor_parallel, "sp": plan}


def whole(x: Any) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, (DTensor, TorchDTensor)) else x).detach()


def sharded(model: Any, mesh: Any, **options: Any) -> Any:
    """Shard blocks and root over the data-parallel dimension, given as torch's mesh."""
    data = mesh.to_torch()
    fully_shard(model.block, mesh=data, **options)
    return fully_shard(model, mesh=data, **options)


def same(model: Any, single: Any, what: Callable[[Any], Any], tolerance: float = 1e-5) -> None:
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        got, wanted = what(p), what(q)
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            exact(whole(got), wanted, name, tolerance)


def exact(got: Any, wanted: torch.Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Compare to 1e-10 in double precision, which not every device has."""
    close(got, wanted, what, 1e-10 if wanted.dtype == torch.float64 else tolerance)


def train(
    model: Any,
    single: Any,
    rank: int,
    sizes: Sizes,
    count: int = 2,
    clip: float | None = None,
    around: Any = contextlib.nullcontext,
) -> None:
    """Two steps of AdamW. Each of ``count`` ranks has a batch of its own, and the single device all of them."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (single, model)]
    for step in range(2):
        parts = [batch(sizes, count * step + i) for i in range(count)]
        losses = [single(*part) for part in parts]
        (torch.stack(losses).mean()).backward()
        loss = model(*parts[rank])
        exact(whole(loss), losses[rank], "loss")
        with around():
            loss.backward()
        same(model, single, lambda p: p.grad)
        if clip is not None:
            wanted = nn.utils.clip_grad_norm_(single.parameters(), clip)
            exact(whole(nn.utils.clip_grad_norm_(model.parameters(), clip)), wanted, "norm")
            same(model, single, lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # In single precision, AdamW makes rounding errors of small gradients large.
    same(model, single, lambda p: p, 2e-4)


# ------------------------------------------------------------------------------------------------ right
@on_2_by_2
def trained(mesh: Any, kind: str, sizes: str) -> None:
    for reshard in (True, False):
        single = decoder(SIZES[sizes])
        model = parallelize_module(decoder(SIZES[sizes]), mesh["tp"], PLANS[kind](hyper_parallel))
        sharded(model, mesh["dp"], reshard_after_forward=reshard)
        train(model, single, mesh.get_local_rank("dp"), SIZES[sizes], clip=0.3)


@pytest.mark.parametrize("sizes", in_gate(SIZES, ("uneven",)))
@pytest.mark.parametrize("kind", PLANS)
def test_two_steps(pool: Any, kind: str, sizes: str) -> None:
    """Losses, gradients, norms of gradients on several meshes, and parameters, with and without resharding."""
    pool.run(4, trained, kind, sizes)


@on_2_by_2
def placed(mesh: Any) -> None:
    ours = sharded(parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel)), mesh["dp"])
    theirs = of_torch.parallelize_module(decoder(), mesh["tp"].to_torch(), plan(TORCH))
    for name, p in sharded(theirs, mesh["dp"]).named_parameters():
        q = ours.get_parameter(name)
        assert type(q.data) is TorchDTensor and q.placements == p.placements and q.device_mesh == p.device_mesh, name
        assert torch.equal(q.to_local(), p.to_local()), name
    assert repr(ours.head.weight.placements) == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    groups = [ours.head.weight.device_mesh.get_group(name) for name in ("dp", "tp")]
    assert groups == [mesh.get_group("dp"), mesh.get_group("tp")]


def test_placements_are_those_of_torch(pool: Any) -> None:
    """The placements and shards are those of torch's styles and its `fully_shard`, on the existing groups."""
    pool.run(4, placed)


@on_2_by_2
def short(mesh: Any) -> None:
    model = parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel))
    planned = model.block.attention.wq.weight._layout
    found, general = [], WeightParallel.prepare_input
    for step in range(4):
        if step == 2:
            model.zero_grad()
            sharded(model, mesh["dp"])
        with mock.patch.object(WeightParallel, "prepare_input", autospec=True, side_effect=general) as prepare:
            model(*batch(Sizes(), step)).backward()
        # The collectives of the library: a `CommDebugMode` counts those of torch's `fully_shard` too.
        sent: list[Any] = []
        LISTENERS.append(sent.append)
        try:
            model(*batch(Sizes(), step)).backward()
        finally:
            LISTENERS.remove(sent.append)
        found.append((prepare.call_count, Counter(event.kind for event in sent)))
    assert found[1] == found[2] == found[3], found
    seen: list[Any] = []
    model.block.attention.wq.register_forward_hook(lambda module, args, y: seen.append(module.weight))
    for step in range(2):
        model(*batch(Sizes(), step))
    assert seen[0] is seen[1] and isinstance(seen[0], DTensor) and seen[0]._layout is planned
    assert seen[0].untyped_storage().nbytes() == 0, "its memory is that of the gathered buffer, which torch frees"


def test_short_forwards_stay(pool: Any) -> None:
    """Modules find the parameters that their styles distributed, and communicate over tp as without `fully_shard`."""
    pool.run(4, short)


class Tied(nn.Module):
    """Rows that are looked up, a layer that is frozen, and the same rows as the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 6)
        self.block = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.block[0].weight.requires_grad = False

    def forward(self, ids: Any, targets: Any) -> Any:
        logits = self.head(self.block(self.embedding(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


TIED = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "block.0": ColwiseParallel(),
    "block.2": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


@on_2_by_2
def tied_and_frozen(mesh: Any) -> None:
    single = Tied().to(device(), real())
    model = sharded(parallelize_module(copy.deepcopy(single), mesh["tp"], TIED), mesh["dp"])
    assert model.embedding.weight is model.head.weight
    train(model, single, mesh.get_local_rank("dp"), Sizes(vocabulary=7))


def test_tied_and_frozen(pool: Any) -> None:
    pool.run(4, tied_and_frozen)


@on_2_by_2
def recomputed(mesh: Any, reentrant: bool) -> None:
    single = decoder()
    wrap = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)  # noqa: E731
    model = parallelize_module(decoder(wrap=wrap), mesh["tp"], plan(hyper_parallel))
    train(sharded(model, mesh["dp"]), single, mesh.get_local_rank("dp"), Sizes())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(pool: Any, reentrant: bool) -> None:
    pool.run(4, recomputed, reentrant)


@on_2_by_2
def mixed(mesh: Any) -> None:
    """bfloat16 rounds; both libraries round at the same places."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [
        parallelize_module(decoder_of(dtype=torch.float32), mesh["tp"], plan(hyper_parallel)),
        of_torch.parallelize_module(decoder_of(dtype=torch.float32), mesh["tp"].to_torch(), plan(TORCH)),
    ]
    for step in range(2):
        for model in models:
            if not step:
                sharded(model, mesh["dp"], mp_policy=policy)
            model(*batch(Sizes(), 2 * step + mesh.get_local_rank("dp"))).backward()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        got, wanted = whole(p.grad), whole(q.grad)
        assert (got - wanted).norm() < 0.03 * wanted.norm(), name


def test_mixed_precision(pool: Any) -> None:
    pool.run(4, mixed)


@on_2_by_2
def accumulated(mesh: Any) -> None:
    single, rank = decoder(), mesh.get_local_rank("dp")
    model = sharded(parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel)), mesh["dp"])
    for step in range(3):
        parts = [batch(Sizes(), 2 * step + i) for i in range(2)]
        torch.stack([single(*part) for part in parts]).mean().backward()
        model.set_requires_gradient_sync(step == 2)
        model(*parts[rank]).backward()
    same(model, single, lambda p: p.grad)


def test_accumulation_without_communication(pool: Any) -> None:
    pool.run(4, accumulated)


@on_2_by_2
def coalesced(mesh: Any) -> None:
    single = decoder()
    model = sharded(parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel)), mesh["dp"])
    train(model, single, mesh.get_local_rank("dp"), Sizes(), around=coalesce_gradients)


def test_inside_coalesce_gradients(pool: Any) -> None:
    """Torch reads gradients in backward, so none of its parameters waits for the end of the block."""
    pool.run(4, coalesced)


@on_mesh(2, 1, 2, names=("dp_replicate", "dp_shard", "tp"))
def replicated_and_sharded(mesh: Any) -> None:
    single = decoder()
    model = parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel))
    sharded(model, mesh["dp_replicate", "dp_shard"])
    assert len(model.head.weight.placements) == 3
    train(model, single, mesh.get_local_rank("dp_replicate"), Sizes(), clip=0.3)


@on_mesh(1, 2, 2, names=("dp_replicate", "dp_shard", "tp"))
def replicated_by_one(mesh: Any) -> None:
    single = decoder(UNEVEN)
    model = parallelize_module(decoder(UNEVEN), mesh["tp"], plan(hyper_parallel))
    sharded(model, mesh["dp_replicate", "dp_shard"])
    train(model, single, mesh.get_local_rank("dp_shard"), UNEVEN)


@pytest.mark.parametrize("job", in_gate([replicated_and_sharded, replicated_by_one], [replicated_and_sharded]))
def test_hybrid(pool: Any, job: Any) -> None:
    pool.run(4, job)


@on_2_by_2
def replicated(mesh: Any) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    single = decoder()
    model = parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel))
    replicate(model.block, mesh=mesh["dp"].to_torch())
    replicate(model, mesh=mesh["dp"].to_torch())
    train(model, single, mesh.get_local_rank("dp"), Sizes())


def test_replicate_like_fully_shard(pool: Any) -> None:
    pool.run(4, replicated)


@on_2_by_2
def own_mesh(mesh: Any) -> None:
    single = decoder()
    model = parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel))
    fully_shard(model.block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert isinstance(model.norm.weight.device_mesh, type(mesh.to_torch()))
    train(model, single, mesh.get_local_rank("dp"), Sizes())


def test_mesh_of_this_library(pool: Any) -> None:
    """Nothing changes in a program but where its names come from."""
    pool.run(4, own_mesh)


@on_2_by_2
def meshes_of_torch(mesh: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

    # By names that no other test has: of equal meshes, the first one is taken, with its groups.
    theirs = init_torch_mesh(device().type, (2, 2), mesh_dim_names=("their rows", "their columns"))
    single = decoder()
    ours = DeviceMesh.from_torch(theirs)
    model = parallelize_module(decoder(), ours["their columns"], plan(hyper_parallel))
    fully_shard(model.block, mesh=theirs["their rows"])
    fully_shard(model, mesh=theirs["their rows"])
    assert model.head.weight.device_mesh.get_group("their columns") is theirs.get_group("their columns")
    train(model, single, theirs.get_local_rank("their rows"), Sizes())


def test_meshes_of_torch(pool: Any) -> None:
    """A program that makes its mesh with torch."""
    pool.run(4, meshes_of_torch)


@on_2_by_2
def state_dicts(mesh: Any) -> None:
    from torch.distributed.checkpoint import state_dict as helpers

    single = decoder()
    model = sharded(parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel)), mesh["dp"])
    state = model.state_dict()
    assert list(state) == list(single.state_dict())
    with torch.no_grad():
        kept = {name: p.clone() for name, p in state.items()}
        for p in model.parameters():
            p.mul_(0)
    model.load_state_dict(kept)
    same(model, single, lambda p: p)
    options = helpers.StateDictOptions(full_state_dict=True)
    for name, value in helpers.get_model_state_dict(model, options=options).items():
        close(value, single.state_dict()[name], name)
    doubled = {name: 2 * value for name, value in single.state_dict().items()}
    helpers.set_model_state_dict(model, dict(doubled), options=options)
    single.load_state_dict(doubled)
    train(model, single, mesh.get_local_rank("dp"), Sizes())


def test_state_dicts(pool: Any) -> None:
    pool.run(4, state_dicts)


@on_2_by_2
def checkpointed(mesh: Any, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    single = decoder()
    model = sharded(parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel)), mesh["dp"])
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    train(model, single, mesh.get_local_rank("dp"), Sizes())


def test_distributed_checkpoint(pool: Any, tmp_path: Path) -> None:
    pool.run(4, checkpointed, str(tmp_path / "checkpoint"))


@on_2_by_2
def by_columns(mesh: Any) -> None:
    single = decoder()
    model = parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel))
    up, down = model.block.feed_forward.up.weight, model.block.feed_forward.down.weight
    column = torch.distributed.tensor.Shard(1)
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: column if p is up or p is down else None)
    feed_forward = model.block.feed_forward
    assert repr(feed_forward.up.weight.placements) == "(Shard(dim=1), Shard(dim=0))"
    assert repr(feed_forward.down.weight.placements) == "(_StridedShard(dim=1, sf=2), Shard(dim=1))"
    train(model, single, mesh.get_local_rank("dp"), Sizes())


def test_another_dimension(pool: Any) -> None:
    """A function that chooses the dimension to shard gets the parameters of the model."""
    pool.run(4, by_columns)


@on_2_by_2
def from_meta(mesh: Any) -> None:
    single = decoder()
    with torch.device("meta"):
        model = Decoder().to(real())
    parallelize_module(model, mesh["tp"], plan(hyper_parallel))
    sharded(model, mesh["dp"])
    model.to_empty(device=device())
    with torch.no_grad():
        for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            assert isinstance(p, TorchDTensor), name
            p.copy_(torch.distributed.tensor.distribute_tensor(q, p.device_mesh, p.placements))
    train(model, single, mesh.get_local_rank("dp"), Sizes())


def test_models_made_on_meta(pool: Any) -> None:
    pool.run(4, from_meta)


@on_2_by_2
def unsharded(mesh: Any) -> None:
    model = sharded(parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel)), mesh["dp"])
    x = torch.ones(2, 8, dtype=real(), device=device())
    with pytest.raises(ValueError, match=r"(?s)'weight' of Linear 'block.attention.wq' is torch's own.*unshard\(\)"):
        model.block.attention.wq(x)
    model.block.unshard()
    weight: Any = model.block.attention.wq.weight
    assert isinstance(weight, DTensor) and not isinstance(weight, TorchDTensor)
    close(weight.full_tensor(), decoder().block.attention.wq.weight)
    close(model.block.attention.wq(x), nn.functional.linear(x, weight.to_local()))
    model.block.reshard()


def test_layers_called_alone(pool: Any) -> None:
    """Inside a unit: refused while its parameters are sharded."""
    pool.run(4, unsharded)


# ------------------------------------------------------------------------------------------------ refused
def packed(mesh: Any) -> None:
    plan = {"block.feed_forward.up": ColwiseParallel(packed=2)}
    fully_shard(parallelize_module(decoder(), mesh["tp"], plan), mesh=mesh["dp"].to_torch())


def same_dimension(mesh: Any) -> None:
    fully_shard(parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel)), mesh=mesh["tp"].to_torch())


def whole_mesh(mesh: Any) -> None:
    fully_shard(parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel)), mesh=mesh.to_torch())


def other_mesh(mesh: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

    data = init_torch_mesh(device().type, (4,), mesh_dim_names=("dp",))
    fully_shard(parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel)), mesh=data)


def without_root(mesh: Any) -> None:
    alone = init_device_mesh(None, (2,), mesh_dim_names=("tp",))
    if alone.get_coordinate() is None:
        raise ValueError("fully_shard: parameter of another mesh use dimensions of one mesh for fully_shard")
    model = parallelize_module(decoder(), alone, {"block.feed_forward.up": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"].to_torch())


def two_units(mesh: Any) -> None:
    model = parallelize_module(Tied().to(device()), mesh["tp"], TIED)
    fully_shard(model.embedding, mesh=mesh["dp"].to_torch())
    fully_shard(model, mesh=mesh["dp"].to_torch())


def some_ranks(mesh: Any) -> None:
    from torch.distributed.fsdp import DataParallelMeshDims

    model = parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel))
    fully_shard(model, mesh=mesh.to_torch(), dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def sharded_here(mesh: Any) -> None:
    model = parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel))
    hyper_parallel.fully_shard(model.block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def sharded_there(mesh: Any) -> None:
    model = parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel))
    fully_shard(model.block, mesh=mesh["dp"])
    hyper_parallel.fully_shard(model, mesh=mesh["dp"])


def after(mesh: Any) -> None:
    model = fully_shard(decoder(), mesh=mesh["dp"].to_torch())
    parallelize_module(model, mesh["tp"], plan(hyper_parallel))


REFUSED: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (packed, ValueError, r"parameter 'block.feed_forward.up.weight'.*no counterpart of PackedShard.*redistribute"),
    (same_dimension, ValueError, r"'embedding.weight'.* shares the ranks \[\d, \d\] with .*mesh=mesh\['dp'\]"),
    (whole_mesh, ValueError, r"'embedding.weight'.* shares the ranks .*mesh=mesh\['dp'\].to_torch\(\)"),
    (other_mesh, ValueError, r"belongs to another mesh.*mesh=mesh\['dp'\].to_torch\(\)"),
    (without_root, ValueError, r"another mesh.*use dimensions of one mesh for fully_shard"),
    (two_units, ValueError, r"'head.weight'.*belongs to another unit already.*fully_shard\(\[module, other\]\)"),
    (some_ranks, ValueError, r"dp_mesh_dims.*mesh=mesh\['dp'\].to_torch\(\)"),
    (sharded_here, ValueError, r"shares the ranks.*If hyper_parallel's fully_shard has sharded the parameter already"),
    (sharded_there, TypeError, r"'block\..*torch's own DTensor"),
    (after, TypeError, r"torch's own DTensor.*Apply parallelize_module before torch's fully_shard"),
]


@on_2_by_2
def refuse(mesh: Any, name: str) -> None:
    call, error, message = next(case for case in REFUSED if case[0].__name__ == name)
    with pytest.raises(error, match=f"(?s){message}"):
        call(mesh)


@pytest.mark.parametrize("name", [case[0].__name__ for case in REFUSED])
def test_refusals(pool: Any, name: str) -> None:
    """Refused on all ranks, before anything is communicated: the pool would hang otherwise."""
    pool.run(4, refuse, name)


@on_mesh(4, 1, names=("dp", "tp"))
def resharded_to_some(mesh: Any) -> None:
    model = parallelize_module(decoder(), mesh["tp"], plan(hyper_parallel))
    with pytest.raises(ValueError, match="reshard_after_forward=True or False"):
        fully_shard(model, mesh=mesh["dp"].to_torch(), reshard_after_forward=2)


def test_resharding_to_some_ranks_is_refused(pool: Any) -> None:
    """Torch itself says so in the first forward, after it has communicated."""
    pool.run(4, resharded_to_some)
