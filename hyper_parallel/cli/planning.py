"""``hyper-parallel explain`` and ``hyper-parallel dry-run``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from hyper_parallel.cli.output import UsageError, show
from hyper_parallel.cli.specifications import bytes_of, inputs_of, mesh_of, model_of, plan_of, ranks_of
from hyper_parallel.planning import DryStepError, dry_run, explain, machine_of, search
from hyper_parallel.planning.llama import MODELS

__all__ = ["run_dry_run", "run_explain"]


def run_explain(arguments: argparse.Namespace) -> int:
    """What the plan makes of the model."""
    mesh = mesh_of(arguments.mesh)
    model, plan, inputs = _given(arguments, arguments.batch)
    try:
        found = explain(model, mesh, plan, *inputs, rank=arguments.rank, backward=not arguments.forward_only)
    except (ValueError, TypeError, DryStepError) as error:
        raise UsageError(f"the plan is not possible: {error}") from error
    _save(arguments.svg, found.to_svg)
    show(f"{found}\n\n{found.table()}" if arguments.table else str(found), found.as_dict(), arguments.json)
    return 1 if found.unmatched else 0


def run_dry_run(arguments: argparse.Namespace) -> int:
    """Memory, communication and time; or the best ways to spread the model."""
    machine = machine_of(arguments.machine)
    options: dict[str, Any] = {
        "optimizer": arguments.optimizer,
        "data_parallel": None if arguments.data_parallel == "none" else arguments.data_parallel,
        "mixed_precision": arguments.mixed_precision,
    }
    began = time.perf_counter()
    try:
        if arguments.search:
            model, plan, batch = _given(arguments, arguments.batch)
            plans = {"plan": plan}
            if arguments.model in MODELS and arguments.plan is None:
                plans = {
                    "tp": plan_of(None, arguments.model, False),
                    "tp + sequence": plan_of(None, arguments.model, True),
                }
            limit = bytes_of(arguments.memory) if arguments.memory else None
            ranks = ranks_of(mesh_of(arguments.mesh))
            ways = search(model, ranks, plans, *batch, machine=machine, memory=limit, **options)
            _save(arguments.svg, ways.to_svg)
            text = f"{ways}\n\n{ranks} {machine.name}, {time.perf_counter() - began:.1f} s"
            show(text, ways.as_dict(), arguments.json)
            return 0 if ways.best is not None else 1
        mesh = mesh_of(arguments.mesh)
        share = mesh.get("dp", 1)
        if arguments.batch % share:
            raise UsageError(f"--batch {arguments.batch} does not divide over dp={share}")
        model, plan, inputs = _given(arguments, arguments.batch // share)
        recompute = arguments.recompute if arguments.recompute != "layers" else True
        found = dry_run(model, mesh, plan, *inputs, machine=machine, recompute=recompute or False, **options)
    except (ValueError, TypeError, DryStepError) as error:
        raise UsageError(f"the plan is not possible: {error}") from error
    show(f"{found}\n\ndone in {time.perf_counter() - began:.1f} s", found.as_dict(), arguments.json)
    return 0 if found.fits is not False and not found.unmatched else 1


def _given(arguments: argparse.Namespace, batch: int) -> tuple[Any, Any, list[Any]]:
    model = model_of(arguments.model, arguments.dtype)
    plan = plan_of(arguments.plan, arguments.model, not arguments.no_sequence)
    return model, plan, inputs_of(arguments.input, arguments.model, batch, arguments.length)


def _save(path: str | None, make: Any) -> None:
    if path:
        Path(path).write_text(make(), encoding="utf-8")
