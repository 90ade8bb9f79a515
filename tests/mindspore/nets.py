"""Small networks and helpers that the tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import ColwiseParallel, DTensor, Replicate, RowwiseParallel, parallelize_module

FEATURES, VOCABULARY = 8, 12


class Net(nn.Cell):
    """Embedding, norm, MLP of both kinds of linear layers, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.norm = nn.LayerNorm([FEATURES])
        self.up = nn.Dense(FEATURES, 2 * FEATURES)
        self.down = mint.nn.Linear(2 * FEATURES, FEATURES)
        self.head = mint.nn.Linear(FEATURES, VOCABULARY, bias=False)
        self.head.weight = self.embedding.embedding_table

    def construct(self, ids: Any) -> Any:
        x = self.embedding(ids)
        x = x + self.down(ops.relu(self.up(self.norm(x))))
        return self.head(x)


def on_first_rank(mesh: Any, function: Any) -> Any:
    """Return the NumPy result of ``function`` on the first rank, which alone computes as one process would."""
    platform, first = mesh.platform, mesh.get_local_rank() == 0
    return platform.all_gather_object(function() if first else None, mesh.platform_group(0), mesh.size())[0]


def make_net(mesh: Any = None, frozen: tuple[str, ...] = ()) -> Net:
    """The same numbers every time; with a mesh, parallelized. Parameters whose name starts with one of ``frozen`` are
    frozen before."""
    net, rng = Net(), np.random.default_rng(0)
    for p in net.get_parameters():
        p.set_data(Tensor(rng.standard_normal(p.shape).astype(np.float32) * 0.3))
        p.requires_grad = not (frozen and p.name.startswith(frozen))
    if mesh is None:
        return net
    # As users do: the network has run before, so primitives have seen its parameters with their old shapes.
    net(batch()[0])
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh, plan)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids (4, 5) and targets (20,)."""
    rng = np.random.default_rng(1 + seed)
    ids, targets = rng.integers(0, VOCABULARY, (4, 5)), rng.integers(0, VOCABULARY, 20)
    return Tensor(ids.astype(np.int32)), Tensor(targets.astype(np.int32))


def loss_of(net: nn.Cell, seed: int = 0) -> Any:
    """A function without arguments that gives the loss on `batch`."""
    ids, targets = batch(seed)
    return lambda: ops.cross_entropy(net(ids).reshape(-1, VOCABULARY), targets)


def whole(t: Any) -> np.ndarray:
    """The value of a plain tensor or a DTensor."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).asnumpy()


def rows_of(x: np.ndarray, layout: Any) -> Tensor:
    """The rows of ``x`` that this rank has, as a plain tensor."""
    return Tensor(np.ascontiguousarray(x[layout.local_index()]))


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def error_of(function: Any, *args: Any) -> str:
    """Type and first line of the error that a call raises."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return "no error"
