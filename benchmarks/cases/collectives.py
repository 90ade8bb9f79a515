"""How many collectives each version issues, and with how many bytes."""

from __future__ import annotations

from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes, MlpSizes
from benchmarks.timing import Effort
from benchmarks.torch_groups import fake_group
from benchmarks.torch_traffic import Traffic, count_collectives
from benchmarks.torch_versions import DTENSORS, HYPER_PARALLEL, TUNED, Version, llama_versions, mlp_versions

__all__ = ["run"]

RANKS = 4


def _count(version: Version) -> tuple[Traffic, Traffic]:
    """In forward, and in forward and backward."""
    with count_collectives() as forward:
        version.forward()
    with count_collectives() as both:
        version.forward_and_backward()
    version.clear()
    return forward, both


def _differences(mine: tuple[Traffic, Traffic], theirs: tuple[Traffic, Traffic]) -> int:
    """Of how many kinds of collectives there are more or fewer, or with more or fewer bytes."""
    return sum(
        a.counts.get(name) != b.counts.get(name) or a.sizes.get(name) != b.sizes.get(name)
        for a, b in zip(mine, theirs, strict=True)
        for name in a.counts.keys() | b.counts.keys()
    )


def run(effort: Effort) -> Result:
    """The models of the cases `mlp` and `llama`."""
    del effort
    result = Result(
        "collectives",
        f"One step of the models of the other cases, {RANKS} ranks. Bytes are those of the tensors that a rank gives "
        "to the collectives.",
    )
    with fake_group(RANKS):
        for title, versions in (
            (f"MLP {MlpSizes()}", mlp_versions(MlpSizes())),
            ("Llama block", llama_versions(LlamaSizes())),
            ("Llama block, sequence parallel", llama_versions(LlamaSizes(), sequence_parallel=True)),
            ("Llama block, one token", llama_versions(LlamaSizes(), decode=True)),
        ):
            counted = {version.name: _count(version) for version in versions}
            table = Table(title, ["version", "forward", "forward and backward"])
            table.rows = [[name, str(forward), str(both)] for name, (forward, both) in counted.items()]
            result.tables.append(table)
            for name in (HYPER_PARALLEL, DTENSORS):
                what = f"{title}: kinds of collectives that differ from hand-written, {name}"
                result.goals.append(Goal(what, _differences(counted[name], counted[TUNED]), 0, strict=True))
    return result
