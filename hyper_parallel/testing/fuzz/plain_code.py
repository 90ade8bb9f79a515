"""Random programs with plain code between styles, and plans with one entry changed, to test `check_plain_code`.

Each program runs on one device, and on ranks under `check_plain_code`. A program is wrong if the output, or a gradient
of a parameter or the input, differs. The check finds the fault, misses it, or gives a false alarm. The command is
``python -m hyper_parallel.testing.fuzz.plain_code torch-cpu --count 1000``. ``--check`` also runs `check_plan`, which
compares results. A wrong program that passes `check_plan` is printed as ``unseen``.
"""

from __future__ import annotations

import argparse
import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    HeadNormParallel,
    NoParallel,
    Partial,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    check_plain_code,
    parallelize_module,
)
from hyper_parallel.core.plain_code.first_call import without_first_calls
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats
from hyper_parallel.testing.plan_check import compare_on_ranks, verdict_of
from hyper_parallel.testing.pool import WorkerPool

__all__ = ["changed_plans", "checked", "classify", "classify_plan", "combined", "main", "outcome_of"]

#: Outcome -> its meaning.
KINDS = {
    "right": "no finding, and the numbers of one device",
    "found": "wrong, with a finding",
    "raised": "refused, by the plan or when it runs; some run on no single device",
    "part": "the last style gives a part, which is no finding until something takes it for the whole",
    "missed": "wrong, without a finding",
    "warned": "right, with a finding that is not certain",
    "alarm": "right, with a finding",
    "disagree": "ranks come to other findings",
}
#: (batch, tokens, features), hidden features, and features of a head.
SHAPE, HIDDEN, HEAD = (2, 4, 8), 16, 4
RANKS = 2
Step = Callable[[Any, Any, Any, Any], Any]


def _heads(x: Any) -> tuple[int, ...]:
    return (*x.shape[:2], -1, HEAD)


def _in_heads(function: Callable[[Any, Any], Any]) -> Step:
    """Return a step that applies ``function(adapter, y)`` to the tensor split into heads."""
    return lambda m, a, h, x: a.reshape(function(a, a.reshape(h, _heads(h))), (*h.shape[:2], -1))


def _gated(name: str) -> Step:
    return lambda m, a, h, x: h * a.sigmoid(a.sum(getattr(m, name)(x), -1, True))


def _attention(m: Any, a: Any, h: Any, x: Any) -> Any:
    q = a.transpose(a.reshape(h, _heads(h)), 1, 2)
    y = a.matmul(a.softmax(a.matmul(q, a.transpose(q, -2, -1)), -1), q)
    return a.reshape(a.transpose(y, 1, 2), (*h.shape[:2], -1))


def _mixed_heads(m: Any, a: Any, h: Any, x: Any) -> Any:
    y = a.reshape(h, _heads(h))
    return a.reshape(a.transpose(y, 2, 3), (*h.shape[:2], -1))


def _flat(m: Any, a: Any, h: Any, x: Any) -> Any:
    return a.reshape(a.relu(a.reshape(h, (h.shape[0] * h.shape[1], -1))), tuple(h.shape))


def _halves(m: Any, a: Any, h: Any, x: Any) -> Any:
    first, second = a.chunk(h, 2, -1)
    return a.cat((a.relu(first), second), -1)


def _across(m: Any, a: Any, h: Any, x: Any) -> Any:
    first, second = a.chunk(h, 2, -1)
    return a.cat((a.silu(first) * second, first), -1)


#: Name -> a step between the projections: ``step(module, adapter, hidden, input)``.
STEPS: dict[str, Step] = {
    "relu": lambda m, a, h, x: a.relu(h),
    "gelu": lambda m, a, h, x: a.gelu(h) * 0.5 + h,
    "square": lambda m, a, h, x: a.square(h) + 1.0,
    "other projection": lambda m, a, h, x: h * a.sigmoid(m.other(x)),
    "over tokens": lambda m, a, h, x: a.softmax(h, 1),
    "less its mean over tokens": lambda m, a, h, x: h - a.mean(h, 1, True),
    "flat": _flat,
    "attention": _attention,
    "softmax in heads": _in_heads(lambda a, y: a.softmax(y, -1)),
    "last first": lambda m, a, h, x: a.cat((h[:, 1:], h[:, :1]), 1),
    "styled norm in heads": lambda m, a, h, x: a.reshape(m.head_norm(a.reshape(h, _heads(h))), (*h.shape[:2], -1)),
    "styled gate": _gated("gate"),
    "by the input": lambda m, a, h, x: h * a.sum(x, -1, True),
    "gathered": lambda m, a, h, x: h * a.softmax(m.whole(x), -1),
    "softmax": lambda m, a, h, x: a.softmax(h, -1),
    "mean": lambda m, a, h, x: h - a.mean(h, -1, True),
    "root mean square": lambda m, a, h, x: h * (a.mean(a.square(h), -1, True) + 1.0) ** -0.5,
    "sum": lambda m, a, h, x: h * a.sigmoid(a.sum(h, -1, True)),
    "cumsum": lambda m, a, h, x: a.cumsum(h, 2) * 0.1,
    "halves": _halves,
    "across halves": _across,
    "across heads": _in_heads(lambda a, y: a.softmax(y, 2)),
    "mixed heads": _mixed_heads,
    "largest head": _in_heads(lambda a, y: y - a.unsqueeze(a.amax(y, 2), 2)),
    "own scale": lambda m, a, h, x: h * a.sum(m.scale.weight),
    "plain gate": _gated("plain_gate"),
    "plain norm in heads": lambda m, a, h, x: a.reshape(m.plain_norm(a.reshape(h, _heads(h))), (*h.shape[:2], -1)),
    "size of a part": lambda m, a, h, x: h * h.shape[-1] ** -0.5,
}
#: Name -> the last step, from the hidden state to the output: ``end(module, adapter, hidden, input)``.
ENDS: dict[str, Step] = {
    "down": lambda m, a, h, x: m.down(h),
    "residual": lambda m, a, h, x: x + m.down(h),
    "twice": lambda m, a, h, x: m.down(h) * 2.0 + m.down(a.relu(h)),
    "summand": lambda m, a, h, x: x + a.sum(h, -1, True),
    "relu of a summand": lambda m, a, h, x: a.relu(a.sum(h, -1, True)) + x,
}
#: Number of first steps that compute the same on ranks as on one device.
_RIGHT = 14
PLAN: dict[str, Any] = {
    "up": ColwiseParallel(),
    "other": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head_norm": HeadNormParallel(),
    "gate": NoParallel(local_output_grad_placements=Partial()),
    "whole": ColwiseParallel(output_layouts=Replicate()),
    "plain_gate": NoParallel(),
}
#: The step "gathered" needs a shard. Its layer returns the full tensor, which does not fit, so all ranks refuse it.
_LAYERS = {
    "up": (8, HIDDEN),
    "other": (8, HIDDEN),
    "down": (HIDDEN, 8),
    "gate": (8, 8),
    "plain_gate": (8, 8),
    "whole": (8, HIDDEN),
    "scale": (8, 2),
}


def _model(run: Callable[[Any, Any, Any], Any], layers: dict[str, tuple[int, int]] = _LAYERS) -> Any:
    adapter = get_adapter()

    def forward(self: Any, x: Any) -> Any:
        return run(self, adapter, x)

    model = adapter.Probe()
    model.__class__ = type("Program", (type(model),), {"forward": forward, "construct": forward})
    for name, (n_in, n_out) in layers.items():
        setattr(model, name, adapter.linear_module(n_in, n_out))
    model.head_norm, model.plain_norm = adapter.RmsNorm(HEAD), adapter.RmsNorm(HEAD)
    return adapter.load(model, np.random.default_rng(1))


def program_of(seed: int) -> tuple[list[str], str]:
    """Return the steps and the end of the program of a seed. Two thirds of the seeds have only right steps and ends."""
    draw = random.Random(seed)
    names, ends = list(STEPS), list(ENDS)
    good = seed % 3 != 0
    steps = draw.choices(names[:13], k=draw.randint(1, 5))
    if not good and draw.random() < 0.8:
        steps[draw.randrange(len(steps))] = draw.choice(names[13:])
        return steps, draw.choice(ends[:3])
    return steps, draw.choice(ends[:3] if good else ends[3:])


def outcome_of(make: Callable[[], Any], plan: dict[str, Any], mesh: Any, shape: tuple[int, ...]) -> tuple[str, str]:
    """Return an outcome of `KINDS` except ``disagree``, with the finding, the error or the difference."""
    adapter = get_adapter()
    values = floats(*shape)

    def step(model: Any) -> Any:
        def loss(x: Any) -> Any:
            y = adapter.call(model, x)
            y = y.full_tensor() if isinstance(y, DTensor) else y
            return adapter.weighted_sum(y, adapter.tensor(floats(*y.shape))), y

        return adapter.model_value_and_grads(model, loss, values)

    try:
        wanted = step(make())
        model = make()
        with without_first_calls():
            parallelize_module(model, mesh, plan, src_data_rank=None)
        with check_plain_code(model) as checked:
            got = step(model)
    except Exception as error:
        return "raised", f"{type(error).__name__}: {str(error)[:160]}"
    if not checked.findings and np.shape(got[1]) == np.shape(wanted[1]) and got[0].shape != wanted[0].shape:
        return "part", "the output is a part, as its style says"
    worst = max(
        _difference(got[0], wanted[0]),
        _difference(got[1], wanted[1]),
        *(_difference(got[2].get(name), g) for name, g in wanted[2].items()),
    )
    is_wrong = worst > 1e-3
    certain = [finding for finding in checked.findings if finding.certain and finding in checked.reached]
    detail = str(checked.findings[0]) if checked.findings else f"differs by {worst:.2g}"
    if checked.findings and not certain:
        detail = f"uncertain: {detail}"
    if checked.findings:
        return ("found" if is_wrong else "alarm" if certain else "warned"), detail
    unknown = f", not followed: {', '.join(checked.unknown)}" if checked.unknown else ""
    return ("missed" if is_wrong else "right"), detail + unknown


def _difference(got: Any, wanted: Any) -> float:
    if got is None or wanted is None:
        return 0.0 if got is wanted else np.inf
    got, wanted = (np.asarray(x if isinstance(x, np.ndarray) else get_adapter().numpy(x)) for x in (got, wanted))
    if got.shape != wanted.shape:
        return np.inf
    scale = max(float(np.abs(wanted).max()), 1e-2)  # smaller gradients may consist of rounding errors
    return float(np.abs(got - wanted).max()) / scale


@dataclass(frozen=True)
class Program:
    """A picklable function that makes the model of a seed."""

    seed: int

    def __call__(self) -> Any:
        steps, end = program_of(self.seed)

        def run(m: Any, a: Any, x: Any) -> Any:
            h = m.up(x)
            for name in steps:
                h = STEPS[name](m, a, h, x)
            return ENDS[end](m, a, h, x)

        return _model(run)


@spmd.on_mesh(names=("tp",))
def classify(mesh: Any, seeds: Sequence[int]) -> list[tuple[str, str]]:
    """Return the outcome of the program of each seed on this rank."""
    return [outcome_of(Program(seed), PLAN, mesh, SHAPE) for seed in seeds]


@spmd.on_mesh(names=("tp",))
def checked(mesh: Any, seeds: Sequence[int]) -> list[Any]:
    """Return the findings of `check_plan` about the program of each seed on this rank, None for a refused program.

    `classify` uses another sample and another loss.
    """
    found: list[Any] = []
    for seed in seeds:
        sample = get_adapter().tensor(np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32))
        sample.requires_grad_()
        sent = pickle.dumps((Program(seed), PLAN, (sample,), {}, None, True))
        try:
            found.append(compare_on_ranks((mesh.size(),), ("tp",), sent))
        except Exception:
            found.append(None)
    return found


#: Replacements for a style of a plan; None removes the entry.
CHANGES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    "colwise": ColwiseParallel,
    "packed=1": lambda: ColwiseParallel(packed=1),
    "packed=2": lambda: ColwiseParallel(packed=2),
    "packed=3": lambda: ColwiseParallel(packed=3),
    "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise of whole": lambda: RowwiseParallel(input_layouts=Replicate()),
    "NoParallel": NoParallel,
    "sequence": lambda: SequenceParallel(use_local_output=True),
    "head norm": HeadNormParallel,
}


def _suite() -> Any:
    return import_module("hyper_parallel.testing.conformance.test_plain_code")


def _cases() -> dict[str, Any]:
    """Return the programs of the conformance suite by name. Programs that are wrong under their own plan come last."""
    return {**_suite().RIGHT, **{f"wrong {name}": case for name, case in _suite().WRONG.items()}}


def changed_plans() -> list[tuple[str, str, str]]:
    """Return (case, key, change) for each entry of the plans of the conformance suite's programs."""
    return [(name, key, change) for name, case in _cases().items() for key in case.plan for change in CHANGES]


@spmd.on_mesh(names=("tp",))
def classify_plan(mesh: Any, changed: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Return the outcome of each changed plan on this rank."""
    suite, cases, found = _suite(), _cases(), []
    for name, key, change in changed:
        case, style = cases[name], CHANGES[change]
        plan = {path: given for path, given in case.plan.items() if path != key}
        if style is not None:
            plan[key] = style()
        found.append(outcome_of(partial(suite.program, case.run, case.modules), plan, mesh, case.shape))
    return found


def combined(ranks: Sequence[list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return one outcome for each program. A program that is wrong on one rank is wrong. If only some ranks have a
    finding, the outcome is ``disagree``."""
    order = ("raised", "missed", "found", "alarm", "warned", "part", "right")
    found = []
    for members in zip(*ranks, strict=True):
        kinds = {kind for kind, _ in members}
        proved = {kind in ("found", "alarm", "warned") for kind in kinds if kind != "raised"}
        if len(proved) > 1:
            found.append(("disagree", " / ".join(detail for _, detail in members)))
        else:
            found.append(min(members, key=lambda member: order.index(member[0])))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Count the outcomes of random programs or of changed plans. Print misses and false alarms."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("platform")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", action="store_true", help="plans with one entry changed, in place of programs")
    parser.add_argument("--check", action="store_true", help="ask check_plan, too, about each program")
    given = parser.parse_args(arguments)
    jobs: list[Any] = changed_plans() if given.plans else list(range(given.seed, given.seed + given.count))
    counts: Counter[str] = Counter()
    with WorkerPool(given.platform, size=RANKS) as pool:
        for first in range(0, len(jobs), 50):
            batch = jobs[first : first + 50]
            ranks = pool.run(RANKS, classify_plan if given.plans else classify, batch)
            checks = list(zip(*pool.run(RANKS, checked, batch), strict=True)) if given.check else [None] * len(batch)
            for job, (kind, detail), check in zip(batch, combined(ranks), checks, strict=True):
                counts[kind] += 1
                if check is not None and kind in ("found", "missed", "disagree"):
                    seen = None in check or not verdict_of(list(check), 1e-4)
                    counts["seen by check_plan" if seen else "unseen"] += 1
                    if not seen:
                        print(f"unseen {(job, *program_of(job))}: {detail}", flush=True)
                if kind in ("missed", "alarm", "disagree", "warned"):
                    print(f"{kind} {job if given.plans else (job, *program_of(job))}: {detail}", flush=True)
            print(dict(counts), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
