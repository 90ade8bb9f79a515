"""Small programs from public reports of wrong numbers and gradients: each as reported, and with a right plan.

docs/wrong_gradients.md names the reports, and shows this table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    HeadNormParallel,
    NoParallel,
    Partial,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.conformance.checks import needs_gradients
from hyper_parallel.testing.conformance.test_plain_code import (
    BY_SEQUENCE,
    GATED,
    HEAD_NORM,
    MLP,
    PACKED,
    SEQUENCE,
    SHARED,
    UP_DOWN,
    fused,
    gated,
    heads,
    in_heads,
    latent,
    linear,
    program,
)
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.fuzz.plain_code import (
    changed_plans,
    classify,
    classify_plan,
    combined,
    outcome_of,
    program_of,
)

C, W = ColwiseParallel, RowwiseParallel


@dataclass
class Report:
    """A program, and the expected outcome under a plan.

    Attributes:
        run: ``run(module, x, adapter)``.
        outcome: see `hyper_parallel.testing.fuzz.plain_code.KINDS`.
        word: word in the text of the finding or the error.
        plan, modules: plan and modules of the model.
    """

    run: Callable[..., Any]
    outcome: str = "right"
    word: str = ""
    plan: dict[str, Any] = field(default_factory=lambda: MLP)
    modules: dict[str, Any] = field(default_factory=lambda: UP_DOWN)


def whole_keys(m: Any, x: Any, a: Any) -> Any:
    """Attention between this rank's query heads and one head of keys that all query heads share."""
    q = a.reshape(m.up(x), heads(x, 6))
    return m.down(a.reshape(q * a.reshape(m.keys(x), (*x.shape[:2], 1, 6)), (*x.shape[:2], -1)))


def norm_of_all(m: Any, x: Any, a: Any) -> Any:
    """A norm over the features of all heads, of which each rank has a shard."""
    y = m.up(x)
    return m.down(y * (a.mean(a.square(y), -1, True) + 1.0) ** -0.5)


def own_bias(m: Any, x: Any, a: Any) -> Any:
    """A sum over features that are sharded, with a bias added on each rank."""
    return a.relu(a.sum(m.up(x), -1, True) + a.sum(m.bias.weight))


def summed(m: Any, x: Any, a: Any, placement: Any) -> Any:
    """A sum of features over all ranks, which the program itself declares."""
    y, weight = a.sum(m.up(x), -1, True), m.up.weight
    if isinstance(weight, DTensor):
        y = DTensor.from_local(y, weight.device_mesh, [placement]).full_tensor()
    return x + y


def of_tokens(m: Any, x: Any, a: Any) -> Any:
    """A mean over tokens that are sharded."""
    y = m.norm(m.down(a.relu(m.up(x))))
    return y - a.mean(y, 1, True)


def scaled(m: Any, x: Any, a: Any) -> Any:
    """A weight that is equal on all ranks, multiplied by a shard of the sequence."""
    return m.out(m.norm(m.down(a.relu(m.up(x)))) * a.sum(m.scale.weight))


BIASED = UP_DOWN | {"bias": linear(1, 2)}
KEYS = UP_DOWN | {"keys": linear(8, 6)}
SCALED = SEQUENCE | {"scale": linear(1, 2), "out": linear(8, 8)}
TO_WHOLE = C(input_layouts=Shard(1), output_layouts=Replicate())
REPORTS = {
    "norm in heads": Report(
        lambda m, x, a: m.down(a.reshape(a.reshape(m.up(x), heads(x, 6)) * m.norm.weight, (*x.shape[:2], -1))),
        "found",
        "HeadNormParallel()",
        modules=HEAD_NORM,
    ),
    "norm in heads, styled": Report(in_heads, plan=MLP | {"norm": HeadNormParallel()}, modules=HEAD_NORM),
    "norm over all heads": Report(norm_of_all, "found", "gets a part"),
    "norm over all heads, gathered": Report(
        norm_of_all, plan={"up": C(output_layouts=Replicate()), "down": W(input_layouts=Replicate())}
    ),
    "rotary part of a latent": Report(latent, "found", "partial_features=", MLP | {"shared": NoParallel()}, SHARED),
    "rotary part of a latent, said": Report(
        latent, plan=MLP | {"shared": NoParallel(partial_features=4)}, modules=SHARED
    ),
    "router": Report(gated, "found", "partial_features=", MLP | {"gate": NoParallel()}, GATED),
    "router, said": Report(
        gated, plan=MLP | {"gate": NoParallel(local_output_grad_placements=Partial())}, modules=GATED
    ),
    "shared keys": Report(whole_keys, "found", "partial_features=", MLP | {"keys": NoParallel()}, KEYS),
    "shared keys, said": Report(whole_keys, plan=MLP | {"keys": NoParallel(partial_features=6)}, modules=KEYS),
    "bias of each rank": Report(own_bias, "found", "RowwiseParallel", {"up": C()}, BIASED),
    "bias of a row-parallel layer": Report(lambda m, x, a: a.relu(m.down(a.relu(m.up(x))))),
    "summand taken for the sum": Report(partial(summed, placement=Replicate()), "found", "Partial(sum)", {"up": C()}),
    "summand, said": Report(partial(summed, placement=Partial()), plan={"up": C()}),
    "fused projection": Report(fused, "found", "packed=", {"up": C(packed=1), "down": W()}, PACKED),
    "fused projection, said": Report(fused, plan={"up": C(packed=3), "down": W()}, modules=PACKED),
    "softmax of some classes": Report(lambda m, x, a: a.softmax(m.up(x), -1), "found", "oftmax", {"up": C()}),
    "softmax of all classes": Report(
        lambda m, x, a: a.softmax(m.up(x), -1), plan={"up": C(output_layouts=Replicate())}
    ),
    "mean over some tokens": Report(of_tokens, "found", "gets a part", BY_SEQUENCE, SEQUENCE),
    "weight on some tokens": Report(scaled, "found", "partial gradient", BY_SEQUENCE | {"out": TO_WHOLE}, SCALED),
    "norm on some tokens, styled": Report(
        lambda m, x, a: m.out(m.norm(m.down(a.relu(m.up(x))))),
        plan=BY_SEQUENCE | {"out": TO_WHOLE, "norm": SequenceParallel(use_local_output=True)},
        modules=SCALED,
    ),
}


@spmd.on_mesh(names=("tp",))
def outcomes(mesh: Any) -> list[tuple[str, str]]:
    return [
        outcome_of(partial(program, report.run, report.modules), report.plan, mesh, (2, 4, 8))
        for report in REPORTS.values()
    ]


def test_reports(pool: Any) -> None:
    needs_gradients()
    found = dict(zip(REPORTS, combined(pool.run(2, outcomes)), strict=True))
    other = {
        name: found[name]
        for name, report in REPORTS.items()
        if found[name][0] != report.outcome or report.word.lower() not in found[name][1].lower()
    }
    assert not other


def test_random_programs(pool: Any) -> None:
    """Check random programs: no wrong program is missed, and few right programs have a finding."""
    needs_gradients()
    seeds = range(400 if everything() else 12)
    found = combined(pool.run(2, classify, list(seeds)))
    kinds = Counter(kind for kind, _ in found)
    missed = [seed for seed, (kind, _) in zip(seeds, found, strict=True) if kind == "missed"]
    assert not missed, [program_of(seed) for seed in missed]
    assert kinds["found"] and kinds["right"] and not kinds["disagree"]
    assert kinds["alarm"] + kinds["warned"] <= 1 + 0.05 * kinds["right"], kinds


@pytest.mark.nightly
def test_changed_plans(pool: Any) -> None:
    needs_gradients()
    changed = changed_plans()
    found = combined(pool.run(2, classify_plan, changed))
    missed = [plan for plan, (kind, _) in zip(changed, found, strict=True) if kind in ("missed", "disagree", "alarm")]
    # The first layer takes the model's input for a part, as the caller says.
    assert all(plan[:2] == ("given by a style", "up") for plan in missed), missed
