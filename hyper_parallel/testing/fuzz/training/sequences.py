"""Random programs that train a language model with sharded sequences, on one device and distributed."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hyper_parallel import (
    ContextParallel,
    DTensor,
    Partial,
    fully_shard,
    parallelize_module,
    replicate,
    shard_sequence,
    token_mean,
)
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.experimental import context_parallel, context_parallel_unshard
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.fuzz.training.job import WrongError
from hyper_parallel.testing.fuzz.training.runs import told

__all__ = ["Program", "Reference", "generate", "on_one_device", "run", "smaller"]

IGNORED, VOCABULARY = -100, 7
_TOLERANCE = {"float64": 1e-9, "float32": 2e-4}
#: Sizes (dp, cp) of meshes.
_MESHES = ((1, 2), (1, 3), (1, 4), (2, 2), (2, 2), (4, 1), (2, 1))
#: Name of a mask, which is added to the scores -> its shape, from samples, heads and length.
_MASKS = {
    "": lambda samples, heads, n: (),
    "square": lambda samples, heads, n: (n, n),
    "keys": lambda samples, heads, n: (1, n),
    "keys of samples": lambda samples, heads, n: (samples, 1, 1, n),
    "each head": lambda samples, heads, n: (samples, heads, n, n),
}


@dataclass(frozen=True)
class Program:
    """A training program with sharded sequences.

    Attributes:
        seed: seed that generated the program.
        samples: number of samples of the full batch.
        heads: number of query heads, number of key heads, and features of a head.
        layers: number of layers.
        causal: whether each layer has the causal mask, if it has no other mask.
        mask: name in `_MASKS`.
        mesh: sizes of dp and cp.
        way: ``"context"`` or ``"style"``.
        method: method of attention, or None.
        balance: see `context_parallel`.
        data: ``"replicate"``, ``"fully_shard"``, ``"both"`` (`fully_shard` over two dimensions). With ``""`` the
            gradients are added by hand.
        checkpointed: ``""``, ``"reentrant"`` or ``"other"``.
        frozen: pattern in the names of parameters that are not trained, or empty.
        ignored: share of labels that do not count.
        lengths: sequence lengths of the steps.
        dtype: dtype of parameters.
    """

    seed: int
    samples: int
    heads: tuple[int, int, int]
    layers: int
    causal: tuple[bool, ...]
    mask: str
    mesh: tuple[int, int]
    way: str
    method: str | None
    balance: bool
    data: str
    checkpointed: str
    frozen: str
    ignored: float
    lengths: tuple[int, ...]
    dtype: str = "float64"


def generate(seed: int, dtypes: tuple[str, ...], checkpoints: tuple[str, ...]) -> Program:
    """Return the program of a seed.

    Args:
        seed: the seed.
        dtypes: possible dtypes of models.
        checkpoints: kinds of checkpointing that the framework has, and ``""``.
    """
    rng = np.random.default_rng((seed, 3851))

    def draw(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    mesh = draw(*_MESHES)
    shared, layers = draw(1, 1, 2, 3, 4), draw(1, 1, 2)
    mask = draw("", "", "", *_MASKS)
    method = draw(None, None, "gather", "exchange", "ring")
    if mask and method == "ring":
        method = None
    lengths = tuple(int(n) for n in rng.integers(2, 15, draw(1, 2, 3)))
    if rng.random() < 0.9:  # the remaining programs may be refused, because a rank would have an empty shard
        lengths = tuple(n if all(chunk_sizes(n, mesh[1])) else mesh[1] * draw(2, 3) for n in lengths)
    if method == "exchange" and (shared % mesh[1] or mask in ("square", "each head")) and rng.random() < 0.9:
        method = None
    return Program(
        seed,
        samples=mesh[0] * draw(1, 2),
        heads=(shared * draw(1, 2, 3), shared, draw(2, 3, 4)),
        layers=layers,
        causal=tuple(bool(rng.random() < 0.8) for _ in range(layers)),
        mask=mask,
        mesh=mesh,
        way=draw("context", "style"),
        method=method,
        balance=bool(rng.random() < 0.7),
        data=draw("", "replicate", "fully_shard", "both"),
        checkpointed=draw("", "", *checkpoints),
        frozen=draw("", "", "", "wq", "wk", "wv", "tokens", "attention0"),
        ignored=draw(0.0, 0.3, 0.9),
        lengths=lengths if draw(0, 1) else lengths[:1] * len(lengths),
        dtype=draw(*dtypes),
    )


@dataclass(frozen=True)
class Reference:
    """Results of a program on a single device.

    Attributes:
        program: the program.
        seen: the compared values by name.
        problem: reason why there are no results; empty if there are.
    """

    program: Program
    seen: dict[str, np.ndarray | None] = field(default_factory=dict)
    problem: str = ""


# ------------------------------------------------------------------------------------------------ the model
def _build(program: Program) -> Any:
    adapter, platform = get_adapter(), get_platform()
    heads, shared, features = program.heads
    root, width = adapter.Probe(), heads * features
    root.tokens, root.places = (adapter.embedding_module(n, width) for n in (VOCABULARY, max(program.lengths)))
    for i in range(program.layers):
        attention = adapter.CausalAttention(heads, shared, features)
        setattr(root, f"attention{i}", attention)
        object.__setattr__(attention, "sees", [program.causal[i], None])
        platform.replace_forward(attention, lambda _: _attention)
    root.head = adapter.linear_module(width, VOCABULARY)
    object.__setattr__(root, "program", program)
    platform.replace_forward(root, lambda _: _forward)
    rng = np.random.default_rng(5)
    adapter.load(root, rng, np.dtype(program.dtype).type)
    for name, _ in [*platform.named_parameters(root)] if program.frozen else ():
        if re.search(program.frozen, name):
            adapter.freeze(root, name)
    return root


def _forward(self: Any, ids: Any, positions: Any) -> Any:
    adapter, program = get_adapter(), self.program
    x = self.tokens(ids) + self.places(positions)
    for i in range(program.layers):
        attention = getattr(self, f"attention{i}")
        if program.checkpointed:
            y = adapter.checkpointed(attention, adapter.tanh(x), program.checkpointed == "reentrant")
        else:
            y = attention(adapter.tanh(x))
        x = x + y
    return self.head(x)


def _attention(self: Any, x: Any) -> Any:
    adapter, features = get_adapter(), self.head_dim
    samples, length = x.shape[:2]
    heads = [
        adapter.transpose(adapter.reshape(project(x), (samples, length, -1, features)), 1, 2)
        for project in (self.wq, self.wk, self.wv)
    ]
    causal, mask = self.sees
    y = adapter.scaled_attention(*heads, mask, is_causal=causal and mask is None)
    return self.wo(adapter.reshape(adapter.transpose(y, 1, 2), (samples, length, -1)))


# ------------------------------------------------------------------------------------------------ runs
def _in_one(mesh: Any) -> Any:
    """Return a 1-D mesh of the ranks. A mesh is flattened only if needed, because a new group takes all ranks of the
    world."""
    long = [name for name, n in zip(mesh.mesh_dim_names, mesh.shape, strict=True) if n > 1]
    return mesh[long[0]] if len(long) == 1 else mesh._flatten("dp_cp")


class _Job:
    """Training by a program. Without a mesh it runs on one device."""

    def __init__(self, program: Program, mesh: Any = None) -> None:
        self.program, self.mesh, self.adapter, self.root = program, mesh, get_adapter(), _build(program)
        self.seen: dict[str, np.ndarray | None] = {}
        if mesh is None:
            self.samples = slice(0, program.samples)
            self.take = self.adapter.sgd(self.root, 0.1)
            return
        self.cut, self.both = mesh["cp"], mesh["dp", "cp"]
        if program.way == "style":
            style = ContextParallel(balance=program.balance, method=program.method)
            parallelize_module(self.root, self.cut, {"attention*": style})
        if program.data == "replicate":
            replicate(self.root, _in_one(self.both))
        elif program.data:
            fully_shard(self.root, mesh=self.both if program.data == "both" else _in_one(self.both))
        each, rank = program.samples // program.mesh[0], mesh["dp"].get_local_rank()
        self.samples = slice(rank * each, (rank + 1) * each)
        self.take = self.adapter.sgd(self.root, 0.1)

    def run(self) -> None:
        """Run all steps."""
        for i, length in enumerate(self.program.lengths):
            self._step(f"step {i}", length, np.random.default_rng((self.program.seed, i)))

    def _step(self, at: str, length: int, rng: np.random.Generator) -> None:
        program, adapter = self.program, self.adapter
        ids = rng.integers(0, VOCABULARY, (program.samples, length)).astype(np.int64)
        labels = np.where(rng.random(ids.shape) < program.ignored, IGNORED, ids)
        labels[0, -1] = 1  # so that at least one label counts
        sizes = _MASKS[program.mask](program.samples, program.heads[0], length)
        mask = rng.standard_normal(sizes).astype(program.dtype) if program.mask else None
        if mask is not None and len(sizes) == 4:
            mask = mask[self.samples]
        for name, module in get_platform().named_modules(self.root):
            if re.fullmatch(r"attention\d+", name):
                module.sees[1] = None if mask is None else adapter.tensor(np.ascontiguousarray(mask))
        ids, labels = ids[self.samples], labels[self.samples]
        seen = self._distributed(ids, labels, length) if self.mesh is not None else self._single(ids, labels, length)
        for what, x in seen.items():
            self.seen[f"{what} of {at}"] = None if x is None else np.array(adapter.numpy(x))
        if program.data:  # otherwise each rank has only its own gradients
            self.take(self.grads)
            for name, p in get_platform().named_parameters(self.root):
                whole = p.full_tensor() if isinstance(p, DTensor) else p
                self.seen[f"{name} after {at}"] = np.array(adapter.numpy(whole))

    def _losses(self, logits: Any, labels: Any) -> Any:
        tokens = math.prod(labels.shape)
        flat = self.adapter.reshape(logits, (tokens, VOCABULARY))
        return self.adapter.cross_entropy(flat, labels.reshape((tokens,)), "none")

    def _single(self, ids: np.ndarray, labels: np.ndarray, length: int) -> dict[str, Any]:
        adapter = self.adapter
        shifted = np.concatenate([labels[:, 1:], np.full((len(ids), 1), IGNORED)], 1)
        positions = adapter.tensor(np.arange(length)[None])
        logits: list[Any] = []

        def loss(x: Any) -> Any:
            logits[:] = [adapter.call(self.root, x, positions)]
            losses = self._losses(logits[0], adapter.tensor(shifted))
            return adapter.sum(losses) / float((shifted != IGNORED).sum()), None

        value, _, self.grads = adapter.model_value_and_grads(self.root, loss, ids)
        return {"logits": logits[0], "loss": value, **{f"gradient of {n}": g for n, g in self.grads.items()}}

    def _distributed(self, ids: np.ndarray, labels: np.ndarray, length: int) -> dict[str, Any]:
        adapter, program = self.adapter, self.program
        given = {"ids": adapter.tensor(ids), "labels": adapter.tensor(labels)}
        batch = shard_sequence(given, self.cut, balance=program.balance)
        logits: list[Any] = []

        def loss(x: Any) -> Any:
            logits[:] = [adapter.call(self.root, x, batch["position_ids"])]
            losses = self._losses(logits[0], batch["labels"])
            return token_mean(losses, batch["labels"], self.both, averaged=bool(program.data)), None

        inside: AbstractContextManager[None] = nullcontext()
        if program.way == "context":
            inside = context_parallel(self.cut, length=length, method=program.method, balance=program.balance)
        with inside:
            value, _, self.grads = adapter.model_value_and_grads(self.root, loss, adapter.numpy(batch["ids"]))
        (whole,) = context_parallel_unshard(self.cut, [adapter.detach(logits[0])], [1], balance=program.balance)
        found = {"logits": whole, "loss": value}
        for name, g in self.grads.items():
            if g is not None and not program.data:
                g = DTensor.from_local(g, self.both, [Partial(), Partial()])
            found[f"gradient of {name}"] = g.full_tensor() if isinstance(g, DTensor) else g
        return found


def on_one_device(program: Program) -> Reference:
    """Run a program with plain tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            job = _Job(program)
            job.run()
        except Exception as error:
            return Reference(program, problem=told(error))
    return Reference(program, job.seen)


def run(reference: Reference) -> tuple[str, str] | None:
    """Run the program distributed, and return this rank's verdict as `compare.run` does; None outside the mesh."""
    program = reference.program
    mesh = spmd.device_mesh(*program.mesh, names=("dp", "cp"))
    if mesh is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            job = _Job(program, mesh)
            job.run()
        except Exception as error:
            return "plain refused" if reference.problem else "refused", told(error)
    if reference.problem:
        return "accepted", reference.problem
    each, rank = program.samples // program.mesh[0], mesh["dp"].get_local_rank()
    for what, got in job.seen.items():
        wanted = reference.seen[what]
        if wanted is not None and what.startswith("logits"):
            wanted = wanted[rank * each : (rank + 1) * each]
        try:
            _compare(what, got, wanted, _TOLERANCE[program.dtype])
        except WrongError as error:
            return "wrong", str(error)
    return "right", ""


def _compare(what: str, got: np.ndarray | None, wanted: np.ndarray | None, tolerance: float) -> None:
    if got is None and wanted is None:
        return
    if got is None or wanted is None or got.shape != wanted.shape:
        raise WrongError(f"{what}: {got} in place of {wanted}"[:300])
    if not (np.abs(got - wanted) <= tolerance * (1 + np.abs(wanted))).all():
        off = np.abs(got - wanted).max()
        raise WrongError(f"{what}: off by {off:.1e}: {got.tolist()} in place of {wanted.tolist()}"[:500])


def smaller(program: Program) -> Iterator[Program]:
    """Yield smaller variants of a program, the most promising first."""
    if len(program.lengths) > 1:
        yield replace(program, lengths=program.lengths[1:])
        yield replace(program, lengths=program.lengths[:-1])
    if program.layers > 1:
        yield replace(program, layers=1, causal=program.causal[:1])
    plain: dict[str, Any] = {
        "mask": "",
        "data": "",
        "checkpointed": "",
        "frozen": "",
        "ignored": 0.0,
        "method": None,
        "balance": False,
        "way": "context",
    }
    for name, value in plain.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})
    if program.heads != (1, 1, 2):
        yield replace(program, heads=(1, 1, 2))
    if program.samples > program.mesh[0]:
        yield replace(program, samples=program.mesh[0])
