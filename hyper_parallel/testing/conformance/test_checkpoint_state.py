"""Contents of a checkpoint other than matching models: values, single tensors, parts of a state, and mismatches."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    PackedShard,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    fully_shard,
    get_platform,
    parallelize_module,
)
from hyper_parallel.checkpoint import CheckpointError, RandomState, async_save, disk, latest, load, save
from hyper_parallel.checkpoint.index import read_index
from hyper_parallel.checkpoint.ranks import Collective
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.extent import on_ranks

WORLD_SIZES = [1, 2, 4]


class fails:
    """Context manager whose block must raise this class with all these words on every rank."""

    def __init__(self, kind: type[Exception], *words: str) -> None:
        self.kind, self.words = kind, words

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        assert error is not None, f"no {self.kind.__name__} was raised"
        if type(error) is not self.kind:
            return False
        missing = [word for word in self.words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
        return True


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 97).astype(dtype)


@spmd.on_mesh()
def values(mesh: Any, directory: str) -> None:
    """Check that numbers, strings and containers of them are loaded with their types."""
    adapter = get_adapter()
    nest = {
        "int": 3,
        "large": 2**70,
        "float": 0.1,
        "nan": float("nan"),
        "infinite": [float("inf"), -float("inf")],
        "text": "Grüße\n\x00",
        "none": None,
        "bool": True,
        "bytes": b"\x00\xff",
        "tuple": (1, (2, "x"), [3]),
        "empty": [{}, [], ()],
        "scalar": np.float32(1.5),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "keys": {1: "one", None: "none", (b"x", 2): "tuple", "$": "no kind"},
        "$": {"$": "tuple", "items": []},
        "tensors": [adapter.tensor(array(3)), {"deep": (adapter.tensor(array(2, 2)),)}],
    }
    path = save(nest, f"{directory}/values", mesh=mesh)
    got = load({**dict.fromkeys(nest), "tensors": [adapter.tensor(array(3) * 0), {"deep": None}]}, path, mesh=mesh)
    assert repr({k: v for k, v in got.items() if k != "tensors"}) == repr(
        {k: v for k, v in nest.items() if k != "tensors"}
    )
    assert type(got["scalar"]) is np.float32 and got["array"].dtype == np.int16 and got["array"].flags.writeable
    # A tensor in a place without one is a new one.
    for x, wanted in ((got["tensors"][0], array(3)), (got["tensors"][1]["deep"][0], array(2, 2))):
        assert (adapter.numpy(x) == wanted).all()
    # A part of the saved state, and a nest of another form.
    assert load({"tuple": None}, path, mesh=mesh) == {"tuple": (1, (2, "x"), [3])}
    assert load({"tuple": [7]}, path, mesh=mesh) == {"tuple": (1, (2, "x"), [3])}
    with fails(ValueError, "missing: nothing", "missing: flot (the checkpoint has 'float')"):
        load({"nothing": 1, "flot": 2}, path, mesh=mesh)
    assert load({"nothing": 1, "int": 2}, path, mesh=mesh, strict=False) == {"nothing": 1, "int": 3}
    x = adapter.tensor(array(1))
    for wrong in ({"int": {"a": x}}, {"tensors": [x]}, {"tuple": (x, x)}):
        with fails(ValueError, "of the state cannot be filled: the checkpoint has a value of another kind"):
            load(wrong, path, mesh=mesh)
    with fails(TypeError, "deep.0 is a set", "takes modules"):
        save({"deep": [{1}]}, f"{directory}/set", mesh=mesh)
    with fails(TypeError, "a key of the state is a frozenset"):
        save({frozenset(): 1}, f"{directory}/key", mesh=mesh)
    with fails(TypeError, "array of Python objects"):
        save({"x": np.array([None])}, f"{directory}/objects", mesh=mesh)
    with fails(ValueError, "keep=", "at least 1"):
        save({}, f"{directory}/keep", mesh=mesh, keep=0)
    assert sorted(p.name for p in Path(directory).iterdir()) == ["values"]


#: Placements on one dimension of a mesh, for a tensor of shape (6, 5).
PLACEMENTS = [Replicate(), Shard(0), Shard(1), PackedShard(0, (4, 2)), PackedShard(1, (2, 3))]


@spmd.on_mesh()
def placements(mesh: Any, directory: str) -> None:
    """Check loading into every placement from every other placement, in every dtype."""
    adapter, platform = get_adapter(), get_platform()
    whole = array(6, 5)
    saved = {str(i): distribute_tensor(adapter.tensor(whole), mesh, [p]) for i, p in enumerate(PLACEMENTS)}
    path = save({"all": saved, "plain": adapter.tensor(whole)}, f"{directory}/placements", mesh=mesh)
    for i in range(len(PLACEMENTS)):
        for q in PLACEMENTS:
            x = distribute_tensor(adapter.tensor(whole * 0), mesh, [q])
            load({"all": {str(i): x}}, path, mesh=mesh)
            assert x.placements == (q,) and (adapter.numpy(x) == whole).all(), (i, q)
    plain = adapter.tensor(whole * 0)
    load({"all": {"1": plain}}, path, mesh=mesh)
    assert (adapter.numpy(plain) == whole).all()
    x = distribute_tensor(adapter.tensor(whole * 0), mesh, [Shard(0)])
    load({"plain": x}, path, mesh=mesh)
    assert (adapter.numpy(x) == whole).all()
    # A tensor in a place without one.
    assert (adapter.numpy(load({"plain": None}, path, mesh=mesh)["plain"]) == whole).all()
    summand = DTensor.from_local(adapter.tensor(whole), mesh, [Partial()])
    with fails(ValueError, "'x' is placed [Partial", "redistribute"):
        save({"x": summand}, f"{directory}/partial", mesh=mesh)
    with fails(ValueError, "plain is placed [Partial"):
        load({"plain": summand}, path, mesh=mesh)
    kinds = [n for n in ("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16") if n in platform.dtypes]
    tensors = {n: platform.to_dtype(adapter.tensor(array(3, 2)), platform.dtypes[n]) for n in kinds}
    tensors |= {"scalar": adapter.tensor(np.float32(2.5)), "empty": adapter.tensor(array(0, 4))}
    path = save(tensors, f"{directory}/dtypes", mesh=mesh)
    index = read_index(path)
    assert {n: index.tensors[n].dtype for n in kinds} == {n: n for n in kinds}
    empty = {n: platform.to_dtype(adapter.tensor(array(3, 2) * 0), platform.dtypes[n]) for n in kinds}
    empty |= {"scalar": adapter.tensor(np.float32(0)), "empty": adapter.tensor(array(0, 4))}
    load(empty, path, mesh=mesh)
    for name, x in empty.items():
        assert platform.bytes_of(x) == platform.bytes_of(tensors[name]) and x.dtype == tensors[name].dtype, name
    # Another dtype is an error unless it is asked for.
    for name in ("int32", "float16", "bfloat16"):
        if name in kinds:
            x = adapter.tensor(array(3, 2) * 0)
            with fails(ValueError, f"{name} has dtype ", f"{name} in the checkpoint", "convert_dtypes=True"):
                load({name: x}, path, mesh=mesh)
            load({name: x}, path, mesh=mesh, convert_dtypes=True)
            assert (adapter.numpy(x) == array(3, 2)).all() and adapter.numpy(x).dtype == np.float32


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def two_dimensions(mesh: Any, directory: str) -> None:
    """Check strided shards, packed shards, tensors on slices of a mesh, and the files that each rank writes."""
    adapter, whole = get_adapter(), array(9, 6)
    kinds = [
        [Replicate(), Replicate()],
        [Shard(0), Shard(0)],
        [StridedShard(0, 2), Shard(0)],
        [StridedShard(0, 2), PackedShard(0, (5, 4))],
        [Shard(1), PackedShard(0, (5, 4))],
        [Shard(1), Replicate()],
    ]
    tensors = {str(i): distribute_tensor(adapter.tensor(whole), mesh, p) for i, p in enumerate(kinds)}
    tensors |= {
        "tp": distribute_tensor(adapter.tensor(whole), mesh["tp"], [Shard(0)]),
        "dp": distribute_tensor(adapter.tensor(whole), mesh["dp"], [Shard(1)]),
    }
    path = save(tensors, f"{directory}/two", mesh=mesh)
    for name in tensors:
        for placements in kinds:
            x = distribute_tensor(adapter.tensor(whole * 0), mesh, placements)
            load({name: x}, path, mesh=mesh)
            assert (adapter.numpy(x) == whole).all(), (name, placements)
        assert (adapter.numpy(load({name: None}, path, mesh=mesh)[name]) == whole).all()


@spmd.on_mesh()
def shared_work(mesh: Any, directory: str) -> None:
    """Check the division of writes.

    Ranks that hold the same data write about the same number of bytes. No data is written twice, and no rank writes
    data that it lacks.
    """
    adapter, size = get_adapter(), mesh.size()
    small = {f"small{i}": adapter.tensor(array(64)) for i in range(8)}
    large = {
        "large": adapter.tensor(array(1024, 512)),
        "sharded": distribute_tensor(adapter.tensor(array(1024, 256)), mesh, [Shard(0)]),
    }
    path = save(small | large, f"{directory}/shared", mesh=mesh)
    index = read_index(path)
    assert len(index.files) == size and len(set(index.files.values())) <= 2
    assert sum(index.files.values()) < sum(x.nbytes for x in index.tensors.values()) + size * 4096
    assert max(index.files.values()) < 1.1 * sum(index.files.values()) / size
    rows = {part.file: part.offsets[0] for part in index.tensors["sharded"].parts}
    assert rows == {f"rank-{r:05d}.safetensors": 1024 // size * r for r in range(size)}
    assert [part.sizes for part in index.tensors["sharded"].parts] == [(1024 // size, 256)] * size


@spmd.on_mesh()
def misfits(mesh: Any, directory: str) -> None:
    """Check that missing, unexpected and misshaped entries are all listed together, and that nothing is changed."""
    adapter, platform = get_adapter(), get_platform()

    def model(features: int = 6, seed: int = 5) -> Any:
        made = adapter.load(adapter.Mlp(4, features), np.random.default_rng(seed))
        return parallelize_module(made, mesh, {"up": ColwiseParallel(use_local_output=False)})

    def values_of(module: Any) -> dict[str, Any]:
        return {name: adapter.numpy(x) for name, x in platform.saved_tensors(module)}

    def same_values(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return all((a[n] == b[n]).all() for n in a.keys() & b.keys())

    first = model()
    path = save({"model": first, "step": 1}, f"{directory}/model", mesh=mesh)
    wider, kept = model(7), values_of(model(7))
    with fails(
        ValueError, *(f"model.{n} has shape" for n in ("up.weight", "up.bias", "down.weight")), "(7, 4)", "(6, 4)"
    ):
        load({"model": wider}, path, mesh=mesh)
    assert same_values(values_of(wider), kept)
    with fails(ValueError, "model.up.weight has shape"):  # as in torch, also then
        load({"model": wider}, path, mesh=mesh, strict=False)
    # Another name for a layer, in both directions.
    outer, old = adapter.Probe(), model(seed=6)
    outer.up, outer.dowm = old.up, old.down
    with fails(
        ValueError,
        "missing: model.dowm.weight (the checkpoint has 'model.down.weight')",
        "missing: model.dowm.bias",
        "unexpected: model.down.weight",
        "unexpected: model.down.bias",
        "strict=False",
    ):
        load({"model": outer}, path, mesh=mesh)
    assert not same_values(values_of(old), values_of(first))
    load({"model": outer}, path, mesh=mesh, strict=False)
    got, wanted = values_of(old), values_of(first)
    assert (got["up.weight"] == wanted["up.weight"]).all() and (got["down.weight"] != wanted["down.weight"]).any()
    # A part of a model by the path that it had; and a model for one of its tensors.
    alone = model(seed=7)
    load({"model": {"up": alone.up}}, path, mesh=mesh)
    assert (values_of(alone)["up.weight"] == wanted["up.weight"]).all()
    x = adapter.tensor(array(6, 4))
    load({"model": {"up": {"weight": x}}}, path, mesh=mesh)
    assert (adapter.numpy(x) == wanted["up.weight"]).all()
    with fails(ValueError, "the checkpoint has a module here, and the state has a plain value"):
        load({"model": 3}, path, mesh=mesh)
    with fails(ValueError, "step.up.weight"):
        load({"step": model()}, path, mesh=mesh)
    # Many problems: some are listed, and how many there are.
    with fails(ValueError, "... and 10 more"):
        load({f"x{i}": x for i in range(30)}, path, mesh=mesh)
    # Tied here, two tensors there.
    tied = adapter.load(adapter.Tied(4, 6), np.random.default_rng(5))
    names = [name for name, _ in platform.saved_tensors(tied)]
    assert len(names) == 2
    two = {name: adapter.tensor(array(4, 6) + i) for i, name in enumerate(names)}
    path = save({"model": two}, f"{directory}/untied", mesh=mesh)
    with fails(ValueError, f"'model.{names[0]}' and 'model.{names[1]}' are one tied tensor in the state", "untie"):
        load({"model": tied}, path, mesh=mesh)
    load({"model": tied}, path, mesh=mesh, strict=False)
    assert (values_of(tied)[names[0]] == array(4, 6)).all()
    # Two there, tied here: one of them is enough; and the other way about.
    path = save({"model": tied}, f"{directory}/tied", mesh=mesh)
    load({"model": two}, path, mesh=mesh)
    assert all((adapter.numpy(x) == array(4, 6)).all() for x in two.values())
    with fails(ValueError, "exists already", "overwrite=True"):
        save({"step": 1}, path, mesh=mesh)
    # Whole parameters next to shards, and in their place.
    unit = fully_shard(adapter.linear_module(4, 6), mesh=mesh)
    unit.unshard()
    save({"model": unit}, f"{directory}/whole", mesh=mesh)
    load({"model": unit}, f"{directory}/whole", mesh=mesh)
    unit.reshard()

    def saving(forward: Any) -> Any:
        def run(self: Any, x: Any) -> Any:
            for call in (save, load):
                with pytest.raises(ValueError, match=r"'model' has unsharded parameters.*not save or load during"):
                    call({"model": self}, path, mesh=mesh)
            return forward(self, x)

        return run

    inside = adapter.linear_module(4, 6)
    mesh.platform.replace_forward(inside, saving)
    adapter.call(fully_shard(inside, mesh=mesh), adapter.tensor(array(2, 4)))


@spmd.on_mesh()
def optimizers(mesh: Any, directory: str) -> None:
    """Check optimizers that are saved before and after the first step, without the model, and loaded into another
    kind."""
    adapter, platform = get_adapter(), get_platform()
    if not platform.is_optimizer(
        getattr(adapter, "optimizer", lambda *_: (None, None))(adapter.Mlp(4, 6), "adamw", 0.1)[0]
    ):
        return

    def trained(kind: str, rate: float = 0.1, seed: int = 5) -> Any:
        model = adapter.load(adapter.Mlp(4, 6), np.random.default_rng(seed))
        parallelize_module(model, mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
        optimizer, step = adapter.optimizer(model, kind, rate)

        def loss_of(x: Any) -> Any:
            y = adapter.call(model, x)
            return adapter.mean(adapter.square(y)), y

        def run(n: int) -> Any:
            for _ in range(n):
                y, _, grads = adapter.model_value_and_grads(model, loss_of, array(3, 4) / 10)
                step(grads)
            return adapter.numpy(y)

        return model, optimizer, run

    # Into one that has not stepped, or has; by the names of the model in the same state, or in the order of its
    # parameters.
    made = {}
    for kind in ("adamw", "momentum"):
        model, optimizer, run = made[kind] = trained(kind)
        new = save({"model": model, "optimizer": optimizer}, f"{directory}/{kind}-new", mesh=mesh)
        after_new = run(2)
        both = save([model, optimizer], f"{directory}/{kind}-both", mesh=mesh)
        apart = save({"model": model}, f"{directory}/{kind}-model", mesh=mesh)
        alone = save(optimizer, f"{directory}/{kind}-alone", mesh=mesh)
        wanted = run(3)

        def load_apart(other: Any, its: Any, apart: Any = apart, alone: Any = alone) -> None:
            load({"model": other}, apart, mesh=mesh)
            load(its, alone, mesh=mesh)

        def load_both(other: Any, its: Any, both: Any = both) -> None:
            load([other, its], both, mesh=mesh)

        # Its rate too is the one that was saved.
        other, its, its_run = trained(kind, 0.5, seed=6)
        load_apart(other, its) if kind == "adamw" else load_both(other, its)
        assert (its_run(3) == wanted).all(), kind
        other, its, its_run = trained(kind, 0.5, seed=6)
        load({"model": other, "optimizer": its}, new, mesh=mesh)  # saved before its first step
        assert (its_run(2) == after_new).all(), kind
        if any(platform.optimizer_state(trained(kind)[1]).state):  # MindSpore has moments of zeros from the start
            load({"model": other, "optimizer": its}, new, mesh=mesh)
            assert (its_run(2) == after_new).all(), kind
        else:
            with fails(ValueError, "missing: optimizer.model.up.weight."):
                load({"model": other, "optimizer": its}, new, mesh=mesh)
        load_both(other, its) if kind == "adamw" else load_apart(other, its)
        assert (its_run(3) == wanted).all(), kind
    model, optimizer, _ = made["adamw"]
    path = save({"model": model, "optimizer": optimizer}, f"{directory}/one", mesh=mesh)
    with fails(ValueError, "optimizer: the state has a optimizer, and the checkpoint has a value of another kind"):
        load({"optimizer": optimizer}, save({"optimizer": 1}, f"{directory}/no", mesh=mesh), mesh=mesh)
    frozen = adapter.load(adapter.Mlp(4, 6), np.random.default_rng(5))
    parallelize_module(frozen, mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
    adapter.freeze(frozen, "up.bias")
    with fails(ValueError, "optimizer has parameter groups of sizes [3], and the checkpoint has groups of sizes [4]"):
        load({"model": frozen, "optimizer": adapter.optimizer(frozen, "adamw", 0.1)[0]}, path, mesh=mesh)
    model, momentum, _ = made["momentum"]
    with fails(ValueError, "missing: optimizer.model.up.weight.momentum_buffer"):
        load({"model": model, "optimizer": momentum}, path, mesh=mesh)


class Counter:
    """An object with a state, such as a scheduler."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "history": [1, (2, 3)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["history"] == [1, (2, 3)]
        self.value = state["value"]


class OwnCounter(Counter):
    """A counter with a separate value on each rank."""

    per_rank = True


class Spread(OwnCounter):
    """An object that can be loaded on another number of ranks."""

    def load_state_of_ranks(self, states: list[dict[str, Any]], rank: int, world_size: int) -> None:
        self.value = (rank, world_size, [state["value"] for state in states])


@spmd.on_mesh()
def objects(mesh: Any, directory: str) -> None:
    adapter, rank, size = get_adapter(), mesh.get_rank(), mesh.size()
    x = adapter.tensor(array(3))
    state = {"one": Counter(3), "own": OwnCounter(rank), "spread": Spread(10 * rank), "tensor": Counter(x)}
    path = save(state, f"{directory}/objects", mesh=mesh)
    new = {
        "one": Counter(0),
        "own": OwnCounter(-1),
        "spread": Spread(0),
        "tensor": Counter(adapter.tensor(array(3) * 0)),
    }
    assert load(new, path, mesh=mesh) == new
    assert new["one"].value == 3 and new["own"].value == rank
    assert new["spread"].value == (rank, size, [10 * r for r in range(size)])
    assert (adapter.numpy(new["tensor"].value) == array(3)).all()
    # Values in their places.
    got = load(dict.fromkeys(state), path, mesh=mesh)
    assert got["one"] == {"value": 3, "history": [1, (2, 3)]} and got["own"]["value"] == rank
    with fails(ValueError, "one: the state has a ranks, and the checkpoint has a value of another kind"):
        load({"one": OwnCounter(0)}, path, mesh=mesh)
    with fails(TypeError, "own.value is a tensor, but ", "may only contain plain values"):
        save({"own": OwnCounter(x)}, f"{directory}/own", mesh=mesh)
    if size > 1:
        with fails(ValueError, "ranks 0 and 1 save different states: value ['step'] is 0 on rank 0", "per_rank"):
            save({"step": rank}, f"{directory}/differs", mesh=mesh)
        with fails(ValueError, "ranks 0 and 1 save different states", "x is float32 of shape (3,), plain, values"):
            save({"x": adapter.tensor(array(3) + rank)}, f"{directory}/differs", mesh=mesh)
        with fails(ValueError, "ranks 0 and 1 save different states", "x is float32", "missing on rank 1"):
            save({"y" if rank else "x": x}, f"{directory}/differs", mesh=mesh)
        with fails(ValueError, "ranks 0 and 1 save different states", "the path is "):
            save({"x": x}, f"{directory}/differs{rank}", mesh=mesh)
        both = {"x": x, "step": 3}
        with fails(
            ValueError,
            "ranks 0 and 1 save the same keys in different orders: value ['x'] comes first",
            "in the same order",
        ):
            save({key: both[key] for key in sorted(both, reverse=rank == 0)}, f"{directory}/differs", mesh=mesh)
        with fails(TypeError, "x is a set", "on rank"):
            save({"x": {1} if rank == size - 1 else 1}, f"{directory}/differs", mesh=mesh)
    assert [p.name for p in Path(directory).iterdir()] == ["objects"]


@spmd.on_mesh()
def own_states_of(mesh: Any, directory: str) -> None:
    save({"own": OwnCounter(mesh.get_rank()), "random": RandomState()}, f"{directory}/own", mesh=mesh)


@spmd.on_mesh()
def load_elsewhere(mesh: Any, directory: str, saved: int) -> None:
    path, size, own = f"{directory}/own", mesh.size(), OwnCounter(-1)
    if size == saved:
        load({"own": own}, path, mesh=mesh)
        assert own.value == mesh.get_rank()
    else:
        with fails(ValueError, f"{saved} ranks saved a state each, and {size} ranks load", "load_state_of_ranks"):
            load({"own": own}, path, mesh=mesh)


@spmd.on_mesh()
def random_states(mesh: Any, directory: str) -> Any:
    """Check that each rank resumes its own random numbers."""
    adapter = get_adapter()

    def draw() -> tuple[Any, ...]:
        return (*adapter.numpy(adapter.draw("rand", (3,))).tolist(), np.random.random())

    adapter.seed(7 + mesh.get_rank())
    np.random.seed(mesh.get_rank())
    draw()
    path = save({"random": RandomState()}, f"{directory}/random", mesh=mesh)
    wanted = draw()
    draw()
    load({"random": RandomState()}, path, mesh=mesh)
    assert draw() == wanted
    return wanted


@spmd.on_mesh()
def load_random_states(mesh: Any, directory: str) -> Any:
    import warnings

    adapter = get_adapter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load({"random": RandomState()}, f"{directory}/random", mesh=mesh)
    drawn = (*adapter.numpy(adapter.draw("rand", (3,))).tolist(), np.random.random())
    return drawn, [str(w.message) for w in caught if "generators" in str(w.message)]


@spmd.on_mesh()
def kept_ones(mesh: Any, directory: str) -> None:
    """Check that ``keep`` keeps the newest checkpoints, that `latest` finds the newest, and that asynchronous saves
    count too."""
    adapter = get_adapter()
    assert latest(f"{directory}/none") is None
    x = distribute_tensor(adapter.tensor(array(6, 2)), mesh, [Shard(0)])
    for step in range(1, 5):
        path = save({"x": x, "step": step}, f"{directory}/run/step-{step}", mesh=mesh, keep=2)
        assert latest(f"{directory}/run") == path
    assert sorted(p.name for p in Path(directory, "run").iterdir()) == ["step-3", "step-4"]
    save({"x": x * 2, "step": 5}, f"{directory}/run/step-3", mesh=mesh, overwrite=True)
    assert latest(f"{directory}/run").name == "step-3"
    assert load({"step": 0, "x": x}, latest(f"{directory}/run"), mesh=mesh)["step"] == 5
    assert (adapter.numpy(x) == array(6, 2) * 2).all()
    under_way = []
    for step in range(6, 9):
        under_way.append(async_save({"x": x, "step": step}, f"{directory}/run/step-{step}", mesh=mesh, keep=2))
        with get_platform().no_dispatch(), get_platform().no_grad():  # training goes on
            get_platform().write(x, get_platform().detach(x) + 1)
        load({"step": 0}, f"{directory}/run/step-3", mesh=mesh) if step == 6 else None
    assert under_way[-1].result().name == "step-8" and under_way[-1].done()
    assert sorted(p.name for p in Path(directory, "run").glob("[!.]*")) == ["step-7", "step-8"]
    load({"x": x}, f"{directory}/run/step-8", mesh=mesh)
    assert (adapter.numpy(x) == array(6, 2) * 2 + 2).all()
    with fails(ValueError, "exists already"):
        async_save({"x": x}, f"{directory}/run/step-8", mesh=mesh)


@spmd.on_mesh(2)
def lost_beside_the_training(mesh: Any, directory: str) -> None:
    """Check an asynchronous save that loses a rank: the other rank raises, and the previous checkpoint remains.

    The thread of the second rank stops working, but does not end. To the first rank, this rank looks like a lost rank.
    """
    adapter, ranks, run = get_adapter(), Collective(mesh), Path(directory, "run")
    x = distribute_tensor(adapter.tensor(array(6, 2)), mesh, [Shard(0)])
    first = save({"x": x, "step": 1}, run / "step-1", mesh=mesh)
    going_on, limit = threading.Event(), os.environ.get("HYPER_PARALLEL_TIMEOUT")

    def stop(kind: str, path: Path) -> None:
        if kind == "write" and mesh.get_rank() == 1:
            going_on.wait(60)

    disk.watcher = stop
    os.environ["HYPER_PARALLEL_TIMEOUT"] = "1"
    try:
        under_way = async_save({"x": x * 2, "step": 2}, run / "step-2", mesh=mesh)
        assert latest(run) == first
        if mesh.get_rank() == 0:
            with fails(
                CheckpointError,
                "rank 1 did not reach the next step of an asynchronous save within 1 sec",
                "the rank has ended",
            ):
                under_way.result()
            assert [path.name for path in run.iterdir()] == ["step-1"]
        ranks.gather(None)
        if mesh.get_rank() == 1:
            with fails(TimeoutError, "step-2 is still being written after 0.01 seconds"):
                under_way.result(timeout=0.01)
            going_on.set()  # it comes back
            with fails(CheckpointError, "the other ranks have abandoned an asynchronous save", "rank 1"):
                under_way.result()
    finally:
        disk.watcher = None
        os.environ.pop("HYPER_PARALLEL_TIMEOUT") if limit is None else os.environ.update(HYPER_PARALLEL_TIMEOUT=limit)
    ranks.gather(None)
    assert load({"x": x, "step": 0}, latest(run), mesh=mesh)["step"] == 1
    assert (adapter.numpy(x) == array(6, 2)).all()
    async_save({"x": x, "step": 3}, run / "step-3", mesh=mesh).result()
    ranks.gather(None)
    assert sorted(path.name for path in run.iterdir()) == ["step-1", "step-3"]


def test_a_rank_is_lost_beside_the_training(pool: Any, tmp_path: Path) -> None:
    pool.run(2, lost_beside_the_training, str(tmp_path))


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(
    "job",
    [values, placements, shared_work, misfits, optimizers, objects, random_states, kept_ones],
    ids=lambda job: job.__name__,
)
def test_state(pool: Any, tmp_path: Path, job: Any, world_size: int) -> None:
    pool.run(world_size, job, str(tmp_path))


def test_two_dimensions(pool: Any, tmp_path: Path) -> None:
    pool.run(4, two_dimensions, str(tmp_path))


@pytest.mark.parametrize("saved", WORLD_SIZES)
def test_what_each_rank_has(pool: Any, tmp_path: Path, saved: int) -> None:
    pool.run(saved, own_states_of, str(tmp_path))
    for world_size in WORLD_SIZES:
        pool.run(world_size, load_elsewhere, str(tmp_path), saved)


def test_random_states_of_another_number_of_ranks(pool: Any, tmp_path: Path) -> None:
    two = pool.run(2, random_states, str(tmp_path))
    one = pool.run(1, load_random_states, str(tmp_path))
    assert one[0][0] == two[0] and "2 ranks" in one[0][1][0]
    four = [drawn for drawn, _ in pool.run(4, load_random_states, str(tmp_path))]
    assert four[:2] == two and len(set(four)) == 4
