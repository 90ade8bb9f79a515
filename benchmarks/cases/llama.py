"""A Llama block so small that arithmetic hardly counts, and a step of decoding."""

from __future__ import annotations

from benchmarks.report import Result
from benchmarks.sizes import LlamaSizes
from benchmarks.timing import Effort
from benchmarks.torch_groups import fake_group
from benchmarks.torch_passes import FORWARD, FORWARD_AND_BACKWARD, NO_GRAD, limits, time_pass
from benchmarks.torch_versions import llama_versions

__all__ = ["run"]

RANKS = 4


def run(effort: Effort, device: str = "cpu") -> Result:
    """Measure with and without sequence parallelism, and one token under no_grad."""
    sizes = LlamaSizes()
    result = Result(
        "llama",
        f"Llama block: {sizes}; {RANKS} ranks of a fake process group, float32. Decoding: one token, {sizes.cached} "
        "before it in the cache.",
    )
    with fake_group(RANKS):
        for title, sequence_parallel, goals in (
            ("Llama block", False, (None, 1.05, 1.5)),
            ("Llama block, sequence parallel", True, (0.95, 1.05, 1.5)),
        ):
            versions = llama_versions(sizes, sequence_parallel, device=device)
            for name in (FORWARD, FORWARD_AND_BACKWARD):
                table = time_pass(title, name, versions, effort, device)
                result.tables.append(table)
                result.goals += limits(table, *goals)
        versions = llama_versions(sizes, decode=True, device=device)
        result.tables.append(time_pass("Llama block, one token", NO_GRAD, versions, effort, device))
    return result
