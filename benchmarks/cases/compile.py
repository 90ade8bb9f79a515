"""A compiled Llama block against compiled hand-written code, and against torch's styles where these compile."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes
from benchmarks.timing import Effort, interleaved, ratios, spread
from benchmarks.torch_compiled import functional_pair, generated_code, operations_in
from benchmarks.torch_groups import fake_group
from benchmarks.torch_passes import FORWARD, FORWARD_AND_BACKWARD, step_of
from benchmarks.torch_versions import HYPER_PARALLEL, TEXTBOOK, TORCH, UNSHARDED, Version, llama_versions

__all__ = ["run"]

RANKS = 4
FUNCTIONAL = "hand-written, collectives for compilers"


def run(effort: Effort) -> Result:
    """Measure with and without sequence parallelism."""
    sizes = LlamaSizes()
    result = Result(
        "compile",
        f"Llama block compiled by Inductor, fullgraph=True: {sizes}; {RANKS} ranks of a fake process group, float32. "
        "Hand-written code is Megatron's: textbook with the functions of torch.distributed, and with the "
        "collectives that compilers know, written as functions. Operations are those of the programs "
        "that Inductor writes, forward and backward.",
    )
    with fake_group(RANKS):
        for title, sequence_parallel in (
            ("compiled Llama block", False),
            ("compiled Llama block, sequence parallel", True),
        ):
            _compare(title, sequence_parallel, sizes, effort, result)
    return result


def _compare(title: str, sequence_parallel: bool, sizes: LlamaSizes, effort: Effort, result: Result) -> None:
    found: dict[str, Version] = {}
    operations: dict[str, Counter[str]] = {}
    programs = Table(f"{title}: operations", ["version", "generated kernels", "kernels of torch", "collectives"])
    for version in _versions(sizes, sequence_parallel):
        name = version.name
        try:
            operations[name] = _compile(version)
        except Exception as error:
            reason = str(error).strip().splitlines()[0][:120]
            programs.rows.append([name, "does not compile", type(error).__name__, reason])
            continue
        found[name] = version
        seen = operations[name]
        sent = {kind: n for kind, n in sorted(seen.items()) if not kind.startswith(("generated", "kernels"))}
        programs.rows.append(
            [name, seen["generated kernels"], seen["kernels of torch"], ", ".join(f"{n} {k}" for k, n in sent.items())]
        )
    result.tables.append(programs)
    kernels = {name: seen["generated kernels"] + seen["kernels of torch"] for name, seen in operations.items()}
    if not sequence_parallel:  # there ours sums the norms' gradients in the graph
        result.goals.append(
            Goal(f"{title}: kernels against {FUNCTIONAL}", kernels[HYPER_PARALLEL], kernels[FUNCTIONAL], strict=True)
        )
    for passes in (FORWARD, FORWARD_AND_BACKWARD):
        times = interleaved({name: step_of(version, passes) for name, version in found.items()}, effort)
        own = ratios(times, FUNCTIONAL)
        table = Table(f"{title}: {passes}", ["version", "microseconds", f"ratio to {FUNCTIONAL}"])
        table.rows = [[name, spread(times[name]), spread(own[name])] for name in found]
        result.tables.append(table)
        median = spread(own[HYPER_PARALLEL])["median"]
        result.goals.append(Goal(f"{title}: {passes}: {HYPER_PARALLEL} to {FUNCTIONAL}", median, 1.05))


def _versions(sizes: LlamaSizes, sequence_parallel: bool) -> list[Version]:
    """The compiled versions. They leave out the call after backward that sums the norms' gradients: ours has that sum
    in the graph."""
    versions = {version.name: version for version in llama_versions(sizes, sequence_parallel)}
    again: Any = {version.name: version for version in llama_versions(sizes, sequence_parallel)}[TEXTBOOK]
    enter, leave = functional_pair(sequence_parallel)
    block = again.model
    for module in (block.attention, block.feed_forward):
        module.enter = enter
    for module in (block.attention.wo, block.feed_forward.w2):
        module.leave = leave
    again.name = FUNCTIONAL
    chosen = [versions[name] for name in (UNSHARDED, TEXTBOOK)] + [again] + [versions[HYPER_PARALLEL], versions[TORCH]]
    for version in chosen:
        version.block = None
    return chosen


def _compile(version: Version) -> Counter[str]:
    torch._dynamo.reset()
    version.model = torch.compile(version.model, fullgraph=True)
    with generated_code() as programs:
        version.forward_and_backward()
    version.clear()
    return sum((operations_in(program) for program in programs), Counter())
