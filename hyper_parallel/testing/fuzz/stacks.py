"""Random stacks of modules with random plans, trained for a few steps on one device and distributed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.fuzz.program import Limits

__all__ = ["Reference", "on_one_device", "run"]

STEPS = 3
#: Learning rate, low enough to keep weights small: exploding values amplify rounding errors.
RATE = 0.005
_R = Replicate()
Parts = tuple[str, Callable[[Any], Any], dict[str, Any]]


@dataclass(frozen=True)
class Reference:
    """Results of a seed's stack on a single device.

    ``wanted`` has outputs and gradients by name. If there are none, ``problem`` is the reason."""

    seed: int
    wanted: dict[str, np.ndarray]
    problem: str = ""


def on_one_device(seed: int) -> Reference:
    """Train the stack of a seed with plain tensors."""
    _, parts, x = _stack(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Reference(seed, _train(get_adapter(), parts, x, seed, None))
        except Exception as error:
            return Reference(seed, {}, f"{type(error).__name__}: {error}"[:300])


def run(reference: Reference) -> tuple[str, str] | None:
    """Train the stack on this rank, and return the verdict; None outside the mesh."""
    ranks, parts, x = _stack(reference.seed)
    mesh = spmd.device_mesh(ranks)
    if mesh is None:
        return None
    if reference.problem:
        return "plain refused", reference.problem
    names = [name for name, *_ in parts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = _train(get_adapter(), parts, x, reference.seed, mesh)
        except Exception as error:
            return "refused", f"{names}: {type(error).__name__}: {error}"[:300]
    for what, array in reference.wanted.items():
        scale = max(float(np.abs(array).max(initial=0)), 1.0)
        if got[what].shape != array.shape or not np.abs(got[what] - array).max(initial=0) / scale < 1e-3:
            return "wrong", f"{names} on {ranks} ranks, input {x.shape}: {what}"
    return "right", ""


def _stack(seed: int) -> tuple[int, list[Parts], np.ndarray]:
    """Return the number of ranks, the modules and the input of a seed."""
    rng, shortest = np.random.default_rng((seed, 977)), Limits(**get_adapter().FUZZ_LIMITS).shortest
    ranks = int(rng.choice((2, 3, 4)))
    batch, length, heads = int(rng.integers(1, 4)), int(rng.integers(shortest, 6)), ranks * int(rng.integers(1, 3))
    features = heads * 2
    parts = [_part(rng, features, int(rng.integers(1, 9))) for _ in range(int(rng.integers(1, 4)))]
    return ranks, parts, rng.standard_normal((batch, length, features)).astype(np.float32)


def _part(rng: np.random.Generator, features: int, hidden: int) -> Parts:
    """Return a random module that keeps the number of features, with its plan."""
    bias = bool(rng.integers(0, 2))
    kinds: list[Parts] = [
        (
            "mlp",
            lambda adapter: adapter.Mlp(features, hidden, bias),
            {"up": ColwiseParallel(), "down": RowwiseParallel()},
        ),
        (
            "attention",
            lambda adapter: adapter.Attention(features, 2),
            {**dict.fromkeys(("wq", "wk", "wv"), ColwiseParallel()), "wo": RowwiseParallel()},
        ),
        (
            "block",
            lambda adapter: adapter.Block(features, hidden, 2),
            {
                **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
                "attention.wo": RowwiseParallel(),
                **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
                "feed_forward.w2": RowwiseParallel(),
            },
        ),
        (
            "gathered",
            lambda adapter: adapter.linear_module(features, features, bias),
            {"": ColwiseParallel(output_layouts=_R)},
        ),
        (
            "scattered",
            lambda adapter: adapter.linear_module(features, features, bias),
            {"": RowwiseParallel(input_layouts=_R)},
        ),
        ("norm", lambda adapter: adapter.norm_module(features), {"": SequenceParallel(use_local_output=False)}),
        ("plain norm", lambda adapter: adapter.norm_module(features), {}),
        ("plain linear", lambda adapter: adapter.linear_module(features, features, bias), {}),
    ]
    return kinds[int(rng.integers(0, len(kinds)))]


def _train(adapter: Any, parts: list[Parts], array: np.ndarray, seed: int, mesh: Any) -> dict[str, np.ndarray]:
    """Return outputs and gradients of all steps, by name."""
    rng = np.random.default_rng((seed, 5))
    modules = []
    for _, make, plan in parts:
        module = adapter.load(make(adapter), rng)
        if mesh is not None and plan:
            module = parallelize_module(module, mesh, plan.get("", plan))
        modules.append(module)
    results: dict[str, np.ndarray] = {}
    steps = [adapter.sgd(module, RATE) for module in modules]
    weights = np.random.default_rng((seed, 6)).standard_normal(array.shape).astype(np.float32)

    def through(x: Any, start: int, end: int | None = None) -> Any:
        for module, (_, _, plan) in list(zip(modules, parts, strict=True))[start:end]:
            if mesh is not None and isinstance(plan.get(""), SequenceParallel):
                x = DTensor.from_local(x, mesh)  # a plain tensor would be taken for this rank's shard of the sequence
            x = adapter.call(module, x)
            if isinstance(x, DTensor):
                x = x.full_tensor()
        return x

    for number in range(STEPS):
        # Each module's gradients come from a separate pass. All passes run before any optimizer step.
        taken = []
        for i, module in enumerate(modules):
            begin = np.array(adapter.numpy(through(adapter.tensor(array), 0, i)))

            def loss(x: Any, start: int = i) -> tuple[Any, Any]:
                y = through(x, start)
                return adapter.weighted_sum(adapter.tanh(y), adapter.tensor(weights)), y

            y, grad, grads = adapter.model_value_and_grads(module, loss, begin)
            taken.append(grads)
            if i == 0:
                results[f"output of step {number}"] = np.array(adapter.numpy(y))
                results[f"gradient of the input in step {number}"] = np.array(grad)
            for name, g in grads.items():
                if g is not None:
                    results[f"gradient of {i}.{name} in step {number}"] = np.array(adapter.numpy(g))
        for step, grads in zip(steps, taken, strict=True):
            if grads:
                step(grads)
    return results
