"""`compare` names the module or the parameter of a planted fault: forty kinds, in forward or only in backward, in
optimizers, and on one of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
    replicate,
)
from hyper_parallel.debug import Comparison, compare, record
from hyper_parallel.testing import spmd
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.spmd import on_mesh

FEATURES, HEADS, LENGTH, WORDS = 16, 2, 6, 13


class Attention(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        self.scale = (FEATURES / HEADS) ** -0.5

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, FEATURES // HEADS)).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * self.scale
        return scores.masked_fill(~self.mask, -1e9).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(w(x)) for w in (self.wq, self.wk, self.wv))
        return self.wo((self.weights(q, k) @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, FEATURES)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(FEATURES), Attention()
        self.norm2, self.mlp = nn.LayerNorm(FEATURES), Mlp()

    def attend(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm1(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        return x + self.mlp(self.norm2(x))


class Centre(nn.Module):
    """A module with a buffer that its forward writes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        return y


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, FEATURES), nn.Embedding(LENGTH, FEATURES)
        self.centre = Centre()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, WORDS)

    def positions(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[1])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.centre(self.words(ids) + self.places(self.positions(ids)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Run:
    """A training run, of which a fault changes something before it begins.

    Attributes:
        before: is called before each step with its number.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Gpt()
        self.optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, 1e-2)
        self.before: Callable[[int], None] = lambda step: None
        self.after: Callable[[int], None] = lambda step: None
        self.ids = torch.randint(0, WORDS, (2, 4, LENGTH), generator=torch.Generator().manual_seed(3))
        self.loss: Callable[[Tensor, Tensor], Tensor] = lambda y, ids: F.cross_entropy(
            y[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )

    def __call__(self, path: Path | str) -> list[float]:
        """Train two steps and record them; returns the losses."""
        optimizer = self.optimizer(self.model.parameters())
        losses = []
        with record(path, self.model):
            for step, ids in enumerate(self.ids):
                torch.manual_seed(step)
                self.before(step)
                loss = self.loss(self.model(ids), ids)
                loss.backward()
                self.after(step)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses


def module(run: Run, path: str) -> Any:
    return run.model.get_submodule(path)


def replaced(path: str, forward: Callable[[Any, Any], Any]) -> Callable[[Run], None]:
    """A fault: the module computes ``forward(its own forward, x)``."""

    def plant(run: Run) -> None:
        found = module(run, path)
        own = found.forward
        found.forward = lambda x: forward(own, x)

    return plant


def changed(path: str, **attributes: Any) -> Callable[[Run], None]:
    """A fault: attributes of a module are others."""
    return lambda run: vars(module(run, path)).update(attributes)


def written(path: str, name: str, write: Callable[[Tensor], Tensor]) -> Callable[[Run], None]:
    """A fault: a parameter has other values."""

    def plant(run: Run) -> None:
        p = getattr(module(run, path), name)
        p.data = write(p.data)

    return plant


def given(name: str, value: Any) -> Callable[[Run], None]:
    """A fault of the run itself."""
    return lambda run: setattr(run, name, value)


def on_gradient(path: str, name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Run], None]:
    """A fault: a parameter's gradient is another."""
    return lambda run: getattr(module(run, path), name).register_hook(change)


class Backward(torch.autograd.Function):
    """The identity, with ``change(cotangent)`` as its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return ctx.change(cotangent), None


def backwards(path: str, change: Callable[[Tensor], Tensor]) -> Callable[[Run], None]:
    """A fault: a module's backward gives its input another cotangent."""
    return replaced(path, lambda own, x: own(Backward.apply(x, change)))


def method(path: str, name: str, new: Callable[..., Any]) -> Callable[[Run], None]:
    """A fault in the code of a module: ``new(module, own method, ...)`` in place of a method."""

    def plant(run: Run) -> None:
        found = module(run, path)
        own = getattr(found, name)
        setattr(found, name, lambda *args: new(found, own, *args))

    return plant


def optimizer(make: Callable[..., Any], **options: Any) -> Callable[[Run], None]:
    return given("optimizer", lambda parameters: make(parameters, 1e-2, **options))


def decay_of_norm(run: Run) -> None:
    """The last norm alone decays otherwise."""
    norm = [*module(run, "norm").parameters()]
    rest = [p for p in run.model.parameters() if not any(p is q for q in norm)]
    run.optimizer = lambda _: torch.optim.AdamW([{"params": rest}, {"params": norm, "weight_decay": 0.3}], 1e-2)


def stale_buffer(run: Run) -> None:
    """A buffer is not written in the first step."""
    centre = module(run, "centre")
    run.after = lambda step: centre.mean.zero_() if step == 0 else None  # type: ignore[assignment]


def kept_gradient(run: Run) -> None:
    """One gradient of the first step is added to that of the second."""
    weight, kept = module(run, "layers.1.mlp.up").weight, []

    def after(step: int) -> None:
        kept.append(weight.grad.clone())
        if step:
            weight.grad += kept[0]

    run.after = after


def shifted_mask(run: Run) -> None:
    attention = module(run, "layers.0.attention")
    own = attention.weights
    attention.weights = lambda q, k: (
        (q @ k.transpose(-1, -2) * attention.scale).masked_fill(~attention.mask.tril(-1), -1e9).softmax(-1)
        if own
        else None
    )


def in_bfloat16(own: Any, x: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), own.__self__.weight.bfloat16(), own.__self__.bias.bfloat16()).float()


def skipped_update(run: Run) -> None:
    module(run, "head").bias.requires_grad_(False)


def once(own: Any, x: Tensor) -> Tensor:
    """A lookup whose backward writes, and does not add, where an index comes twice."""
    weight = own.__self__.weight
    y = F.embedding(x, weight.detach())
    first = torch.zeros(WORDS, dtype=torch.bool)
    keep = []
    for i in x.flatten().tolist():
        keep.append(not first[i])
        first[i] = True
    z = F.embedding(x, weight)
    kept = torch.tensor(keep).reshape(*x.shape, 1)
    return torch.where(kept, z, y)


Plant = Callable[[Run], Any]
#: kind -> what plants it, and the module or parameter that is to be named ("update" for any update).
FAULTS: dict[str, tuple[Plant, str]] = {
    "epsilon of a norm": (changed("layers.1.norm1", eps=1e-3), "layers.1.norm1"),
    "small epsilon of a norm": (changed("layers.0.norm2", eps=1e-6), "layers.0.norm2"),
    "transposed weight": (written("layers.0.attention.wq", "weight", Tensor.t), "layers.0.attention.wq.weight"),
    "one element of a weight": (
        written("layers.1.mlp.up", "weight", lambda p: p + F.one_hot(torch.tensor([3]), FEATURES) * 1e-3),
        "layers.1.mlp.up.weight",
    ),
    "other activation": (changed("layers.1.mlp.act", approximate="tanh"), "layers.1.mlp.act"),
    "stream of dropout": (
        replaced("layers.0.mlp.dropout", lambda own, x: (torch.rand(1), own(x))[1]),
        "layers.0.mlp.dropout",
    ),
    "dropout without its scale": (
        replaced("layers.1.mlp.dropout", lambda own, x: own(x) * 0.9),
        "layers.1.mlp.dropout",
    ),
    "scale of attention": (changed("layers.0.attention", scale=1 / (FEATURES / HEADS)), "layers.0.attention"),
    "mask of attention off by one": (shifted_mask, "layers.0.attention"),
    "no mask": (
        method("layers.1.attention", "weights", lambda m, own, q, k: (q @ k.transpose(-1, -2) * m.scale).softmax(-1)),
        "layers.1.attention",
    ),
    "heads taken apart otherwise": (
        method("layers.0.attention", "heads", lambda m, own, x: x.unflatten(-1, (-1, HEADS)).permute(0, 3, 1, 2)),
        "layers.0.attention",
    ),
    "queries and keys exchanged": (
        method("layers.1.attention", "weights", lambda m, own, q, k: own(k, q)),
        "layers.1.attention",
    ),
    "no residual": (method("layers.1", "attend", lambda m, own, x: m.attention(m.norm1(x))), "layers.1"),
    "scaled residual": (method("layers.0", "attend", lambda m, own, x: own(x) - 0.01 * x), "layers.0"),
    "norm behind the layer": (method("layers.0", "attend", lambda m, own, x: m.norm1(x + m.attention(x))), "layers.0"),
    "positions off by one": (
        method("", "positions", lambda m, own, ids: (own(ids) + 1).clamp(max=LENGTH - 1)),
        "Gpt",
    ),
    "scaled embedding": (replaced("words", lambda own, x: own(x) * FEATURES**0.5), "words"),
    "no bias": (
        replaced("layers.0.attention.wo", lambda own, x: F.linear(x, own.__self__.weight)),
        "layers.0.attention.wo",
    ),
    "one layer in bfloat16": (replaced("layers.1.mlp.down", in_bfloat16), "layers.1.mlp.down"),
    "scaled logits": (replaced("head", lambda own, x: own(x) * 1.01), "head"),
    "stale buffer": (stale_buffer, "centre.mean"),
    "NaN in one element": (
        replaced("layers.1.norm2", lambda own, x: own(x).index_fill(1, torch.tensor([2]), float("nan"))),
        "layers.1.norm2",
    ),
    "other batch": (
        lambda run: setattr(run, "ids", run.ids.roll(1, -1)),
        "the inputs of the run",
    ),
    "labels not shifted": (
        given("loss", lambda y, ids: F.cross_entropy(y.flatten(0, 1), ids.flatten())),
        "the loss",
    ),
    "sum of losses for their mean": (
        given("loss", lambda y, ids: F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")),
        "the loss",
    ),
    "gradient of a weight halved": (
        on_gradient("layers.0.attention.wv", "weight", lambda g: g / 2),
        "layers.0.attention.wv.weight",
    ),
    "gradient of a bias summed too often": (
        on_gradient("layers.1.mlp.up", "bias", lambda g: g * 4),
        "layers.1.mlp.up.bias",
    ),
    "backward of a module halved": (backwards("layers.1.mlp.act", lambda g: g / 2), "layers.1.mlp.act"),
    "backward of a norm without its mean": (
        backwards("layers.0.norm2", lambda g: g + g.mean(-1, keepdim=True) + 0.01 * g),
        "layers.0.norm2",
    ),
    "backward rounded to bfloat16": (
        backwards("layers.0.mlp.down", lambda g: g.bfloat16().float()),
        "layers.0.mlp.down",
    ),
    "backward of softmax": (
        method(
            "layers.0.attention",
            "weights",
            lambda m, own, q, k: Backward.apply(own(q, k), lambda g: g - g.mean(1, True)),
        ),
        "layers.0.attention",
    ),
    "gradient of a branch halved": (
        method("layers.1", "attend", lambda m, own, x: x + Backward.apply(m.attention(m.norm1(x)), lambda g: g / 2)),
        "layers.1",
    ),
    "keys detached": (
        method("layers.1.attention", "weights", lambda m, own, q, k: own(q, k.detach())),
        "layers.1.attention.wk.weight",
    ),
    "lookup that adds no gradients": (replaced("words", once), "words.weight"),
    "gradient of the step before": (kept_gradient, "layers.1.mlp.up.weight"),
    "frozen parameter": (skipped_update, "head.bias"),
    "epsilon of the optimizer": (optimizer(torch.optim.AdamW, eps=1e-6), "update"),
    "no decay": (optimizer(torch.optim.AdamW, weight_decay=0.0), "update"),
    "decay added to gradients": (optimizer(torch.optim.Adam, weight_decay=1e-2), "update"),
    "beta of the optimizer": (optimizer(torch.optim.AdamW, betas=(0.9, 0.99)), "update"),
    "decay of one norm": (decay_of_norm, "norm.weight"),
}
#: Those of the gate: of each part of the comparison one.
GATE = (
    "small epsilon of a norm",
    "transposed weight",
    "no residual",
    "stale buffer",
    "labels not shifted",
    "backward of a module halved",
    "gradient of a branch halved",
    "decay of one norm",
)


def is_named(found: Comparison, expected: str) -> bool:
    first = found.first
    return first is not None and (found.culprit == expected or first.kind == expected == "update")


def misnamed(folder: Path, names: Any) -> list[str]:
    """The faults whose module is not named."""
    Run()(folder / "right")
    wrong = []
    for i, name in enumerate(names):
        plant, expected = FAULTS[name]
        run = Run()
        plant(run)
        run(folder / f"{i}")
        found = compare(folder / "right", folder / f"{i}")
        if not is_named(found, expected):
            wrong.append(f"{name}: {expected!r} is to be named, and found is {found.culprit!r}\n{found}")
    return wrong


def test_faults_on_one_device(tmp_path: Path) -> None:
    wrong = misnamed(tmp_path, FAULTS if everything() else GATE)
    assert len(wrong) <= (1 if everything() else 0), "\n\n".join(wrong)


def test_equal_runs_agree(tmp_path: Path) -> None:
    for name in "ab":
        Run()(tmp_path / name)
    assert not compare(tmp_path / "a", tmp_path / "b").departs


PLAN = {
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.mlp.up": ColwiseParallel(),
    "layers.*.mlp.down": RowwiseParallel(),
}


def without_statistics(run: Run) -> None:
    """Leave out what data-parallel ranks compute of their own rows."""
    run.model.centre = nn.Identity()  # type: ignore[assignment]
    for block in run.model.layers:
        block.mlp.dropout.p = 0.0  # type: ignore[union-attr]


def on_rank_1(path: str, change: Callable[[Any], Any]) -> Callable[[Run], None]:
    return replaced(path, lambda own, x: change(own(x)) if spmd.rank else own(x))


def unreduced(run: Run) -> None:
    """The output of a row-wise layer is a summand on each rank, and nothing adds up."""
    layer = module(run, "layers.1.mlp.down")
    layer.forward = lambda x: F.linear(x, layer.weight.to_local(), layer.bias.to_local())


def unreduced_gradient(run: Run) -> None:
    """The gradient of a norm is another on each rank."""
    weight = module(run, "layers.0.norm1").weight
    run.after = lambda step: weight.grad.mul_(1 + 0.5 * spmd.rank) if not step else None


#: The same on two ranks: the way in which the model is spread, the function that plants the fault, and the name.
ON_RANKS: dict[str, tuple[str, Plant, str]] = {
    "scale on one rank": ("tp", on_rank_1("layers.0.mlp.down", lambda y: y * 1.001), "layers.0.mlp.down"),
    "no all-reduce": ("tp", unreduced, "layers.1.mlp.down"),
    "no all-reduce of the gradient of a norm": ("tp", unreduced_gradient, "layers.0.norm1.weight"),
    "same rows on both ranks": ("dp", lambda run: setattr(run, "ids", Run().ids[:, :2]), "the inputs of the run"),
    "norm of one rank's rows": (
        "dp",
        on_rank_1("layers.1.norm2", lambda y: y.roll(1, 0)),
        "layers.1.norm2",
    ),
}


@on_mesh(2)
def run_on_ranks(mesh: Any, folder: str, names: list[str]) -> None:
    if spmd.rank == 0:
        run = Run()
        without_statistics(run)
        run(f"{folder}/right")
    for name in [*dict.fromkeys(way for way, _, _ in ON_RANKS.values()), *names]:
        way, plant, _ = ON_RANKS.get(name, (name, lambda run: None, ""))
        run = Run()
        without_statistics(run)
        if way == "dp":
            run.ids = run.ids.chunk(2, 1)[spmd.rank]
            replicate(run.model, mesh)
        else:
            parallelize_module(run.model, mesh, PLAN)
        plant(run)
        run(f"{folder}/{name}")


@pytest.mark.nightly  # tests/unit/test_records.py has copies that differ, and the conformance suite models on ranks
def test_faults_on_ranks(pool: Any, tmp_path: Path) -> None:
    names = [*ON_RANKS]
    pool.run(2, run_on_ranks, str(tmp_path), names)
    for way in ("tp", "dp"):
        found = compare(tmp_path / "right", tmp_path / way)
        assert not (found.departs or found.only_a or found.only_b or found.unfit), str(found)
    found = {name: compare(tmp_path / "right", tmp_path / name) for name in names}
    wrong = [f"{name}: {found[name]}" for name in names if not is_named(found[name], ON_RANKS[name][2])]
    assert not wrong, "\n\n".join(wrong)
