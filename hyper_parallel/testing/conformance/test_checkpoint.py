"""Checkpoints: any mesh loads the values of any other mesh bit for bit, and training continues unchanged."""

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
from hyper_parallel.checkpoint.ranks import Collective
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.extent import everything

ROWS = 4


class Setup(NamedTuple):
    """A mesh, and the kind of data parallelism on its first dimension.

    Without data parallelism, the only dimension is for tensor parallelism.
    """

    shape: tuple[int, ...]
    dp: str

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dp}"

    def mesh(self) -> Any:
        """Return the mesh of the setup, or None on a rank outside it. All ranks of the pool must make this call."""
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
    """Return a parallelised model."""
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
    """Train on the same batch on all ranks; return the loss of each step."""
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
    """Return a digest of all values of a tensor, and its shape."""
    values = get_adapter().numpy(x)
    return f"{values.dtype} {values.shape} {hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()}"


def digests(model: Any, optimizer: Any, platform: Any) -> dict[str, str]:
    """Return a digest of each tensor in the checkpoint of a model and its optimizer."""
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
    """Return an optimizer of the framework and its step.

    Without optimizers in the backend, return None and a plain step.
    """
    adapter = get_adapter()
    made = adapter.optimizer(model, name, 0.05) if hasattr(adapter, "optimizer") else (None, None)
    return made if platform.is_optimizer(made[0]) else (None, adapter.sgd(model, 0.05))


def save_new(setup: Setup, name: str, path: str) -> Any:
    """Save an untrained model, and return its values."""
    mesh = setup.mesh()
    if mesh is None:
        return None
    model = build(mesh, setup, name)
    save({"model": model, "name": name}, path, mesh=mesh, checksums=True)
    return digests(model, None, mesh.platform)


def load_new(setup: Setup, path: str, name: str) -> Any:
    """Load a checkpoint into a model with other values, and return the loaded values. Parameters stay the same
    objects."""
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


def all_have_come() -> None:
    """Wait until all ranks of the pool have made this call."""
    Collective(spmd.device_mesh(4)).gather(None)


def round_trips(name: str, directory: str, numbers: list[int]) -> list[Any]:
    """Return the values that each setup saved, and the values that this setup and two other setups loaded."""
    found = []
    for number in numbers:
        setup = SETUPS[number]
        path = f"{directory}/{number}"
        saved = save_new(setup, name, path)
        all_have_come()
        others = (setup, SETUPS[(number + 4) % len(SETUPS)], SETUPS[(number + 11) % len(SETUPS)])
        found.append((saved, {str(other): load_new(other, path, name) for other in others}))
    return found


def _own_setups(name: str) -> range:
    """Return this model's share of the setups, which are divided between the models."""
    return range([*MODELS].index(name), len(SETUPS), len(MODELS))


@pytest.mark.parametrize("name", list(MODELS))
def test_round_trip(pool: Any, tmp_path: Path, name: str) -> None:
    """Check that the saved values are loaded on the same mesh, and on two other meshes."""
    # Over all models, the gate saves with each setup once.
    numbers = list(range(len(SETUPS)) if everything() else _own_setups(name))
    ranks = pool.run(4, round_trips, name, str(tmp_path), numbers)
    for place, number in enumerate(numbers):
        saved = ranks[0][place][0]
        assert len(saved) > 1 and len(ranks[0][place][1]) == 3
        for rank in ranks:
            for other, loaded in rank[place][1].items():
                assert loaded in (None, saved), (str(SETUPS[number]), other)


class Job(NamedTuple):
    """A model and its optimizer on a mesh."""

    mesh: Any
    model: Any
    optimizer: Any
    step: Any

    @classmethod
    def new(cls, setup: Setup, name: str, seed: int) -> Any:
        """Return a new job, or None on a rank outside the mesh."""
        mesh = setup.mesh()
        if mesh is None:
            return None
        model = build(mesh, setup, name, seed)
        return cls(mesh, model, *optimizer_of(model, mesh.platform))

    def state(self, step: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "step": step,
            **({} if self.optimizer is None else {"optimizer": self.optimizer}),
        }

    def digests(self) -> dict[str, str]:
        return digests(self.model, self.optimizer, self.mesh.platform)

    def resume(self, name: str, path: str, end: int) -> Any:
        """Return the loaded values, and the losses of the steps after the load."""
        result = load(self.state(0), path, mesh=self.mesh)
        assert result["step"] == 2 and result["model"] is self.model and result.get("optimizer") is self.optimizer
        return self.digests(), train(self.model, name, self.step, range(2, end))


#: The step before which a job that was resumed ends.
END = 12 if everything() else 5


def broken_runs(name: str, numbers: range, directory: str) -> list[Any]:
    """Return the results of interrupted training for each setup.

    Results are the state saved after two steps, the losses up to `END`, and the results of resuming. Training is
    resumed on the same setup and on the next one. In one of these two cases, the resuming optimizer has taken steps
    before.
    """
    saved, resumed, again = [], [], []
    for number in numbers:
        job, path = Job.new(SETUPS[number], name, 5), f"{directory}/{number}"
        if job is not None:
            train(job.model, name, job.step, range(2))
            save(job.state(2), path, mesh=job.mesh)
            saved.append((job.digests(), train(job.model, name, job.step, range(2, END))))
        else:
            saved.append(None)
        # After further steps the job itself has other values, and its optimizer has stepped.
        job = job if number % 2 else Job.new(SETUPS[number], name, 6)
        resumed.append(None if job is None else job.resume(name, path, END))
        again.append(job)
    all_have_come()
    found = []
    for place, number in enumerate(numbers):
        job = Job.new(SETUPS[number], name, 6) if number % 2 else again[place]
        other = (place + 1) % len(numbers)
        found.append(None if job is None else job.resume(name, f"{directory}/{numbers[other]}", 4))
    return [*zip(saved, resumed, found, strict=True)]


@pytest.mark.parametrize("name", list(MODELS))
def test_training_goes_on(pool: Any, tmp_path: Path, name: str) -> None:
    """Check that resumed training equals uninterrupted training: bit for bit on the same mesh, up to rounding on
    another mesh."""
    numbers = _own_setups(name)
    ranks = pool.run(4, broken_runs, name, numbers, str(tmp_path))
    for place, number in enumerate(numbers):
        saved = ranks[0][place][0]
        for rank in ranks:
            assert rank[place][1] in (None, saved), SETUPS[number]
        other = ranks[0][(place + 1) % len(numbers)][0]
        for rank in ranks:
            if rank[place][2] is not None:
                loaded, losses = rank[place][2]
                assert loaded == other[0], SETUPS[number]
                np.testing.assert_allclose(losses, other[1][:2], rtol=1e-4, err_msg=str(SETUPS[number]))
