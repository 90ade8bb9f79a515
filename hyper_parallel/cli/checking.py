"""``hyper-parallel check``: find lines of a model that compute other values under a plan than on one device."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.cli.output import UsageError, show
from hyper_parallel.cli.planning import batch_of_a_rank, given_by, told
from hyper_parallel.cli.specifications import mesh_of, object_at
from hyper_parallel.planning import DryStep
from hyper_parallel.planning.llama import MODELS
from hyper_parallel.planning.step import apply_plan
from hyper_parallel.platform import get_platform

__all__ = ["run"]


def run(given: argparse.Namespace) -> int:
    """Print the findings and return the exit status: 1 for a problem, else 0.

    A problem is a certain finding whose value is used, or a key of the plan that matches no module. With ``--execute``,
    ranks whose values differ from one device are a problem too.

    Raises:
        UsageError: for arguments that cannot be combined.
    """
    if given.execute and given.model in MODELS:
        raise UsageError(
            f"--execute: {given.model} has shapes but no values. Pass package.module:function as the model, or leave "
            "--execute out"
        )
    mesh = mesh_of(given.mesh)
    model, plan, inputs = given_by(given, batch_of_a_rank(given.batch, mesh))
    with told():
        step = DryStep(model, mesh, plan, given.rank)
        step.run(*inputs, backward=not given.forward_only, prove=True)
    report: Any = step.plain_code
    unmatched = [f"the plan's {key!r} matches no module; {near}".rstrip("; ") for key, near in step.unmatched.items()]
    right = not unmatched and not any(finding.certain for finding in report.reached)
    lines, found = [str(report), *unmatched], {**report.as_dict(), "right": right, "unmatched": step.unmatched}
    if given.execute:
        checked = _executed(given, mesh, inputs)
        lines.append(str(checked))
        found["executed"] = checked.as_dict()
        right = right and bool(checked)
    show("\n".join(lines), {**found, "right": right}, given.json)
    return 0 if right else 1


def _executed(given: argparse.Namespace, mesh: dict[str, int], inputs: list[Any]) -> Any:
    """Compare a step on one device with a step on as many local processes as ``mesh`` has ranks. The findings in plain
    code come from an earlier run on one rank, and are not searched for again."""
    from hyper_parallel.testing.plan_check import check_plan  # which starts processes, and needs more imports

    platform = get_platform()
    arrays = [_values(tuple(x.shape), platform.is_floating_point(x)) for x in inputs]
    with told():
        return check_plan(
            _Model(_absolute(given.model), given.dtype),
            mesh,
            _Plan(_absolute(given.plan)),
            *arrays,
            prove=False,
        )


def _values(shape: tuple[int, ...], floating: bool) -> Any:
    """Return random values for an input. Integers are 0 and 1, which are tokens of every vocabulary."""
    draw = np.random.default_rng(0)
    return draw.standard_normal(shape).astype(np.float32) if floating else draw.integers(0, 2, shape)


def _absolute(text: str) -> str:
    place, _, name = text.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else text


@dataclass
class _Model:
    """A picklable function that makes the model in another process."""

    text: str
    dtype: str | None

    def __call__(self) -> Any:
        platform = get_platform()
        model = object_at(self.text)
        model = model if isinstance(model, platform.Module) else model()
        return model if self.dtype is None else model.to(platform.dtypes[self.dtype])


@dataclass
class _Plan:
    """A picklable function that applies the plan in another process."""

    text: str

    def __call__(self, model: Any, mesh: Any) -> Any:
        return apply_plan(model, mesh, object_at(self.text))
