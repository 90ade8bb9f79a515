"""``hyper-parallel explain`` and ``hyper-parallel dry-run``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hyper_parallel import ContextParallel
from hyper_parallel.cli.output import UsageError, show
from hyper_parallel.cli.specifications import bytes_of, inputs_of, mesh_of, model_of, plan_of, ranks_of, said_of
from hyper_parallel.planning import DryRun, DryStepError, dry_run, explain, machine_of, search
from hyper_parallel.planning.llama import MODELS

__all__ = ["batch_of_a_rank", "given_by", "run_dry_run", "run_explain", "told"]


def run_explain(arguments: argparse.Namespace) -> int:
    """Show the effect of the plan on the model; return 1 if keys of the plan match nothing."""
    mesh = mesh_of(arguments.mesh)
    _check_file(arguments.svg)
    model, plan, inputs = given_by(arguments, arguments.batch)
    with told():
        found = explain(model, mesh, plan, *inputs, rank=arguments.rank, backward=not arguments.forward_only)
    _save(arguments.svg, found.to_svg)
    show(f"{found}\n\n{found.table()}" if arguments.table else str(found), found.as_dict(), arguments.json)
    return 1 if found.unmatched else 0


def run_dry_run(arguments: argparse.Namespace) -> int:
    """Show memory, communication and time, or with ``--search`` the best configurations; return the exit status."""
    _check_file(arguments.svg)
    began = time.perf_counter()
    mesh = mesh_of(arguments.mesh)
    limit = bytes_of(arguments.memory) if arguments.memory else None
    if not arguments.search and (arguments.svg or arguments.memory):
        raise UsageError("--svg and --memory need --search. Without --search, use --json")
    if (arguments.sequences and not arguments.search) or (arguments.cp and not arguments.sequences):
        raise UsageError("--sequences needs --search, and --cp needs --sequences")
    try:
        machine = machine_of(arguments.machine)
    except ValueError as error:
        raise UsageError(f"--machine: {error}") from error
    options: dict[str, Any] = {
        "machine": machine,
        "optimizer": arguments.optimizer,
        "data_parallel": None if arguments.data_parallel == "none" else arguments.data_parallel,
        "mixed_precision": arguments.mixed_precision,
    }
    if arguments.search:
        model, plan, batch = given_by(arguments, arguments.batch)
        plans = {"plan": plan}
        if arguments.model in MODELS and arguments.plan is None:
            plans = {
                "tp": plan_of(None, arguments.model, False),
                "tp + sequence": plan_of(None, arguments.model, True),
            }
        if arguments.sequences:
            options["sequences"] = {path: ContextParallel() for path in arguments.sequences}
            options["context_parallel"] = arguments.cp
        ranks = ranks_of(mesh)
        with told():
            ways = search(model, ranks, plans, *batch, memory=limit, **options)
        for way in ways.candidates:
            _check_optimizer(arguments.optimizer, way.run)
        _save(arguments.svg, ways.to_svg)
        text = f"{ways}\n\n{ranks} {machine.name}, {time.perf_counter() - began:.1f} s"
        show(text, ways.as_dict(), arguments.json)
        return 0 if ways.best is not None else 1
    model, plan, inputs = given_by(arguments, batch_of_a_rank(arguments.batch, mesh))
    recompute = arguments.recompute if arguments.recompute != "layers" else True
    with told():
        found = dry_run(model, mesh, plan, *inputs, recompute=recompute or False, **options)
    _check_optimizer(arguments.optimizer, found)
    show(f"{found}\n\ndone in {time.perf_counter() - began:.1f} s", found.as_dict(), arguments.json)
    return 0 if found.fits is not False and not found.unmatched else 1


def batch_of_a_rank(batch: int, mesh: dict[str, int]) -> int:
    """Return the number of sequences for one rank, from ``batch`` for all ranks together."""
    share = mesh.get("dp", 1)
    if batch % share:
        raise UsageError(f"--batch {batch} is not divisible by dp={share}")
    return batch // share


@contextmanager
def told() -> Iterator[None]:
    """Context manager that converts errors of the library, and of the user's model or plan, into UsageError. So no
    traceback is printed."""
    try:
        yield
    except (ValueError, TypeError, DryStepError) as error:
        raise UsageError(f"the plan cannot be applied: {error}") from error
    except Exception as error:
        raise UsageError(f"the model failed under this plan with this input: {said_of(error)}") from error


def _check_optimizer(name: str, run: DryRun | None) -> None:
    if run is not None and run.memory.optimizer is None and name.lower() != "none":
        raise UsageError(
            f"--optimizer {name}: the framework has no optimizer of this name. Pass 'none' for no optimizer"
        )


def _check_file(path: str | None) -> None:
    """Raise UsageError if a file cannot be written. The check runs before minutes of work, not after."""
    if path and not Path(path).absolute().parent.is_dir():
        raise UsageError(f"--svg {path}: the folder {Path(path).absolute().parent} does not exist")


def given_by(arguments: argparse.Namespace, batch: int) -> tuple[Any, Any, list[Any]]:
    """Return model, plan and inputs of a command. The default input has ``batch`` sequences."""
    for name, number in (("--batch", arguments.batch), ("--length", arguments.length)):
        if number < 1:
            raise UsageError(f"{name} {number}: the number must be at least 1")
    model = model_of(arguments.model, arguments.dtype)
    plan = plan_of(arguments.plan, arguments.model, not arguments.no_sequence)
    return model, plan, inputs_of(arguments.input, arguments.model, batch, arguments.length)


def _save(path: str | None, make: Any) -> None:
    if path:
        try:
            Path(path).write_text(make(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg {path} cannot be written: {error.strerror}") from error
