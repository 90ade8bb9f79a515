"""Checkpoints: what one mesh has saved another one loads, bit for bit, and training goes on as if without a break."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicate,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.checkpoint import load, save
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter

ROWS = 4


class Setup(NamedTuple):
    """A mesh, and what data parallelism does on its first dimension; a mesh without it has a plan on the only one."""

    shape: tuple[int, ...]
    dp: str

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dp}"

    def mesh(self) -> Any:
        """None on a rank outside of it. All ranks of the pool call it."""
        names = ("dp", "tp") if len(self.shape) == 2 else ("tp",) if self.dp == "none" else ("dp",)
        return spmd.device_mesh(*self.shape, names=names)


SHAPES: list[tuple[int, ...]] = [(1,), (2,), (3,), (4,), (2, 2)]
SETUPS = [Setup(shape, dp) for shape in SHAPES for dp in ("none", "fully_shard", "replicate")]


def attention_plan(feed_forward: dict[str, Any]) -> dict[str, Any]:
    return {"attention.w[qkv]": ColwiseParallel(), "attention.wo": RowwiseParallel(), **feed_forward}


#: name -> (builds it, shape of a row of its input or the number of ids, plan, parameter that is frozen)
MODELS: dict[str, tuple[Any, Any, dict[str, Any], str | None]] = {
    "even": (lambda a: a.Mlp(8, 24), (8,), {"up": ColwiseParallel(), "down": RowwiseParallel()}, None),
    # On three and four ranks some hold nothing of `up`.
    "uneven": (lambda a: a.Mlp(5, 2), (5,), {"up": ColwiseParallel(), "down": RowwiseParallel()}, None),
    "packed": (
        lambda a: a.FusedGated(6, 10),
        (6,),
        {"w13": ColwiseParallel(packed=2), "w2": RowwiseParallel()},
        "w13.weight",
    ),
    "tied": (
        lambda a: a.Tied(7, 6),
        7,
        {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())},
        None,
    ),
    "buffered": (lambda a: a.Buffered(6), (6,), {"linear": ColwiseParallel(output_layouts=Replicate())}, "linear.bias"),
}


def build(mesh: Any, setup: Setup, name: str, seed: int = 5) -> Any:
    """A parallelised model."""
    adapter = get_adapter()
    make, _, plan, frozen = MODELS[name]
    model = adapter.load(make(adapter), np.random.default_rng(seed))
    if frozen:
        adapter.freeze(model, frozen)
    if mesh.ndim == 2 or setup.dp == "none":
        parallelize_module(model, mesh["tp"] if mesh.ndim == 2 else mesh, plan)
    dp = mesh["dp"] if mesh.ndim == 2 else mesh
    if setup.dp == "fully_shard":
        fully_shard(model, mesh=dp)
    if setup.dp == "replicate":
        replicate(model, dp)
    return model


def train(model: Any, name: str, step: Any, batches: range) -> list[float]:
    """Steps on the same batch on all ranks; returns the losses."""
    adapter, shape, losses = get_adapter(), MODELS[name][1], []
    for number in batches:
        rng = np.random.default_rng(100 + number)
        x = rng.integers(0, shape, ROWS) if isinstance(shape, int) else rng.standard_normal((ROWS, *shape))
        x = x.astype(np.int64 if isinstance(shape, int) else np.float32)

        def loss_of(x: Any) -> Any:
            y = adapter.call(model, x)
            y = y.full_tensor() if isinstance(y, DTensor) else y
            return adapter.mean(adapter.square(y)), y

        y, _, grads = adapter.model_value_and_grads(model, loss_of, x)
        losses.append(float(np.mean(np.square(adapter.numpy(y)))))
        step(grads)
    return losses


def digest(x: Any) -> str:
    """Of all values of a tensor, and its shape."""
    values = get_adapter().numpy(x)
    return f"{values.dtype} {values.shape} {hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()}"


def digests(model: Any, optimizer: Any, platform: Any) -> dict[str, str]:
    """Of everything that a checkpoint of both has."""
    found = {name: digest(x) for name, x in platform.saved_tensors(model)}
    if optimizer is not None:
        names = {id(x): name for name, x in platform.saved_tensors(model)}
        state = platform.optimizer_state(optimizer)
        for p, row in zip((p for group in state.parameters for p in group), state.state, strict=True):
            for moment, x in row.items():
                value = digest(x) if platform.is_tensor(x) else repr(x)
                found[f"{names[id(p)]}.{moment}"] = value
    return found


def optimizer_of(model: Any, platform: Any, name: str = "adamw") -> tuple[Any, Any]:
    """The framework's optimizer and its step; of a backend without optimizers only a step."""
    adapter = get_adapter()
    made = adapter.optimizer(model, name, 0.05) if hasattr(adapter, "optimizer") else (None, None)
    return made if platform.is_optimizer(made[0]) else (None, adapter.sgd(model, 0.05))


def state_of(model: Any, optimizer: Any, step: int) -> dict[str, Any]:
    return {"model": model, "step": step, **({} if optimizer is None else {"optimizer": optimizer})}


def save_new(setup: Setup, name: str, path: str) -> Any:
    """What was saved of a model that has not trained."""
    mesh = setup.mesh()
    if mesh is None:
        return None
    model = build(mesh, setup, name)
    save({"model": model, "name": name}, path, mesh=mesh, checksums=True)
    return digests(model, None, mesh.platform)


def load_new(setup: Setup, path: str, name: str) -> Any:
    """The same of one that was loaded, which had other values; it stays what it was."""
    mesh = setup.mesh()
    if mesh is None:
        return None
    model = build(mesh, setup, name, seed=6)
    before = {name: (id(x), getattr(x, "_layout", None), x.dtype) for name, x in mesh.platform.saved_tensors(model)}
    result = load({"model": model, "name": ""}, path, mesh=mesh, verify=True)
    assert result == {"model": model, "name": name}
    after = {name: (id(x), getattr(x, "_layout", None), x.dtype) for name, x in mesh.platform.saved_tensors(model)}
    assert before == after
    return digests(model, None, mesh.platform)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_round_trip(pool: Any, tmp_path: Path, name: str, setup: Setup) -> None:
    """Loaded on the mesh that saved, and on two others."""
    path, number = str(tmp_path / "step-0"), SETUPS.index(setup)
    saved = pool.run(4, save_new, setup, name, path)[0]
    for other in (setup, SETUPS[(number + 4) % len(SETUPS)], SETUPS[(number + 11) % len(SETUPS)]):
        ranks = [x for x in pool.run(4, load_new, other, path, name) if x is not None]
        assert ranks == [saved] * len(ranks), other


def save_trained(setup: Setup, name: str, path: str) -> Any:
    """Train two steps, save, train ten more: what was saved, and the losses after it."""
    mesh = setup.mesh()
    if mesh is None:
        return None
    model = build(mesh, setup, name)
    optimizer, step = optimizer_of(model, mesh.platform)
    train(model, name, step, range(2))
    save(state_of(model, optimizer, 2), path, mesh=mesh)
    saved = digests(model, optimizer, mesh.platform)
    return saved, train(model, name, step, range(2, 12))


def load_and_train(setup: Setup, name: str, path: str, stepped: bool, end: int) -> Any:
    """The same from a checkpoint, into a model with other values; the optimizer may have stepped before."""
    mesh = setup.mesh()
    if mesh is None:
        return None
    model = build(mesh, setup, name, seed=6)
    optimizer, step = optimizer_of(model, mesh.platform)
    if stepped:
        train(model, name, step, range(50, 51))
    result = load(state_of(model, optimizer, 0), path, mesh=mesh)
    assert result["step"] == 2 and result["model"] is model and result.get("optimizer") is optimizer
    loaded = digests(model, optimizer, mesh.platform)
    return loaded, train(model, name, step, range(2, end))


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_training_goes_on(pool: Any, tmp_path: Path, setup: Setup) -> None:
    """Ten steps after a break equal those without one, bit for bit; on another mesh to rounding."""
    path, number = str(tmp_path / "step-2"), SETUPS.index(setup)
    name = list(MODELS)[number % len(MODELS)]
    saved, losses = pool.run(4, save_trained, setup, name, path)[0]
    for other in (setup, SETUPS[(number + 7) % len(SETUPS)]):
        end = 12 if other is setup else 4
        ranks = [x for x in pool.run(4, load_and_train, other, name, path, number % 2, end) if x is not None]
        for loaded, again in ranks:
            assert loaded == saved, other
            if other is setup:
                assert again == losses
            np.testing.assert_allclose(again, losses[: end - 2], rtol=1e-4, err_msg=str(other))
