"""Numbers and bytes of the collectives that each version issues."""

from __future__ import annotations

from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes, MlpSizes
from benchmarks.timing import Effort
from benchmarks.torch_groups import fake_group
from benchmarks.torch_traffic import count_passes
from benchmarks.torch_versions import DTENSORS, HYPER_PARALLEL, TUNED, llama_versions, mlp_versions
from benchmarks.traffic import differences

__all__ = ["run"]

RANKS = 4


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
            counted = {version.name: count_passes(version) for version in versions}
            table = Table(title, ["version", "forward", "forward and backward"])
            table.rows = [[name, str(forward), str(both)] for name, (forward, both) in counted.items()]
            result.tables.append(table)
            for name in (HYPER_PARALLEL, DTENSORS):
                what = f"{title}: kinds of collectives that differ from hand-written, {name}"
                result.goals.append(Goal(what, differences(counted[name], counted[TUNED]), 0, strict=True))
    return result
