"""A trainer of the shape that trainers of large models have, on MindSpore. It has a state dict taken once before the
first forward, accumulation, and clipping over mixed meshes. It has a learning rate that falls, saves in the middle of
training, and a resume."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Tensor, experimental, ops

import hyper_parallel as hp
from hyper_parallel.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from hyper_parallel.mindspore import value_and_grad
from tests.mindspore.decoder import LENGTH, SIZES, Decoder, plan
from tests.mindspore.nets import whole
from tests.support.trainer_setups import Setup

#: Samples of a step, over all ranks and micro batches.
SAMPLES = 12
IGNORED = -100
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Transformer(Decoder):
    """The decoder, with the sum of its losses over labels that count. Its sizes do not divide by the ranks."""

    def __init__(self) -> None:
        super().__init__("uneven", scalar=True)
        for p in self.get_parameters():
            p.set_dtype(ms.float64)

    def construct(self, ids: Any, targets: Any) -> Any:
        logits = self.logits(ids)
        return ops.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORED, reduction="sum") * self.gain


def parallel(model: Any, setup: Setup, mesh: Any) -> None:
    if setup.tp > 1:
        hp.parallelize_module(model, mesh["tp"], plan(setup.sequence, loss_parallel=True))
    if setup.recompute:
        model.block.recompute(use_reentrant=False)
    if setup.own_replicate:
        hp.replicate(model, mesh["dp_replicate"])
    elif setup.batch_ranks > 1:
        data = mesh["dp_replicate", "dp_shard"] if setup.replicate > 1 else mesh["dp_shard"]
        for unit in (model.block.attention, model.block, model):
            hp.fully_shard(unit, mesh=data, reshard_after_forward=setup.reshard)
            unit.set_gradient_divide_factor(1.0)


class ModelWrapper:
    """The state dict of a model, taken once."""

    def __init__(self, model: Any) -> None:
        self.model, self.kept = model, get_model_state_dict(model)

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict)


class Optimizers:
    """Two optimizers, saved as one under flat names."""

    def __init__(self, model: Any) -> None:
        self.model = model
        trained = [*model.trainable_params()]
        self.members = [[i for i, p in enumerate(trained) if (p.ndim > 1) is matrix] for matrix in (True, False)]
        self.each = [
            experimental.optim.AdamW([trained[i] for i in members], rate, weight_decay=decay)
            for members, rate, decay in zip(self.members, (0.02, 0.01), (0.1, 0.0), strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for optimizer in self.each:
            found |= get_optimizer_state_dict(self.model, optimizer, options=FLAT)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self.each:
            set_optimizer_state_dict(self.model, optimizer, state_dict, options=FLAT)

    def step(self, gradients: list[Any], fraction: float) -> None:
        """One step of each, with this fraction of the rates."""
        # MindSpore compiles the steps of its optimizers, which takes seconds for each; test_optimizers.py does.
        with mock.patch.dict(os.environ, MS_JIT="0"):
            for optimizer, members, rate in zip(self.each, self.members, (0.02, 0.01), strict=True):
                for group in optimizer.param_groups:
                    ops.assign(group["lr"], Tensor(rate * fraction, ms.float32))
                optimizer(tuple(gradients[i] for i in members))


class Trainer:
    """Args:
    setup: how it is parallelised.
    mesh: of that, None for a single device.
    seed: of the weights.
    """

    def __init__(self, setup: Setup, mesh: Any, seed: int = 0) -> None:
        self.setup, self.mesh, self.model = setup, mesh, Transformer()
        rng = np.random.default_rng(seed)
        for p in self.model.get_parameters():
            p.set_data(Tensor(rng.standard_normal(p.shape) * 0.3, ms.float64))
        if mesh is not None:
            parallel(self.model, setup, mesh)
        self.wrapper, self.optimizers = ModelWrapper(self.model), Optimizers(self.model)
        self.position = self.step = 0
        self.history: list[tuple[float, float]] = []

    def states(self) -> dict[str, Any]:
        """The model's and optimizer's states, keyed as in a checkpoint."""
        return {"model": self.wrapper, "optimizer": self.optimizers, "train_state": self}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.position = int(state_dict["step"]), int(state_dict["position"])

    def rank(self) -> int:
        """The rank among those with batches of their own."""
        if self.mesh is None:
            return 0
        return self.mesh.get_local_rank("dp_replicate") * self.setup.shard + self.mesh.get_local_rank("dp_shard")

    def train_step(self) -> None:
        setup, model, trained = self.setup, self.model, [*self.model.trainable_params()]
        first, self.position = self.position, self.position + SAMPLES
        count = int((batch(range(first, first + SAMPLES))[1] != IGNORED).sum())
        part = SAMPLES // setup.batch_ranks // (3 if setup.batch_ranks == 4 else 2)
        starts = [*range(first, first + SAMPLES, part * setup.batch_ranks)]
        keeps = self.step % 2 == 1 and hasattr(model, "set_requires_gradient_sync")
        total, gradients = 0.0, None
        for start in starts:
            mine = start + self.rank() * part
            given = [Tensor(x) for x in batch(range(mine, mine + part))]
            if keeps:
                model.set_requires_gradient_sync(start == starts[-1])

            def loss(given: list[Tensor] = given) -> Any:
                # The gradients of `replicate` are averages.
                return model(*given) * (setup.replicate if setup.own_replicate else 1) / count

            with hp.loss_parallel():
                value, new = value_and_grad(loss, None, trained)()
            total += float(whole(value)) / (setup.replicate if setup.own_replicate else 1)
            # Kept gradients come with those of the last backward.
            gradients = new if gradients is None or keeps else [a + b for a, b in zip(gradients, new, strict=True)]
        # Of plain parameters that are not used MindSpore gives zeros in single precision.
        found = [g if isinstance(g, hp.DTensor) else g.astype(ms.float64) for g in gradients]
        norm = float(np.sqrt(sum((whole(g) ** 2).sum() for g in found)))
        # MindSpore gives the clipped gradient of a parameter without dimensions one.
        clipped = [g.reshape(p.shape) for g, p in zip(ops.clip_by_global_norm(found, 0.5), trained, strict=True)]
        self.optimizers.step(clipped, 1 / (1 + self.step))
        self.step += 1
        self.history.append((self.over_batches(total), norm))

    def over_batches(self, value: float) -> float:
        if self.mesh is None:
            return value
        platform = self.mesh.platform
        for name in ("dp_replicate", "dp_shard"):
            mesh = self.mesh[name]
            if mesh.size() > 1:
                value = sum(platform.all_gather_object(value, mesh.platform_group(0), mesh.size()))
        return value


def batch(samples: range) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels by the numbers of the samples; some have fewer labels that count."""
    rows = []
    for number in samples:
        row = np.random.default_rng(number).integers(0, SIZES["uneven"][0], LENGTH + 1).astype(np.int32)
        row[LENGTH + 1 - number % 5 :] = IGNORED
        rows.append(row)
    words = np.stack(rows)
    return np.maximum(words[:, :-1], 0), words[:, 1:]


def trained(trainer: Trainer, steps: int, after: Callable[[Trainer], None] = lambda trainer: None) -> Trainer:
    """``steps`` more, with a call after each."""
    for _ in range(steps):
        trainer.train_step()
        after(trainer)
    return trainer
