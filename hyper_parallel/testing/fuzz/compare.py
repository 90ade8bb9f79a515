"""Run a program on one device, and distributed on this rank, and compare the results."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel import DTensor
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.fuzz.parts import gradient_part, local_part
from hyper_parallel.testing.fuzz.program import Limits, Program, values_of
from hyper_parallel.testing.fuzz.words import WORDS

__all__ = ["Reference", "Verdict", "on_one_device", "run"]

#: Outcome of a program, and its explanation.
Verdict = tuple[str, str]
#: Relative error that rounding may cause, by dtype. MindSpore computes some float64 operations in float32.
_TOLERANCE = {"float16": 3e-2, "float32": 2e-4, "float64": 2e-4}


@dataclass(frozen=True)
class Reference:
    """Results of a program on a single device.

    Attributes:
        program: the program.
        outputs: values of its outputs.
        grads: the gradient of each leaf, or None.
        problem: reason why there are no results; empty if there are.
    """

    program: Program
    outputs: list[np.ndarray] = field(default_factory=list)
    grads: list[Any] = field(default_factory=list)
    problem: str = ""


def on_one_device(program: Program, shaken: int = 0) -> Reference:
    """Run a program with plain tensors. ``shaken`` adds errors to its leaves, see `Leaf.values`."""
    adapter = get_adapter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = values_of(program, shaken)
        outputs = [values[i] for i in program.outputs]
        if program.writes and not adapter.WRITES_THROUGH_VIEWS:
            return Reference(program, outputs, [None] * len(program.leaves))
        arrays = [leaf.values(shaken) for leaf in program.leaves]
        try:
            found, grads = _evaluate(program, arrays, lambda i, x, is_gradient=False: x, lambda x: x, None)
        except Exception as error:
            return Reference(program, problem=f"{type(error).__name__}: {error}"[:300])
    if any(not x.size for x in values):  # for empty tensors some frameworks read uninitialised memory
        if not Limits(**adapter.FUZZ_LIMITS).gradients_of_nothing:
            grads = [None] * len(grads)
        for i, got, wanted in zip(program.outputs, found, outputs, strict=True):
            if problem := _differs(got, wanted):
                return Reference(program, problem=f"v{i}: {problem}, on a single device")
    return Reference(program, found, grads)


def run(reference: Reference) -> Verdict | None:
    """Run the program distributed, and return this rank's verdict; None outside the mesh.

    ``"right"`` and ``"wrong"`` compare values. ``"refused"`` means that only the distributed program raises. ``"plain
    refused"`` means that both raise. ``"accepted"`` means that only the single device raises.
    """
    program = reference.program
    mesh = spmd.device_mesh(*program.mesh)
    if mesh is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got, grads = _distributed(program, mesh)
        except Exception as error:
            # A program that the single device refuses runs too, because ranks must not hang on it either.
            return "plain refused" if reference.problem else "refused", f"{type(error).__name__}: {error}"[:300]
    if reference.problem:
        return "accepted", reference.problem
    problem = _first_problem(reference, got, grads, mesh, None)
    if problem:
        problem = _first_problem(reference, got, grads, mesh, _made_of_rounding(reference))
    return ("wrong", problem) if problem else ("right", "")


def _first_problem(
    reference: Reference, got: list[np.ndarray], grads: list[Any], mesh: Any, allowed: Reference | None
) -> str:
    """Return the first fault, or an empty string; ``allowed`` holds errors that rounding may cause."""
    program = reference.program
    for number, i in enumerate(program.outputs):
        slack = None if allowed is None else allowed.outputs[number]
        if problem := _differs(got[number], reference.outputs[number], slack):
            return f"v{i}: {problem}"
    for i, leaf in enumerate(program.leaves):
        if leaf.requires_grad and reference.grads[i] is not None:
            layout = get_layout(mesh, leaf.placements, leaf.shape)
            slack = None if allowed is None else gradient_part(allowed.grads[i], layout, leaf.seed)
            if problem := _differs(grads[i], gradient_part(reference.grads[i], layout, leaf.seed), slack):
                return f"gradient of v{i}: {problem}"
    return ""


def _made_of_rounding(reference: Reference) -> Reference | None:
    """Return ten times the effect of small random errors in the program's leaves.

    The effect can be large, for example for a norm of equal numbers, or for a product of many numbers.
    """
    program = reference.program
    outputs = [np.zeros(y.shape) for y in reference.outputs]
    grads = [None if g is None else np.zeros(np.shape(g)) for g in reference.grads]
    for shaken in range(1, 4):
        found = on_one_device(program, shaken)
        if found.problem:
            return None
        for most, changed, y in zip(outputs, found.outputs, reference.outputs, strict=True):
            np.maximum(most, _distance(changed, y), out=most)
        for slack, gradient, g in zip(grads, found.grads, reference.grads, strict=True):
            if slack is not None and gradient is not None:
                np.maximum(slack, _distance(gradient, g), out=slack)
    return Reference(program, [10 * x for x in outputs], [None if x is None else 10 * x for x in grads])


def _distance(x: Any, y: Any) -> np.ndarray:
    """Return the elementwise distance of two arrays; infinite where only one array has NaN."""
    with np.errstate(invalid="ignore"):
        away = np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64))
    return np.where(np.isnan(away), np.where(np.isnan(x) & np.isnan(y), 0.0, np.inf), away)


def _distributed(program: Program, mesh: Any) -> tuple[list[np.ndarray], list[Any]]:
    layouts = [get_layout(mesh, leaf.placements, leaf.shape) for leaf in program.leaves]
    parts = [local_part(leaf.values(), layout, leaf.seed) for leaf, layout in zip(program.leaves, layouts, strict=True)]

    def distribute(i: int, x: Any, is_gradient: bool = False) -> Any:
        layout = layouts[i].cotangent if is_gradient else layouts[i]
        return DTensor.from_local(x, mesh, layout.placements, shape=tuple(layout.shape))

    return _evaluate(program, parts, distribute, lambda x: x.full_tensor(), mesh)


def _evaluate(
    program: Program, arrays: Sequence[np.ndarray], take: Any, whole: Any, mesh: Any
) -> tuple[list[np.ndarray], list[Any]]:
    """Return the values of the outputs, and the gradient of each leaf or None."""
    adapter = get_adapter()
    wanted = [i for i, leaf in enumerate(program.leaves) if leaf.requires_grad]
    outputs: list[np.ndarray] = []

    def function(*given: Any) -> tuple[Any, Any]:
        outputs.clear()
        leaves = dict(zip(wanted, given, strict=True))
        values = [take(i, leaves[i] if i in leaves else adapter.tensor(a)) for i, a in enumerate(arrays)]
        for step in program.steps:
            values += _results(adapter, step, [values[i] for i in step.inputs], mesh)
        loss: Any = None
        for number, i in enumerate(program.outputs):
            y = whole(values[i])
            outputs.append(np.array(adapter.numpy(y)))
            if np.issubdtype(outputs[-1].dtype, np.floating) and wanted:
                weights = np.random.default_rng((program.seed, number)).standard_normal(outputs[-1].shape)
                term = adapter.weighted_sum(y, adapter.tensor(weights.astype(outputs[-1].dtype)))
                loss = term if loss is None else loss + term
        return loss, outputs

    if not wanted or not any(_is_floating(program, i) for i in program.outputs):
        function(*(adapter.tensor(arrays[i]) for i in wanted))
        return outputs, [None] * len(arrays)
    if program.second_order:
        grads = _gradients_of_gradients(program, function, wanted, arrays, take, whole)
    else:
        _, grads = adapter.value_and_grads(function, [arrays[i] for i in wanted])
    if not Limits(**adapter.FUZZ_LIMITS).gradient_shapes:
        grads = [
            g.reshape(arrays[i].shape) if g is not None and g.size == arrays[i].size else g
            for i, g in zip(wanted, grads, strict=True)
        ]
    by_leaf = dict(zip(wanted, grads, strict=True))
    return outputs, [by_leaf.get(i) for i in range(len(arrays))]


def _gradients_of_gradients(
    program: Program, function: Any, wanted: list[int], arrays: Sequence[np.ndarray], take: Any, whole: Any
) -> list[np.ndarray]:
    """Return the gradients of the weighted squares of the gradients of the loss."""
    adapter = get_adapter()

    def weighted(x: Any, i: int) -> Any:
        weights = np.random.default_rng((program.seed, 3, i)).standard_normal(program.leaves[i].shape)
        return adapter.weighted_sum(whole(x), adapter.tensor(weights.astype(np.float32)))

    def loss(*given: Any) -> Any:
        total, _ = function(*given)
        for i, x in zip(wanted, given, strict=True):  # makes the loss depend on each leaf, and not only linearly
            total = total + weighted(adapter.tanh(take(i, x)), i)
        return total

    def combine(*grads: Any) -> Any:
        total: Any = None
        for i, g in zip(wanted, grads, strict=True):
            g = take(i, g, True)
            total = weighted(g * g, i) if total is None else total + weighted(g * g, i)
        return total

    return adapter.second_order(loss, combine, [arrays[i] for i in wanted])


def _is_floating(program: Program, i: int) -> bool:
    return np.issubdtype(values_of(program)[i].dtype, np.floating)


def _results(adapter: Any, step: Any, tensors: list[Any], mesh: Any) -> list[Any]:
    if step.word == "redistribute":
        x = tensors[0]
        if mesh is not None:
            x = x.redistribute(placements=step.args[0])
        # A new tensor in row-major order, even if the placements do not change.
        if mesh is None or x is tensors[0]:
            x = x & x if x.dtype == adapter.BOOL else x * 1
        return [adapter.contiguous(x)]
    result = WORDS[step.word].adapter(adapter, tensors, step.args)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _differs(got: Any, wanted: np.ndarray, slack: np.ndarray | None = None) -> str:
    """Return the fault of an array, or an empty string; ``slack`` is an additional error that the array may have."""
    got = np.asarray(got)
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{got.dtype}{list(got.shape)} in place of {wanted.dtype}{list(wanted.shape)}"
    if not wanted.size:
        return ""
    if slack is not None and slack.any():
        got = np.where(_distance(got, wanted) <= slack, wanted, got)
    if not np.issubdtype(wanted.dtype, np.floating):
        return "" if np.array_equal(got, wanted) else f"{got.tolist()} in place of {wanted.tolist()}"
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)) or not np.array_equal(np.isnan(a), np.isnan(b)):
        return f"{got.tolist()} in place of {wanted.tolist()}"
    finite = np.isfinite(b)
    scale = max(float(np.abs(b[finite]).max(initial=0.0)), 1.0)
    error = float(np.abs(a[finite] - b[finite]).max(initial=0.0)) / scale
    tolerance = _TOLERANCE[str(wanted.dtype)]
    return "" if error <= tolerance else f"off by {error:.1e}: {got.tolist()} in place of {wanted.tolist()}"[:400]
