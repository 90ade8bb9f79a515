"""`compare` names the module or the parameter of a planted fault on MindSpore, as tests/torch does for torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.experimental.optim import AdamW

from hyper_parallel import get_platform
from hyper_parallel.debug import compare, record
from hyper_parallel.testing.extent import everything

FEATURES, HEADS, LENGTH, WORDS = 16, 2, 6, 13


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Dense(FEATURES, FEATURES) for _ in range(4))
        self.scale, self.diagonal = (FEATURES / HEADS) ** -0.5, 1

    def heads(self, x: Any) -> Any:
        return x.reshape((*x.shape[:2], HEADS, -1)).swapaxes(1, 2)

    def weights(self, q: Any, k: Any) -> Any:
        mask = Tensor(np.triu(np.full((LENGTH, LENGTH), -1e9, np.float32), self.diagonal))
        return ops.softmax(mint.matmul(q, k.swapaxes(2, 3)) * self.scale + mask, -1)

    def construct(self, x: Any) -> Any:
        q, k, v = self.heads(self.wq(x)), self.heads(self.wk(x)), self.heads(self.wv(x))
        y = mint.matmul(self.weights(q, k), v).swapaxes(1, 2)
        return self.wo(y.reshape((*y.shape[:2], FEATURES)))


class Mlp(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Dense(FEATURES, 32), nn.GELU(approximate=False), nn.Dense(32, FEATURES)

    def construct(self, x: Any) -> Any:
        return self.down(self.act(self.up(x)))


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm((FEATURES,)), Attention()
        self.norm2, self.mlp = nn.LayerNorm((FEATURES,)), Mlp()

    def attend(self, x: Any) -> Any:
        return x + self.attention(self.norm1(x))

    def construct(self, x: Any) -> Any:
        x = self.attend(x)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, FEATURES)
        self.layers = nn.CellList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm((FEATURES,)), nn.Dense(FEATURES, WORDS)

    def construct(self, ids: Any) -> Any:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Run:
    """A training run, of which a fault changes something before it begins."""

    def __init__(self) -> None:
        self.model, rng = Gpt(), np.random.default_rng(0)
        for _, p in get_platform().saved_tensors(self.model):
            p.set_data(Tensor((rng.standard_normal(p.shape) * 0.3).astype(np.float32)))
        self.options: dict[str, Any] = {}
        self.ids = rng.integers(0, WORDS, (2, 4, LENGTH)).astype(np.int32)
        self.shift = 1
        self.gradients: Callable[[tuple, list[str]], tuple] = lambda gradients, names: gradients

    def __call__(self, path: Path) -> None:
        """Train two steps and record them."""
        weights = self.model.trainable_params()
        names = {id(p): name for name, p in get_platform().saved_tensors(self.model)}
        optimizer = AdamW(weights, 1e-2, **self.options)

        def loss(ids: Any) -> Any:
            y = self.model(ids)[:, : LENGTH - 1].reshape((-1, WORDS))
            return ops.cross_entropy(y, ids[:, self.shift : self.shift + LENGTH - 1].reshape((-1,)))

        step = ms.value_and_grad(loss, None, weights)
        with record(path, self.model):
            for ids in self.ids:
                _, gradients = step(Tensor(ids))
                # MindSpore compiles the steps of its optimizers, which takes seconds for each.
                with mock.patch.dict(os.environ, MS_JIT="0"):
                    optimizer(self.gradients(gradients, [names[id(p)] for p in weights]))


def cell(run: Run, path: str) -> Any:
    return dict(run.model.cells_and_names())[path]


def replaced(path: str, construct: Callable[[Any, Any], Any]) -> Callable[[Run], None]:
    """A fault: the cell computes ``construct(its own construct, x)``."""

    def plant(run: Run) -> None:
        found = cell(run, path)
        own = found.construct
        found.construct = lambda x: construct(own, x)

    return plant


def changed(path: str, **attributes: Any) -> Callable[[Run], None]:
    """A fault: attributes of a cell are others."""

    def plant(run: Run) -> None:
        for name, value in attributes.items():
            setattr(cell(run, path), name, value)

    return plant


def method(path: str, name: str, new: Callable[..., Any]) -> Callable[[Run], None]:
    """A fault in the code of a cell: ``new(cell, own method, ...)`` in place of a method."""

    def plant(run: Run) -> None:
        found = cell(run, path)
        own = getattr(found, name)
        object.__setattr__(found, name, lambda *args: new(found, own, *args))

    return plant


def gradient_of(name: str, factor: float) -> Callable[[Run], None]:
    """A fault: a parameter's gradient is another."""

    def plant(run: Run) -> None:
        run.gradients = lambda gradients, names: tuple(
            g * factor if n == name else g for g, n in zip(gradients, names, strict=True)
        )

    return plant


def backwards(factor: float) -> Callable[[Any], Any]:
    """The identity, with a backward that is ``factor`` times as large."""
    platform = get_platform()
    return platform.autograd_function(lambda ctx, x: platform.detach(x), lambda ctx, g: g * factor)


def transposed(run: Run) -> None:
    weight = cell(run, "layers.0.attention.wq").weight
    weight.set_data(Tensor(weight.asnumpy().T.copy()))


Plant = Callable[[Run], Any]
#: kind -> what plants it, and the module or parameter that is to be named ("update" for any update).
FAULTS: dict[str, tuple[Plant, str]] = {
    "transposed weight": (transposed, "layers.0.attention.wq.weight"),
    "other activation": (
        lambda run: setattr(cell(run, "layers.1.mlp"), "act", nn.GELU(approximate=True)),
        "layers.1.mlp.act",
    ),
    "scale of attention": (changed("layers.0.attention", scale=0.125), "layers.0.attention"),
    "mask off by one": (changed("layers.1.attention", diagonal=2), "layers.1.attention"),
    "queries and keys exchanged": (
        method("layers.1.attention", "weights", lambda m, own, q, k: own(k, q)),
        "layers.1.attention",
    ),
    "no residual": (method("layers.1", "attend", lambda m, own, x: m.attention(m.norm1(x))), "layers.1"),
    "scaled residual": (method("layers.0", "attend", lambda m, own, x: own(x) - 0.01 * x), "layers.0"),
    "no bias": (changed("layers.0.attention.wo", has_bias=False), "layers.0.attention.wo"),
    "scaled logits": (replaced("head", lambda own, x: own(x) * 1.01), "head"),
    "scaled embedding": (replaced("words", lambda own, x: own(x) * 4), "words"),
    "other batch": (lambda run: setattr(run, "ids", np.roll(run.ids, 1, -1)), "the inputs of the run"),
    "labels not shifted": (lambda run: setattr(run, "shift", 0), "the loss"),
    "gradient of a weight halved": (gradient_of("layers.0.mlp.up.weight", 0.5), "layers.0.mlp.up.weight"),
    "gradient of a norm doubled": (gradient_of("norm.weight", 2.0), "norm.weight"),
    "backward of a module halved": (
        replaced("layers.1.mlp.act", lambda own, x: own(backwards(0.5)(x))),
        "layers.1.mlp.act",
    ),
    "gradient of a branch halved": (
        method("layers.1", "attend", lambda m, own, x: x + backwards(0.5)(m.attention(m.norm1(x)))),
        "layers.1",
    ),
    "backward of attention": (
        method("layers.0.attention", "weights", lambda m, own, q, k: backwards(0.9)(own(q, k))),
        "layers.0.attention",
    ),
    "no decay": (lambda run: run.options.update(weight_decay=0.0), "update"),
    "beta of the optimizer": (lambda run: run.options.update(betas=(0.9, 0.99)), "update"),
    "epsilon of the optimizer": (lambda run: run.options.update(eps=1e-6), "update"),
}
#: Those of the gate: for each event that a backend tells, one.
GATE = ("backward of a module halved", "no decay")


def test_faults(tmp_path: Path) -> None:
    Run()(tmp_path / "right")
    wrong = []
    for i, name in enumerate(FAULTS if everything() else GATE):
        plant, expected = FAULTS[name]
        run = Run()
        plant(run)
        run(tmp_path / f"{i}")
        found = compare(tmp_path / "right", tmp_path / f"{i}")
        first = found.first
        if first is None or not (found.culprit == expected or first.kind == expected == "update"):
            wrong.append(f"{name}: {expected!r} is to be named, and found is {found.culprit!r}\n{found}")
    assert not wrong, "\n\n".join(wrong)
