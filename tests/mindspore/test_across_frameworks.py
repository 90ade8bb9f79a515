"""MindSpore loads the checkpoints of torch, and torch those of MindSpore, bit for bit. Training continues as on the
other framework.

Ranks of torch run in a pool of their own next to that of MindSpore.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_parameter,
    fully_shard,
    get_platform,
    parallelize_module,
)
from hyper_parallel.checkpoint import load, load_pretrained, save, save_pretrained
from hyper_parallel.testing import spmd
from hyper_parallel.testing.conformance import test_expert_checkpoint as experts
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.pool import WorkerPool

ROOT = Path(__file__).resolve().parents[2]
#: name -> options, the same on both frameworks.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1},
    "Adam": {"lr": 0.05, "amsgrad": True},
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.5},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1},
    "Adadelta": {"lr": 0.5},
    "Adamax": {"lr": 0.05},
    "NAdam": {"lr": 0.05},
    "RMSprop": {"lr": 0.05, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.05},
}


def on_torch() -> bool:
    return bool(get_platform().name.startswith("torch"))


def make_model(kind: str) -> Any:
    """Two models. One has an embedding, a norm and two linear layers, whose names differ between the frameworks. The
    other has convolutions, whose weights have other shapes."""
    if on_torch():
        from torch import nn

        if kind == "convolutions":
            return nn.Sequential(nn.Conv1d(4, 6, 3), nn.ConvTranspose1d(6, 4, 2, bias=False))
        return nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6))
    import mindspore as ms

    if kind == "convolutions":
        transposed = ms.nn.Conv1dTranspose(6, 4, 2, has_bias=False)
        return ms.nn.SequentialCell(ms.nn.Conv1d(4, 6, 3, has_bias=True), transposed)
    cells = ms.nn.Embedding(7, 6), ms.nn.LayerNorm((6,)), ms.nn.Dense(6, 5), ms.nn.ReLU(), ms.nn.Dense(5, 6)
    return ms.nn.SequentialCell(*cells)


def values(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sorted(shapes.items())}


class Job:
    """A model and an optimizer, spread over ranks or not, which steps with gradients that are given."""

    def __init__(self, mesh: Any, optimizer: str, seed: int, kind: str = "layers") -> None:
        self.platform, self.model = get_platform(), make_model(kind)
        self.parameters = dict(self.platform.saved_tensors(self.model))
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        for name, x in values(seed, self.shapes).items():
            self._write(self.parameters[name], x)
        if kind == "convolutions":
            distribute_parameter(self.model[0], "weight", mesh["tp"], [Shard(0)])
            distribute_parameter(self.model[1], "weight", mesh["tp"], [Shard(1)])
        elif mesh is not None:
            plan = {"2": ColwiseParallel(), "4": RowwiseParallel(), "0": RowwiseParallel(input_layouts=Replicate())}
            parallelize_module(self.model, mesh["tp"], plan)
            if mesh["dp"].size() > 1:
                fully_shard(self.model, mesh=mesh["dp"])
        self.parameters = dict(self.platform.saved_tensors(self.model))
        options = OPTIMIZERS[optimizer]
        if on_torch():
            import torch

            self.optimizer: Any = getattr(torch.optim, optimizer)([*self.parameters.values()], **options)
        else:
            from mindspore.experimental import optim

            self.optimizer = getattr(optim, optimizer)([*self.parameters.values()], **options)
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def _tensor(self, x: np.ndarray) -> Any:
        return self.platform.from_bytes(bytearray(x.tobytes()), x.shape, self.platform.dtypes["float32"])

    def _write(self, p: Any, x: np.ndarray) -> None:
        with self.platform.no_grad():
            self.platform.write(p, self._tensor(x))

    def step(self, seed: int) -> None:
        gradients = []
        for name, x in values(100 + seed, self.shapes).items():
            p = self.parameters[name]
            g = self._tensor(x)
            if isinstance(p, DTensor):
                local = p._layout.local_index() if not any(hasattr(q, "sizes") for q in p.placements) else None
                assert local is not None
                g = DTensor.from_local(
                    self._tensor(np.ascontiguousarray(x[local])), p.device_mesh, p.placements, shape=x.shape
                )
            gradients.append((name, g))
        found = dict(gradients)
        if on_torch():
            for name, p in self.parameters.items():
                p.grad = found[name]
            self.optimizer.step()
        else:
            self.optimizer(tuple(found[name] for name in self.parameters))

    def digests(self) -> dict[str, str]:
        """Digests of parameters and of the optimizer's state, as names, shapes and bytes; numbers are returned as they
        are."""

        def digest(x: Any) -> str:
            if not self.platform.is_tensor(x):
                return f"{float(x):.9g}"
            whole = x.full_tensor() if isinstance(x, DTensor) else x
            data = self.platform.bytes_of(self.platform.detach(whole))
            return f"{[n for n in whole.shape if n != 1]} {hashlib.sha256(data).hexdigest()}"

        found = {name: digest(p) for name, p in self.parameters.items()}
        state = self.platform.optimizer_state(self.optimizer)
        for name, row in zip(self.parameters, state.state, strict=True):
            found |= {f"{name}.{key}": digest(x) for key, x in row.items()}
        return found

    def whole(self) -> dict[str, np.ndarray]:
        found = {}
        for name, p in self.parameters.items():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            data = self.platform.bytes_of(self.platform.detach(whole))
            found[name] = np.frombuffer(data, np.float32).reshape(tuple(whole.shape))
        return found


def mesh_of(shape: tuple[int, int]) -> Any:
    return spmd.device_mesh(*shape, names=("dp", "tp"))


def save_job(shape: tuple[int, int], optimizer: str, directory: str, kind: str = "layers") -> Any:
    mesh = mesh_of(shape)
    if mesh is None:
        return None
    job = Job(mesh, optimizer, 1, kind)
    job.step(0), job.step(1)
    save({**job.state, "step": 2}, f"{directory}/saved", mesh=mesh)
    digests = job.digests()
    job.step(2), job.step(3)
    return digests, job.whole()


def load_job(
    shape: tuple[int, int], optimizer: str, directory: str, name: str, again: str | None, kind: str = "layers"
) -> Any:
    """The loaded state, and the result of two more steps; saved again before them."""
    mesh = mesh_of(shape)
    if mesh is None:
        return None
    job = Job(mesh, optimizer, 2, kind)
    assert load(job.state, f"{directory}/{name}", mesh=mesh)["step"] == 2
    digests = job.digests()
    if again is not None:
        save({**job.state, "step": 2}, f"{directory}/{again}", mesh=mesh)
    job.step(2), job.step(3)
    return digests, job.whole()


@pytest.fixture(scope="module")
def torch_pool() -> Iterator[WorkerPool]:
    with WorkerPool("torch-cpu", 4) as pool:
        yield pool


def first(results: list[Any]) -> Any:
    ranks = [x for x in results if x is not None]
    assert all(x[0] == ranks[0][0] for x in ranks)
    return ranks[0]


#: One for each kind of state.
IN_GATE = ("AdamW", "RMSprop", "SGD")


@pytest.mark.parametrize("optimizer", in_gate(OPTIMIZERS, IN_GATE))
def test_there_and_back(pool: Any, torch_pool: Any, tmp_path: Path, optimizer: str) -> None:
    """A checkpoint of torch on four ranks goes to MindSpore on two, and back to 2 x 2."""
    saved, trained = first(torch_pool.run(4, save_job, (1, 4), optimizer, str(tmp_path)))
    there, trained_there = first(pool.run(4, load_job, (1, 2), optimizer, str(tmp_path), "saved", "again"))
    back, trained_back = first(torch_pool.run(4, load_job, (2, 2), optimizer, str(tmp_path), "again", None))
    if optimizer in ("Adadelta", "RMSprop"):  # which count no steps on MindSpore, and do not need them on torch
        saved, there, back = (
            {name: x for name, x in found.items() if not name.endswith(".step")} for found in (saved, there, back)
        )
    assert there == saved and back == saved
    for name, x in trained.items():
        np.testing.assert_allclose(trained_there[name], x, rtol=1e-4, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(trained_back[name], x, rtol=1e-4, atol=2e-5, err_msg=name)


def test_from_mindspore(pool: Any, torch_pool: Any, tmp_path: Path) -> None:
    saved, trained = first(pool.run(4, save_job, (2, 2), "AdamW", str(tmp_path)))
    there, trained_there = first(torch_pool.run(4, load_job, (1, 4), "AdamW", str(tmp_path), "saved", None))
    assert there == saved
    for name, x in trained.items():
        np.testing.assert_allclose(trained_there[name], x, rtol=1e-4, atol=2e-5, err_msg=name)


def test_convolutions(pool: Any, torch_pool: Any, tmp_path: Path) -> None:
    """MindSpore's 1-D kernels have a dimension of size 1 that torch's lack: both load both, moments too."""
    saved, trained = first(torch_pool.run(4, save_job, (1, 2), "AdamW", str(tmp_path), "convolutions"))
    there, trained_there = first(
        pool.run(4, load_job, (1, 4), "AdamW", str(tmp_path), "saved", "again", "convolutions")
    )
    back, trained_back = first(
        torch_pool.run(4, load_job, (1, 3), "AdamW", str(tmp_path), "again", None, "convolutions")
    )
    assert there == saved and back == saved
    for name, x in trained.items():
        for other in (trained_there[name], trained_back[name]):
            np.testing.assert_allclose(other.reshape(x.shape), x, rtol=1e-4, atol=2e-5, err_msg=name)


def test_experts(pool: Any, torch_pool: Any, tmp_path: Path) -> None:
    """From whole experts on four ranks of torch to MindSpore's that are cut inside, and back to sharded ones."""
    saved = torch_pool.run(4, experts.save_job, "ep=4", str(tmp_path / "torch"))[0]
    inside = "ep=2, cut inside over tp=2"
    assert pool.run(4, experts.load_job, inside, str(tmp_path / "torch"))[0] == saved
    there = pool.run(4, experts.save_job, inside, str(tmp_path / "mindspore"))[0]
    back = torch_pool.run(4, experts.load_job, "ep=2, sharded over rest=2", str(tmp_path / "mindspore"))[0]
    assert len(saved) > 4 and back == there


def save_weights(shape: tuple[int, int], directory: str) -> Any:
    mesh = mesh_of(shape)
    if mesh is not None:
        save_pretrained(Job(mesh, "SGD", 1).model, directory, mesh=mesh)


def load_weights(shape: tuple[int, int], directory: str) -> Any:
    mesh = mesh_of(shape)
    if mesh is None:
        return None
    job = Job(mesh, "SGD", 2)
    load_pretrained(job.model, directory, mesh=mesh)
    return job.digests(), None


def test_weights_alone(pool: Any, torch_pool: Any, tmp_path: Path) -> None:
    """Files as Hugging Face has them, written by either framework for both."""
    found = []
    for i, other in enumerate((pool, torch_pool)):
        other.run(4, save_weights, (1, 4), str(tmp_path / str(i)))
        for reader in (pool, torch_pool):
            digests = first(reader.run(4, load_weights, (1, 2), str(tmp_path / str(i))))[0]
            found.append({name: x for name, x in digests.items() if "momentum" not in name})
    assert found == [found[0]] * 4 and len(found[0]) == 7


def example(out: Path, platform: str, *arguments: str) -> dict[str, Any]:
    """Run train_llama, which writes its record there, and return that."""
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": platform, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    command = [sys.executable, "train.py", "--steps", "100", "--out", str(out), *arguments]
    done = subprocess.run(
        command, cwd=ROOT / "examples" / "train_llama", env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.nightly
def test_example_goes_on_with_the_other_framework(tmp_path: Path) -> None:
    """train_llama: four steps of torch, then four of MindSpore, spread in another way; next to all eight steps on
    torch."""

    def train(platform: str, *arguments: str) -> dict[str, Any]:
        return example(tmp_path / f"{len(list(tmp_path.iterdir()))}.json", platform, *arguments)

    run = tmp_path / "run"
    whole = train("torch-cpu", "--tp", "2", "--until", "8", "--save", str(run), "--save-every", "4")
    assert sorted(path.name for path in run.iterdir()) == ["step-4", "step-8"]
    shutil.rmtree(run / "step-8")
    resumed = train("mindspore", "--tp", "1", "--dp", "2", "--until", "8", "--resume", str(run))
    assert resumed["first_step"] == 4
    for kind in ("sharded_losses", "unsharded_losses"):
        np.testing.assert_allclose(resumed[kind], whole[kind][4:], rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", ["1", "2"])
def test_example_with_experts(tmp_path: Path, tp: str) -> None:
    """Train on either framework; the program compares with a single process."""
    losses = []
    for platform in ("torch-cpu", "mindspore"):
        more = ("--tp", tp, "--dp", "2", "--experts", "4", "--until", "6")
        losses.append(example(tmp_path / f"{platform}.json", platform, *more)["sharded_losses"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
