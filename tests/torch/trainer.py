"""A trainer of the shape that trainers of large models have. It is built on meta, with state dict wrappers made once
before the first forward. It has accumulation, clipping, saves in the middle of training, and a resume from any of
them."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import loss_parallel as loss_parallel_of_torch

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    fully_shard,
    loss_parallel,
    parallelize_module,
    replicate,
)
from tests.support.trainer_setups import Setup
from tests.torch.support import device, full

VOCABULARY, FEATURES, HIDDEN, HEADS, LENGTH = 13, 12, 10, 6, 6
#: Samples of a step, over all ranks and micro batches.
SAMPLES = 12


# ---------------------------------------------------------------------- the model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))

    def forward(self, x: Any, rotation: Any) -> Any:
        q, k, v = (w(x).unflatten(-1, (-1, FEATURES // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = (y * rotation[0] + y.roll(1, -1) * rotation[1] for y in (q, k))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(FEATURES, HIDDEN, bias=False), nn.Linear(FEATURES, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Gain(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(()))

    def forward(self, x: Any) -> Any:
        return x * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(FEATURES), nn.RMSNorm(FEATURES)
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.gain = Gain()

    def forward(self, x: Any, rotation: Any) -> Any:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.gain(self.feed_forward(self.ffn_norm(x)))


class Transformer(nn.Module):
    """Gives logits. Linear layers divide evenly over two ranks, vocabulary and hidden features over none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, FEATURES)
        self.register_buffer("rotation", self.rotations(), persistent=False)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm = nn.RMSNorm(FEATURES)
        self.output = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def rotations(self) -> torch.Tensor:
        angles = torch.outer(torch.arange(LENGTH), torch.arange(1, FEATURES // HEADS + 1) / 3)
        return torch.stack([angles.cos(), angles.sin()])

    def init_weights(self) -> None:
        """Numbers of the default generator, after `to_empty`."""
        self.rotation: torch.Tensor
        with torch.no_grad():
            self.rotation.copy_(self.rotations())
        nn.init.normal_(self.tok_embeddings.weight)
        for block in self.layers.values():
            for layer in block.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.trunc_normal_(layer.weight, std=0.3)
                elif isinstance(layer, nn.RMSNorm):
                    layer.reset_parameters()
                elif isinstance(layer, Gain):
                    nn.init.constant_(layer.weight, 0.7)
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.output.weight, std=0.3)

    def forward(self, ids: Any) -> Any:
        x = self.tok_embeddings(ids)
        for block in self.layers.values():
            x = block(x, self.rotation)
        return self.output(self.norm(x))


def plan(sequence: bool) -> dict[str, Any]:
    """The plan; without sequence parallelism it leaves norms and gains out, and data parallelism alone places them."""
    if not sequence:
        names = {"attention.w[qkv]": "colwise", "attention.wo": "rowwise", "feed_forward.w[13]": "colwise"}
        block = {f"layers.*.{name}": style for name, style in {**names, "feed_forward.w2": "rowwise"}.items()}
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        return {"tok_embeddings": RowwiseParallel(input_layouts=Replicate()), **block, "output": head}
    part, whole = Shard(1), Replicate()
    styles = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(part, None), desired_input_layouts=(whole, None)),
        "attention.w[qkv]": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=part),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
        "feed_forward.w[13]": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=part),
        "gain": SequenceParallel(use_local_output=True),
    }
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=part),
        **{f"layers.*.{name}": style for name, style in styles.items()},
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
    }


# ---------------------------------------------------------------------- how it is parallelised


def parallel(model: nn.Module, setup: Setup, mesh: Any) -> nn.Module:
    layers: Any = model.layers
    if setup.tp > 1:
        parallelize_module(model, mesh["tp"], plan(setup.sequence))
    if setup.recompute:
        for name, block in [*layers.items()]:
            layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)
    if setup.own_replicate:
        replicate(model, mesh["dp_replicate"])
    elif setup.batch_ranks > 1:
        data = mesh["dp_replicate", "dp_shard"] if setup.replicate > 1 else mesh["dp_shard"]
        for block in layers.values():
            fully_shard(block, mesh=data, reshard_after_forward=setup.reshard)
        fully_shard(model, mesh=data)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
    return model


# ---------------------------------------------------------------------- saved state


class ModelWrapper:
    """The state dict of a model, taken once."""

    def __init__(self, model: nn.Module, helpers: Any) -> None:
        self.model, self.helpers = model, helpers
        self.kept = helpers.get_model_state_dict(model)

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.helpers.set_model_state_dict(self.model, state_dict, options=self.helpers.StateDictOptions(strict=False))
        self.kept = self.helpers.get_model_state_dict(self.model)


class Optimizers:
    """Two optimizers, saved as one under flat names."""

    def __init__(self, model: nn.Module, helpers: Any) -> None:
        self.model, self.helpers = model, helpers
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        self.each = [
            torch.optim.AdamW(matrices, lr=0.02, weight_decay=0.1),
            torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0),
        ]

    def state_dict(self) -> dict[str, Any]:
        options = self.helpers.StateDictOptions(flatten_optimizer_state_dict=True)
        found: dict[str, Any] = {}
        for optimizer in self.each:
            found |= self.helpers.get_optimizer_state_dict(self.model, optimizer, options=options)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options = self.helpers.StateDictOptions(flatten_optimizer_state_dict=True)
        for optimizer in self.each:
            self.helpers.set_optimizer_state_dict(self.model, optimizer, state_dict, options=options)

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()
            optimizer.zero_grad()


class Schedulers:
    def __init__(self, optimizers: Optimizers) -> None:
        self.each = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers.each]

    def state_dict(self) -> dict[str, Any]:
        return {str(i): scheduler.state_dict() for i, scheduler in enumerate(self.each)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for i, scheduler in enumerate(self.each):
            scheduler.load_state_dict(dict(state_dict[str(i)]))

    def step(self) -> None:
        for scheduler in self.each:
            scheduler.step()


class Loader:
    """Samples by their number; its state says at which one it is, in bytes."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": pickle.dumps(self.position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = pickle.loads(state_dict["position"])

    def micro_batches(self, setup: Setup, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The ids and labels of this rank; some samples have more labels than others."""
        count = SAMPLES // setup.batch_ranks // (3 if setup.batch_ranks == 4 else 2)
        first, self.position = self.position, self.position + SAMPLES
        for start in range(first, first + SAMPLES, count * setup.batch_ranks):
            yield batch(range(start + rank * count, start + (rank + 1) * count))

    def labels_of_step(self) -> int:
        return int((batch(range(self.position, self.position + SAMPLES))[1] != -100).sum())


def batch(samples: range) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for number in samples:
        row = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(number))
        row[LENGTH + 1 - number % 5 :] = -100
        rows.append(row)
    words = torch.stack(rows).to(device())
    return words[:, :-1].clamp(min=0), words[:, 1:]


# ---------------------------------------------------------------------- the trainer


class Trainer:
    """Args:
    setup: how it is parallelised.
    mesh: of that, None for a single device.
    helpers: ``torch.distributed.checkpoint.state_dict``, or the module here that has its names.
    seed: of the weights.
    """

    def __init__(self, setup: Setup, mesh: Any, helpers: Any, seed: int = 0) -> None:
        self.setup, self.mesh = setup, mesh
        with torch.device("meta"):
            model = Transformer().double()
        self.model = parallel(model, setup, mesh)
        self.model.to_empty(device=device())
        torch.manual_seed(seed)
        self.model.init_weights()
        self.model.train()
        self.wrapper = ModelWrapper(self.model, helpers)
        self.optimizers = Optimizers(self.model, helpers)
        self.schedulers, self.loader, self.step = Schedulers(self.optimizers), Loader(), 0
        self.history: list[tuple[float, float]] = []

    def states(self) -> dict[str, Any]:
        """The model's and optimizer's states, keyed as in a checkpoint."""
        parts = {"optimizer": self.optimizers, "lr_scheduler": self.schedulers, "dataloader": self.loader}
        return {"model": self.wrapper, **parts, "train_state": self}

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])

    def loss(self, ids: torch.Tensor, labels: torch.Tensor, count: int) -> Any:
        logits = self.model(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count

    def train_step(self) -> None:
        rank = 0 if self.mesh is None else self.mesh.get_local_rank("dp_replicate") * self.setup.shard
        rank += 0 if self.mesh is None else self.mesh.get_local_rank("dp_shard")
        count, total = self.loader.labels_of_step(), 0.0
        context: Any = contextlib.nullcontext
        if self.setup.tp > 1:
            context = (loss_parallel, loss_parallel_of_torch)[self.step % 2]
        for ids, labels in self.loader.micro_batches(self.setup, rank):
            with context():
                loss = self.loss(ids, labels, count)
                if self.setup.own_replicate:
                    loss = loss * self.setup.replicate  # its gradients are averages
                loss.backward()
            total += full(loss).item() / (self.setup.replicate if self.setup.own_replicate else 1)
        norm = self.clip(0.5)
        self.optimizers.step()
        self.schedulers.step()
        self.step += 1
        self.history.append((self.over_batches(total), norm))

    def clip(self, limit: float) -> float:
        """The norm of all gradients, which may be on several meshes."""
        parameters = [*self.model.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, error_if_nonfinite=True)
        if self.mesh is not None and any(isinstance(g, DTensor) for g in gradients):
            assert isinstance(norm, DTensor) and all(p.is_replicate() for p in norm.placements)
        norm = full(norm)
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm.item()

    def over_batches(self, value: float) -> float:
        if self.mesh is None:
            return value
        x = torch.tensor(value, dtype=torch.float64, device=device())
        for name in ("dp_replicate", "dp_shard"):
            dist.all_reduce(x, group=self.mesh[name].get_group())
        return x.item()


def trained(trainer: Trainer, steps: int, after: Callable[[Trainer], None] = lambda trainer: None) -> Trainer:
    """``steps`` more, with a call after each."""
    for _ in range(steps):
        trainer.train_step()
        after(trainer)
    return trainer
