"""Errors that occur far from their cause: they name the module that caused them, and are equal on all ranks.

Causes are unstyled neighbours, uneven plain shards, embeddings, positional layouts, and classes of other libraries.
"""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    ContextParallel,
    DTensor,
    NoParallel,
    ParameterParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_module,
    distribute_tensor,
    fully_shard,
    parallelize_module,
)
from hyper_parallel.core.lookalikes import import_hint
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.extent import on_ranks


def message_of(job: Any) -> tuple[str, str]:
    """Return type and message of the error of ``job``."""
    try:
        job()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


class Outer:
    """A module that runs its submodules one after the other."""

    def __new__(cls, **modules: Any) -> Any:
        outer = get_adapter().Probe()
        for name, module in modules.items():
            setattr(outer, name, module)
        return outer


# ---------------------------------------------------------------------- a forgotten partner
@spmd.on_mesh()
def forgotten(mesh: Any) -> list[tuple[str, str]]:
    adapter = get_adapter()
    found = []

    def made(module: Any) -> Any:
        return adapter.load(module, np.random.default_rng(0))

    for features in (12, 7):
        x = adapter.tensor(floats(2, 3, 6))
        mlp = parallelize_module(made(adapter.Mlp(6, features)), mesh, {"up": "colwise"})
        found.append(message_of(lambda mlp=mlp, x=x: adapter.call(mlp, x)))
        other = made(
            Outer(
                a=adapter.linear_module(6, features), norm=adapter.norm_module(features), b=adapter.linear_module(6, 6)
            )
        )
        parallelize_module(other, mesh, {"a": ColwiseParallel()})
        found.append(message_of(lambda m=other, x=x: adapter.call(m.norm, adapter.call(m.a, x))))
        table = made(Outer(table=adapter.embedding_module(5, features), after=adapter.linear_module(features, 6)))
        parallelize_module(table, mesh, {"table": ColwiseParallel()})
        ids = adapter.tensor(np.array([[0, 1]]).astype(adapter.TARGET_DTYPE))
        found.append(message_of(lambda m=table, ids=ids: adapter.call(m.after, adapter.call(m.table, ids))))
    gated = made(
        Outer(w1=adapter.linear_module(6, 12), w3=adapter.linear_module(6, 12), w2=adapter.linear_module(12, 6))
    )
    parallelize_module(gated, mesh, {"w[13]": ColwiseParallel()})  # two sources, one partner
    if mesh.size() > 1:
        with pytest.raises(ValueError, match=r"'w2' takes 12 features .* from 'w1'"):
            adapter.call(gated.w2, adapter.call(gated.w3, adapter.tensor(floats(2, 6))))
    # A whole input, a DTensor, and a partner that a second call adds, are fine.
    mlp = parallelize_module(made(adapter.Mlp(6, 12)), mesh, {"up": ColwiseParallel()})
    adapter.call(mlp.down, adapter.tensor(floats(2, 12)))
    pickle.dumps([*getattr(mlp.down, "_forward_pre_hooks", {}).values()])
    y = DTensor.from_local(adapter.call(mlp.up, adapter.tensor(floats(2, 6))), mesh, [Shard(1)])
    found.append(message_of(lambda: adapter.call(mlp.down, y)))
    parallelize_module(mlp, mesh, {"down": RowwiseParallel()})
    adapter.call(mlp, adapter.tensor(floats(2, 6)))
    # Where a rank may have all of the features, none can know that the others do not.
    parallelize_module(adapter.Mlp(6, 1), mesh, {"up": ColwiseParallel()})
    # Cases that need no hook: a gathered output, a partner in the same module, no layer of that size, a style for the
    # model itself.
    for plan in ({"up": "colwise_rep"}, {"up": "colwise", "down": "rowwise"}):
        mlp = made(adapter.Mlp(6, 12))
        adapter.call(parallelize_module(mlp, mesh, plan), adapter.tensor(floats(2, 6)))
    parallelize_module(adapter.linear_module(6, 6), mesh, ColwiseParallel())
    return found


@on_ranks(1, 2, 3)
def test_a_forgotten_partner_is_named(pool: Any, world_size: int) -> None:
    results = pool.run(world_size, forgotten)
    assert all(result[:6] == results[0][:6] for result in results)
    *named, distributed = results[0]
    assert "with this rank's shard" not in distributed[1]
    for i, (kind, message) in enumerate(named):
        if world_size == 1:
            assert kind == "nothing", message
            continue
        path, source = (("down", "up"), ("norm", "a"), ("after", "table"))[i % 3]
        assert kind == "ValueError", message
        for word in (f"'{path}' takes {12 if i < 3 else 7} features", f"from '{source}'", "DeviceMesh("):
            assert word in message, message
        assert "RowwiseParallel()" in message and "output_layouts=Replicate()" in message


# ---------------------------------------------------------------------- layers that no plan can cut
def recurrent(suffix: str, features: int = 6) -> Any:
    """Return a module with the parameter names of a recurrent layer or cell."""
    # Not a projection itself: other tests register its class as one of linear layers.
    module, kernel = Outer(), get_adapter().Projection(8, features).kernel
    module.hidden_size = 2
    for name in ("weight_ih", "weight_hh"):
        setattr(module, f"{name}{suffix}", copy.deepcopy(kernel))
    return module


@spmd.on_mesh()
def whole_layers(mesh: Any) -> None:
    adapter, fused = get_adapter(), Outer(out_proj=get_adapter().linear_module(12, 12))
    fused.in_proj_weight, fused.embed_dim = None, 12
    model = Outer(a=adapter.linear_module(6, 12), attention=fused)
    with fails(ValueError, "RowwiseParallel for 'attention.out_proj'", "'attention' reads the weight", "NoParallel()"):
        parallelize_module(model, mesh, {"attention.out_proj": RowwiseParallel()})
    with fails(ValueError, "'attention' is a ", "use NoParallel() to compute the module in full"):
        parallelize_module(model, mesh, {"attention": ColwiseParallel()})
    with fails(ValueError, "SequenceParallel for 'attention'", "each position needs all", "NoParallel(input_layout="):
        parallelize_module(model, mesh, {"attention": SequenceParallel()})
    for suffix, styles in (
        ("", (SequenceParallel(), ContextParallel())),
        ("_l0", (SequenceParallel(), ParameterParallel({"weight_hh_l0": Shard(0)}))),
    ):
        for style in styles:
            steps = recurrent(suffix)
            with fails(ValueError, f"{type(style).__name__} for 'steps'", "each step needs", "use NoParallel("):
                parallelize_module(Outer(steps=steps), mesh, {"steps": style})
        with fails(ValueError, "'steps' is a ", "use NoParallel() to compute the module in full"):
            parallelize_module(Outer(steps=recurrent(suffix)), mesh, {"steps": ColwiseParallel()})
    steps = recurrent("_l0")
    steps.inner = adapter.norm_module(6)
    with fails(ValueError, "ColwiseParallel for 'steps.inner'", "use NoParallel() for 'steps'"):
        parallelize_module(Outer(steps=steps), mesh, {"steps.inner": ColwiseParallel()})
    steps.inner = adapter.linear_module(6, 6)  # which the layer may call
    parallelize_module(Outer(steps=steps), mesh, {"steps.inner": ColwiseParallel()})
    model = adapter.load(Outer(a=adapter.linear_module(6, 12), steps=recurrent("_l0", 12)), np.random.default_rng(0))
    parallelize_module(model, mesh, {"a": ColwiseParallel()})
    with fails(ValueError, "'steps' takes 12 features", "shard of these features from 'a'"):
        adapter.call(model.steps, adapter.call(model.a, adapter.tensor(floats(2, 6))))
    # A packed projection whose parts a layer without a style would take.
    packed = {"qkv": adapter.linear_module(6, 36), "o": adapter.linear_module(12, 6)}
    with fails(ValueError, "'qkv' has 36 output features", "Write ColwiseParallel(packed=3)", "such as 'o', Row"):
        parallelize_module(Outer(**packed), mesh, {"qkv": ColwiseParallel()})
    model = parallelize_module(Outer(**packed), mesh, {"qkv": ColwiseParallel(packed=3)})
    with fails(ValueError, "'o' takes 12 features", "features from 'qkv'", "use RowwiseParallel()"):
        adapter.call(model.o, adapter.chunk(adapter.call(model.qkv, adapter.tensor(floats(2, 6))), 3, -1)[0])
    with fails(ValueError, "name its linear layers in the plan, such as 'mlp.up'"):
        parallelize_module(Outer(mlp=adapter.Mlp(6, 12)), mesh, {"mlp": ColwiseParallel()})
    # A layer that says how many features it takes, and has parameters of its own.
    taker = adapter.embedding_module(5, 3)
    taker.input_size = 12
    model = adapter.load(Outer(a=adapter.linear_module(6, 12), recurrent=taker), np.random.default_rng(0))
    parallelize_module(model, mesh, {"a": ColwiseParallel()})
    y = adapter.call(model.a, adapter.tensor(floats(2, 6)))
    with fails(ValueError, "'recurrent' takes 12 features", "from 'a'", "use ColwiseParallel(output_layouts="):
        adapter.call(model.recurrent, y)


@on_ranks(2)
def test_layers_that_are_computed_whole(pool: Any, world_size: int) -> None:
    pool.run(world_size, whole_layers)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def positions(mesh: Any) -> None:
    """Check learned positions in a distributed batch under sequence parallelism: each message has the right remedy."""
    adapter = get_adapter()
    ids = adapter.tensor((np.arange(16) % 5).reshape(4, 4).astype(adapter.TARGET_DTYPE))
    batch = distribute_tensor(ids, mesh["dp"], [Shard(0)])
    rows = {"input_layouts": Replicate(), "output_layouts": Shard(1)}

    def made(units: tuple[str, ...], **styles: Any) -> Any:
        model = Outer(
            tokens=adapter.embedding_module(5, 6), positions=adapter.embedding_module(8, 6), norm=adapter.norm_module(6)
        )
        model = parallelize_module(adapter.load(model, np.random.default_rng(0)), mesh["tp"], styles)
        for name in units:
            fully_shard(getattr(model, name), mesh=mesh["dp"])
        return model

    model = made(("tokens",), tokens=RowwiseParallel(**rows))
    x = adapter.call(model.tokens, batch)
    with fails(ValueError, " of 'positions', shape (8, 6)", "NoParallel(use_local_output=False)"):
        adapter.call(model.positions, batch)
    distribute_module(model.positions, mesh["dp"])
    with fails(ValueError, "(argument 'ids', shape ", " of 'positions', global shape", "on the mesh of the batch"):
        adapter.call(model.positions, ids)
    y = adapter.call(model.positions, batch)
    with fails(ValueError, "(4, 2, 6) and (4, 4, 6)", "output_layouts=Shard(1)", "RowwiseParallel(input_layouts="):
        x + y
    model = made(
        ("tokens", "positions", "norm"),
        tokens=RowwiseParallel(**rows),
        positions=RowwiseParallel(**rows),
        norm=SequenceParallel(use_local_output=False),
    )
    x = adapter.call(model.tokens, batch) + adapter.call(model.positions, batch)
    y = adapter.call(model.norm, x)
    with fails(ValueError, "different meshes", "Use the same use_local_output", "NoParallel(use_local_output=False)"):
        x + y


def test_learned_positions_in_a_distributed_batch(pool: Any) -> None:
    pool.run(4, positions)


# ---------------------------------------------------------------------- uneven plain shards
@spmd.on_mesh()
def uneven(mesh: Any) -> dict[str, tuple[str, str]]:
    adapter, rank, ranks = get_adapter(), mesh.get_local_rank(), mesh.size()

    def model(**styles: Any) -> Any:
        return parallelize_module(adapter.load(adapter.Mlp(6, 12), np.random.default_rng(0)), mesh, styles)

    def cut(length: int) -> Any:
        """Return this rank's shard of a sequence, sliced by hand."""
        parts = np.array_split(floats(2, length, 6), ranks, axis=1)
        return adapter.tensor(np.ascontiguousarray(parts[rank]))

    norm = Outer(norm=adapter.norm_module(6))
    parallelize_module(norm, mesh, {"norm": SequenceParallel(use_local_output=True)})
    column = model(up=ColwiseParallel(input_layouts=Shard(1)), down=RowwiseParallel(output_layouts=Shard(1)))
    probe = Outer(probe=adapter.Probe())
    probe = parallelize_module(
        probe, mesh, {"probe": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())}
    )
    gathered = Outer(probe=adapter.Probe())
    style = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    parallelize_module(gathered, mesh, {"probe": style})
    router = parallelize_module(
        Outer(gate=adapter.linear_module(6, 6)), mesh, {"gate": NoParallel(input_layout=Shard(1))}
    )
    held = ParameterParallel({"kernel": Shard(0)}, input_layouts=Shard(1), output_layouts=Replicate())
    held = parallelize_module(Outer(held=adapter.Projection(6, 6)), mesh, {"held": held})
    length = 2 * ranks + 1
    found = {
        "norm": message_of(lambda: adapter.call(norm.norm, cut(length))),
        "column": message_of(lambda: adapter.call(column, cut(length))),
        "prepared input": message_of(lambda: adapter.call(probe.probe, cut(length))),
        "prepared output": message_of(lambda: adapter.call(gathered.probe, cut(length))),
        "replicated": message_of(lambda: adapter.call(router.gate, cut(length))),
        "parameters": message_of(lambda: adapter.call(held.held, cut(length))),
    }
    # Where the first call is even and a later one is not: an earlier output tells.
    even = cut(2 * ranks)
    for _ in range(2):
        adapter.call(norm.norm, even)
        adapter.call(column, even)
    whole = DTensor.from_local(adapter.tensor(floats(2, length, 6)), mesh).redistribute(placements=[Shard(1)])
    given = model(down=RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)))
    part = adapter.call(given.down, adapter.tensor(floats(2, length, 12)))
    ids = adapter.tensor(np.zeros((2, length), adapter.TARGET_DTYPE))
    for use_local_output in (True, False):
        table = Outer(table=adapter.embedding_module(8, 6))
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=use_local_output)
        parallelize_module(table, mesh, {"table": style})
        assert isinstance(adapter.call(table.table, ids), DTensor) != use_local_output
    found["after a local output"] = message_of(lambda: adapter.call(norm.norm, part))
    found["but another input"] = message_of(lambda: adapter.call(column, part))
    adapter.call(norm.norm, whole)
    adapter.call(norm.norm, even)
    adapter.call(column, even)
    return found


@on_ranks(1, 2, 3)
def test_uneven_plain_shards_are_refused(pool: Any, world_size: int) -> None:
    results = pool.run(world_size, uneven)
    assert all(result == results[0] for result in results)
    paths = {
        "norm": "'norm'", "column": "'up'", "prepared input": "'probe'", "prepared output": "'probe'",
        "replicated": "'gate'", "parameters": "'held'", "after a local output": "'norm'", "but another input": "'up'",
    }  # fmt: skip
    for case, path in paths.items():
        kind, message = results[0][case]
        if world_size == 1:
            assert kind == "nothing", message
            continue
        assert kind == "RankMismatchError", f"{case}: {message}"
        for word in (path, "Shard(dim=1)", "is plain", "use_local_output=False", "shape=", f"all {world_size} ranks"):
            assert word in message, f"{case}: {message}"


# ---------------------------------------------------------------------- embeddings, layouts by position, lookalikes
@spmd.on_mesh()
def refused(mesh: Any) -> None:
    adapter = get_adapter()
    for style in (RowwiseParallel(), "rowwise", ColwiseParallel(input_layouts=Shard(-1))):
        with fails(ValueError, "'table' is an embedding", "input_layouts=Replicate()", "Shard(1)", str(mesh)):
            parallelize_module(Outer(table=adapter.embedding_module(8, 4)), mesh, {"table": style})
    theirs = type("Shard", (), {"__module__": "other.placements", "__repr__": lambda self: "Shard(dim=1)"})()
    whose = ("Shard of other.placements", "`from hyper_parallel import Shard`")
    x = adapter.tensor(floats(4, 6))
    with fails(TypeError, *whose):
        distribute_tensor(x, mesh, [theirs])
    with fails(TypeError, "must be a sequence", *whose):
        distribute_tensor(x, mesh, theirs)
    with fails(TypeError, *whose):
        DTensor.from_local(x, mesh, [theirs])
    with fails(TypeError, *whose):
        DTensor.from_local(x, mesh).redistribute(placements=[theirs])
    with fails(TypeError, "must be a sequence", *whose):
        DTensor.from_local(x, mesh).redistribute(placements=theirs)
    for keyword in ("input_layouts", "output_layouts"):
        with fails(TypeError, f"ColwiseParallel({keyword}=...)", *whose):
            ColwiseParallel(**{keyword: theirs})
    derived = type("_CutShard", (type(theirs),), {"__module__": "other.private"})()
    with fails(TypeError, *whose):
        distribute_tensor(x, mesh, [derived])
    style = type("ColwiseParallel", (), {"__module__": "other.styles"})
    for given in (style, style()):
        with fails(
            TypeError, "'up'", "neither a ParallelStyle", "ColwiseParallel of other.styles", "import ColwiseParallel`"
        ):
            parallelize_module(adapter.Mlp(4, 8), mesh, {"up": given})
        with fails(TypeError, "parallelize_plan", "ColwiseParallel of other.styles"):
            parallelize_module(adapter.Mlp(4, 8), mesh, given)
    with fails(TypeError, "other.meshes.DeviceMesh", "import DeviceMesh`"):
        parallelize_module(adapter.Mlp(4, 8), type("DeviceMesh", (), {"__module__": "other.meshes"})(), {})


@on_ranks(1, 2)
def test_refused_before_anything_is_done(pool: Any, world_size: int) -> None:
    pool.run(world_size, refused)


def test_layouts_by_position() -> None:
    for style in (ColwiseParallel, RowwiseParallel, SequenceParallel, NoParallel, PrepareModuleInput):
        with pytest.raises(TypeError, match=rf"^{style.__name__} takes .* by keyword, got Shard\(dim=1\) by position"):
            style(Shard(1))  # type: ignore[misc]
    assert ParameterParallel({"w": Shard(0)}).placements == {"w": Shard(0)}
    assert repr(copy.deepcopy(RowwiseParallel())) == repr(pickle.loads(pickle.dumps(RowwiseParallel())))
    assert import_hint(Shard(0)) == import_hint(Shard) == import_hint("x") == ""


# ---------------------------------------------------------------------- losses of plain parts of the classes
@spmd.on_mesh()
def part_of_classes(mesh: Any) -> None:
    adapter = get_adapter()
    model = Outer(head=adapter.linear_module(4, 11))
    parallelize_module(model, mesh, {"head": ColwiseParallel()})
    targets = adapter.tensor(np.array([0, 10, 3]).astype(adapter.TARGET_DTYPE))
    logits = adapter.call(model.head, adapter.tensor(floats(3, 4)))
    own = logits.shape[-1]
    with fails(ValueError, f"{own} classes", "shard of the 11", "'head'", "loss_parallel()", "use_local_output=False"):
        adapter.cross_entropy(logits, targets)
    assert np.isfinite(adapter.numpy(adapter.cross_entropy(adapter.tensor(floats(3, 11)), targets))), "all classes"
    del model
    gc.collect()
    loss = adapter.cross_entropy(adapter.tensor(floats(3, own)), adapter.tensor(np.zeros(3, adapter.TARGET_DTYPE)))
    assert np.isfinite(adapter.numpy(loss)), "the head is gone"


@on_ranks(2, 3)
def test_a_part_of_the_classes_is_no_logits(pool: Any, world_size: int) -> None:
    pool.run(world_size, part_of_classes)
